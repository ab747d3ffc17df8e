"""Virtual environments that lack something, or have another version of it."""

import fnmatch
import subprocess
import sys
import sysconfig
from pathlib import Path

from tests.world.processes import REPOSITORY

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


def install(python: Path, lock: str) -> None:
    """Add a lock's packages to an environment, in a directory after its links.

    uv would write a package that is linked through its link, into the environment of this interpreter.
    """
    [packages] = (python.parents[1] / "lib").glob("python3*/site-packages")
    target = packages.with_name("locked")
    uv_install(python, "--requirements", lock, "--target", str(target))
    (packages / "locked.pth").write_text(f"{target}\n")


def uv_install(python: Path, *arguments: str) -> None:
    """Install into the environment of ``python``; uv does so in a sixth of pip's time."""
    script = 'source .ci/lib.sh; find_uv "$1"; "$UV" pip install --quiet --no-deps --python "$@"'
    subprocess.run(
        ["bash", "-euc", script, "install", str(python), *arguments], check=True, timeout=300, cwd=REPOSITORY
    )
