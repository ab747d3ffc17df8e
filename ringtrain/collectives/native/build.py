"""Hatchling build hook for the native library."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

HERE = Path(__file__).parent
LIBRARY = HERE / "libringtrain.so"
FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-ffp-contract=off", "-Wall", "-Wextra",
    "-fno-trapping-math",  # vectorizes conversions of halves
    "-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=2", "-fstack-protector-strong", "-Wl,-z,relro,-z,now,-z,noexecstack",
    "-static-libstdc++", "-static-libgcc", "-Wl,--exclude-libs,ALL",  # TensorFlow has its own C++ library
)  # fmt: skip


def compile_library() -> str | None:
    """Return the reason of a failure; a stale library is removed."""
    compiler = shlex.split(os.environ.get("CXX") or "g++")
    sources = sorted(map(str, HERE.glob("*.cc")))
    aside = LIBRARY.with_suffix(f".{os.getpid()}")
    try:
        finished = subprocess.run(
            [*compiler, *FLAGS, *sources, "-o", str(aside)], capture_output=True, text=True, check=False
        )
        if finished.returncode == 0:
            aside.replace(LIBRARY)  # open copies remain valid
            return None
        reason = f"{compiler[0]} ended with {finished.returncode}: {finished.stderr.strip()}"
    except OSError as error:
        reason = str(error)
    with contextlib.suppress(OSError):
        LIBRARY.unlink(missing_ok=True)
    return reason


class NativeBuildHook(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        reason = compile_library()
        if reason is not None:
            print(f"ringtrain: the native backend is left out, {reason}", file=sys.stderr)
            return
        build_data["artifacts"].append(str(LIBRARY.relative_to(self.root)))
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{_platform()}"


def _platform() -> str:
    """Return the tag of the oldest sufficient glibc (PEP 600)."""
    versions = re.findall(rb"GLIBC_2\.(\d+)", LIBRARY.read_bytes())
    libc = f"manylinux_2_{max(map(int, versions))}" if versions else "linux"
    return f"{libc}_{platform.machine()}"
