"""A pytest plugin that removes the temporary files of killed processes.

A killed rank leaves what TensorFlow's AutoGraph has written to TMPDIR, and Open MPI's segments of shared memory. All
processes of a test run therefore have a TMPDIR that is removed at its end; segments that were made meanwhile, and that
no living process has mapped, go with it. pytest's own directories, which hold what failed tests have left, stay.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path

import pytest

SHARED_MEMORY = Path("/dev/shm")
SECONDS_TO_MAP = 5.0  # a program that has just created a segment has not mapped it yet


def list_segments() -> set[Path]:
    """Open MPI's segments of shared memory, those of all programs of this machine."""
    return set(SHARED_MEMORY.glob("vader_segment.*"))


def list_mapped() -> set[Path]:
    """Files of shared memory that living processes have mapped."""
    mapped = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            lines = maps.read_text(errors="replace").splitlines()
        except OSError:  # the process has ended
            continue
        mapped |= {Path(line.split(maxsplit=5)[-1]) for line in lines if f"{SHARED_MEMORY}/" in line}
    return mapped


class Scratch:
    """Owns the temporary directory of a test run."""

    def __init__(self) -> None:
        self._segments, self._start = list_segments(), time.time()
        self._before = os.environ.get("TMPDIR")
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
        self._directory = tempfile.mkdtemp(prefix="ringtrain-")
        os.chmod(self._directory, 0o755)  # as /tmp: tests look at files as another user
        os.environ["TMPDIR"] = tempfile.tempdir = self._directory

    def pytest_unconfigure(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)
        tempfile.tempdir = None
        if self._before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = self._before
        for segment in list_segments() - self._segments - list_mapped():
            with contextlib.suppress(FileNotFoundError):
                status = segment.stat()
                is_ours = status.st_uid == os.getuid() and status.st_mtime > self._start
                if is_ours and time.time() - status.st_mtime > SECONDS_TO_MAP:
                    segment.unlink()


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # the workers of pytest-xdist inherit the directory
        config.pluginmanager.register(Scratch(), "scratch")
