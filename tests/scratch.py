"""A pytest plugin: no file of a killed process outlives the tests.

A killed rank leaves what TensorFlow's AutoGraph has written to TMPDIR, and Open MPI's segments of shared memory. All
processes of a test run therefore have a TMPDIR that is removed at its end; segments that were made meanwhile, and that
no living process has mapped, go with it. pytest's own directories, which hold what failed tests have left, stay.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest

SHARED_MEMORY = Path("/dev/shm")


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
        self._segments = list_segments()
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
        self._directory = tempfile.mkdtemp(prefix="ringtrain-")
        os.chmod(self._directory, 0o755)  # as /tmp: tests look at files as another user
        os.environ["TMPDIR"] = tempfile.tempdir = self._directory

    def pytest_unconfigure(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)
        new = list_segments() - self._segments
        for segment in new - list_mapped():
            segment.unlink(missing_ok=True)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # the workers of pytest-xdist inherit the directory
        config.pluginmanager.register(Scratch(), "scratch")
