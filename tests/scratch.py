"""A pytest plugin that removes the temporary files of killed processes.

A killed rank leaves what TensorFlow's AutoGraph has written to TMPDIR, and Open MPI's segments of shared memory. All
processes of a test run therefore have a TMPDIR that is removed at its end; so are the segments that no living process
has mapped. pytest's own directories, which hold what failed tests have left, stay.
"""

import os
import shutil
import sys
import tempfile

import pytest

from ringtrain.runtime.segments import remove_dead_segments


class Scratch:
    """Owns the temporary directory of a test run."""

    def __init__(self) -> None:
        self._before = os.environ.get("TMPDIR")
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
        self._directory = tempfile.mkdtemp(prefix="ringtrain-")
        os.chmod(self._directory, 0o755)  # as /tmp: tests look at files as another user
        os.environ["TMPDIR"] = tempfile.tempdir = self._directory
        # If two mpiruns create Open MPI's directory at the same moment, one fails. It stays while it is not empty.
        host = os.uname().nodename.partition(".")[0]  # as Open MPI names it
        sessions = f"{self._directory}/ompi.{host}.{os.geteuid()}"
        os.mkdir(sessions, 0o700)
        os.mkdir(f"{sessions}/kept")
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each process compiles all tests and ringtrain anew
        sys.dont_write_bytecode = False

    def pytest_unconfigure(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)
        tempfile.tempdir = None
        if self._before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = self._before
        remove_dead_segments()


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # the workers of pytest-xdist inherit the directory
        config.pluginmanager.register(Scratch(), "scratch")
