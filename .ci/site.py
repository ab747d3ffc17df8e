"""MkDocs' hook: the site has the pages of docs/, and whatever in the repository these link to, README.md as the first.

In the repository a link leads from file to file, so that it works there as well; here it follows to where the site has
that file.
"""

import os
import re
from pathlib import Path
from posixpath import dirname, relpath
from typing import Any

from mkdocs.structure.files import File, Files  # type: ignore[import-not-found]  # in .tools/docs alone

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)[^)#\s]+")

_repository_paths: dict[str, str] = {}  # by where the site has them


def on_files(files: Files, *, config: Any) -> Files:
    """Add what lies outside of docs/."""
    _repository_paths.update({file.src_uri: f"docs/{file.src_uri}" for file in files})
    waiting = ["README.md", *_repository_paths.values()]
    seen = set()
    while waiting:
        path = waiting.pop()
        if path in seen or not (ROOT / path).exists():
            continue  # MkDocs warns of a link that leads to nothing
        seen.add(path)
        if path.endswith(".md"):
            waiting += [_target(path, link) for link in LINK.findall((ROOT / path).read_text(encoding="utf-8"))]
        if _site_path(path) not in _repository_paths:
            _repository_paths[_site_path(path)] = path
            files.append(File.generated(config, _site_path(path), content=_content(ROOT / path)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Let the links of a page lead to where the site has their targets."""
    place = page.file.src_uri
    path = _repository_paths[place]
    return LINK.sub(lambda link: relpath(_site_path(_target(path, link[0])), dirname(place) or "."), markdown)


def _target(path: str, link: str) -> str:
    """The repository's path that a link of a file means."""
    return os.path.normpath(os.path.join(dirname(path), link))


def _site_path(path: str) -> str:
    if path == "README.md":
        return "index.md"
    if (ROOT / path).is_dir():
        return f"{path}/index.md"
    return path.removeprefix("docs/")


def _content(path: Path) -> bytes:
    if path.is_file():
        return path.read_bytes()
    listings = [f"## {file.name}\n\n```python\n{file.read_text(encoding='utf-8')}```\n" for file in path.glob("*.py")]
    return "\n".join([f"# {path.name.capitalize()}\n", *sorted(listings)]).encode()
