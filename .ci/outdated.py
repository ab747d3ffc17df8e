"""Compare installed packages, as uv lists them on standard input, with the ranges of pyproject.toml.

The tests run with the versions of the locks: a release that is in none of them was not seen.
"""

import json
import re
import sys
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def describe(package: dict[str, str], requirement: Requirement, locks: dict[str, str]) -> str:
    """A line for a package that has a newer release than the one installed."""
    newest = package["latest_version"]
    entry = re.compile(rf"^{re.escape(package['name'])}=={re.escape(newest)}[ \\]", flags=re.MULTILINE | re.IGNORECASE)
    seen = [name for name, text in locks.items() if entry.search(text)]
    if seen:
        verdict = f"seen: {', '.join(seen)}"
    elif newest in requirement.specifier:
        verdict = "not seen; allowed: remove the locks, run make lock and make test-all"
    else:
        verdict = f"not seen; outside of {requirement.specifier}, whose reason is in pyproject.toml"
    return f"{package['name']:<18} {package['version']:<12} {newest:<12} {verdict}"


def main() -> None:
    """Print a line for each direct dependency that has a newer release."""
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    stated = [
        *project["dependencies"],
        *(text for extra in project["optional-dependencies"].values() for text in extra),
    ]
    direct = {canonicalize_name(item.name): item for item in reversed([*map(Requirement, stated)])}
    wholly_tested = (Path("requirements.lock"), *sorted(Path(".ci/locks").glob("tensorflow-*.lock")))
    locks = {path.name: path.read_text() for path in wholly_tested}
    newer = [item for item in json.load(sys.stdin) if canonicalize_name(item["name"]) in direct]
    lines = [describe(item, direct[canonicalize_name(item["name"])], locks) for item in newer]
    if lines:
        print(f"{'package':<18} {'installed':<12} {'newest':<12}", *lines, sep="\n")
    else:
        print("Of every direct dependency the newest release is installed, and the tests run with it.")


main()
