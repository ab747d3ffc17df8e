"""Where a result comes from: commit, machine, versions, and how busy the machine was."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from ringtrain.errors import UsageError
from ringtrain.runtime.versions import package_version

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("tensorflow", "keras", "horovod", "mpi4py", "numpy")
# The package keras may come from the distribution keras-nightly.
PRINT_VERSIONS = """
import importlib.metadata, sys
distributions = importlib.metadata.packages_distributions()
print(", ".join(f"{name} {importlib.metadata.version(distributions[name][0])}" for name in sys.argv[1:]))
"""


def describe_machine() -> dict[str, Any]:
    cpu = re.search(r"^model name\s*:\s*(.*)", _read("/proc/cpuinfo"), re.MULTILINE)
    memory = re.search(r"^MemTotal:\s*(\d+)", _read("/proc/meminfo"), re.MULTILINE)
    return {
        "processor": cpu[1] if cpu else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int(memory[1]) / 2**20, 1) if memory else None,
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "python": platform.python_version(),
        "mpi": _first_line(["mpirun", "--version"]),
        **{name: package_version(name) for name in PACKAGES},
    }


def describe_environment(python: Path) -> str:
    """Versions of another environment, such as ``tensorflow 2.18.1, keras 3.10.0``."""
    try:
        command = [str(python), "-c", PRINT_VERSIONS, *PACKAGES]
        finished = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise UsageError(
            f"other_python {str(python)!r} is no interpreter with all of {', '.join(PACKAGES)} "
            f"({type(error).__name__}). Give .venv/bin/python of a checkout after make setup."
        ) from None
    return finished.stdout.strip()


def describe_commit() -> dict[str, Any]:
    """None outside a git checkout."""
    commit = _first_line(["git", "rev-parse", "--short=12", "HEAD"])
    changed = _first_line(["git", "status", "--porcelain"])
    return {"commit": commit or None, "is_changed": bool(changed)}


def shorten(word: str) -> str:
    """Remove this machine's paths from a word of a command line."""
    if word == sys.executable:
        return "python"
    path = Path(word)
    if path.is_absolute():
        return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name
    return word


def read_load() -> list[float]:
    """Average numbers of runnable processes over 1, 5 and 15 minutes."""
    return [round(value, 2) for value in os.getloadavg()]


def find_claimed_cores() -> list[int]:
    """Cores of other runs of ringtrain, which the measured runs would share."""
    return sorted({int(core) for core in re.findall(r"@ringtrain/core/(\d+)", _read("/proc/net/unix"))})


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _first_line(command: list[str]) -> str:
    try:
        finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return next(iter(finished.stdout.splitlines()), "") if finished.returncode == 0 else ""
