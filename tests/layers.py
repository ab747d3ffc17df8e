"""The packages of ringtrain and their imports, read from the source.

    python -m tests.layers

redraws the picture in ``docs/architecture.md``: the packages in their order, with an arrow for each import between two
packages that no longer path implies.
"""

import ast
import importlib.util
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/architecture.md"
PACKAGES = ("ringtrain", "launch")
PICTURE = re.compile(r"(?<=```mermaid\n).*?(?=```)", re.DOTALL)


def read_packages(page: str) -> list[str]:
    """The packages in the order of the page's table."""
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    return [name.removesuffix("/").removesuffix(".py") for row in rows for name in re.findall(r"`([^`]+)`", row)]


def find_modules(root: Path) -> dict[str, Path]:
    """All modules of the packages below a directory, by their dotted names."""
    files = [file for package in PACKAGES for file in sorted((root / package).rglob("*.py"))]
    parts = {file: file.relative_to(root).with_suffix("").parts for file in files}
    return {".".join(p[:-1] if p[-1] == "__init__" else p): file for file, p in parts.items()}


def package_of(module: str) -> str:
    """The package of a module, such as ``data`` for ``ringtrain.data.formats.tfrecord``; ``launch`` is one."""
    package, *rest = module.split(".")
    return rest[0] if package == "ringtrain" and rest else package


def imported_names(nodes: list[ast.AST], package: str) -> Iterator[str]:
    """Every name that the nodes import, inside functions and for types alone as well."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            yield from (f"{base}.{alias.name}" for alias in node.names)


def read_imports(modules: Mapping[str, Path]) -> dict[str, set[str]]:
    """Each module with those of the others that it imports, or names in a text of its own, as for ``import_module``.

    That Python runs a package's own file before the file of a module in it is no import of that module's.
    """
    imports: dict[str, set[str]] = {}
    for module, file in modules.items():
        package = module if file.name == "__init__.py" else module.rpartition(".")[0]
        nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
        constants = {str(node.value) for node in nodes if isinstance(node, ast.Constant)}
        texts = constants & modules.keys() - {*PACKAGES}
        found = {_module_of(name, modules) for name in imported_names(nodes, package)} - {""}
        imports[module] = (found | texts) - {module}
    return imports


def _module_of(name: str, modules: Mapping[str, Path]) -> str:
    """The module that a name belongs to; empty: to none of these."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name


def draw(packages: list[str], imports: Mapping[str, set[str]]) -> str:
    """The packages as a Mermaid flowchart, users below what they use."""
    uses: dict[str, set[str]] = {package: set() for package in packages}
    for module, others in imports.items():
        if package_of(module) in uses:
            uses[package_of(module)] |= {package_of(other) for other in others} & set(packages) - {package_of(module)}
    reached: dict[str, set[str]] = {}  # by any path; a package imports only from those above it
    for package in packages:
        reached[package] = uses[package].union(*(reached[other] for other in uses[package]))
    arrows = [
        f"    {package} --> {other}"
        for package in packages
        for other in sorted(uses[package], key=packages.index)
        if not any(other in reached[between] for between in uses[package])
    ]
    return "\n".join(["flowchart BT", *(f"    {package}" for package in packages), *arrows, ""])


def main() -> None:
    """Draw the page's picture anew."""
    page = PAGE.read_text(encoding="utf-8")
    picture = draw(read_packages(page), read_imports(find_modules(ROOT)))
    PAGE.write_text(PICTURE.sub(lambda _: picture, page), encoding="utf-8")


if __name__ == "__main__":
    main()
