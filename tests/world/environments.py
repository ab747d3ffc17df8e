"""Virtual environments that lack something, or have another version of it."""

from __future__ import annotations

import fnmatch
import subprocess
import sys
import sysconfig
from pathlib import Path

SITE_PACKAGES = Path(sysconfig.get_paths()["purelib"])


def make_environment(directory: Path, *, without: str) -> tuple[Path, Path]:
    """A virtual environment with the packages of this one, but for some.

    Returns:
        its interpreter, and its site-packages.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(directory)], check=True)
    [packages] = (directory / "lib").glob("python3*/site-packages")
    for entry in SITE_PACKAGES.iterdir():
        if not fnmatch.fnmatch(entry.name, without):
            (packages / entry.name).symlink_to(entry)
    return directory / "bin/python", packages
