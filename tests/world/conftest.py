"""Whole runs, for the tests of this directory."""

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from tests.world.group import close_group
from tests.world.processes import REPOSITORY, Finished, clean_environment, run_command
from tests.world.running import run_to_end

RunRingtrain = Callable[..., Finished]
LAUNCHERS = {
    None: [],
    "mpirun": ["mpirun", "--oversubscribe", "--bind-to", "none", "-np"],
    "horovodrun": ["horovodrun", "-np"],
    "horovodrun --gloo": ["horovodrun", "--gloo", "-np"],
}


@pytest.fixture(scope="session")
def undisturbed() -> Path:
    """A run of two ranks that nobody disturbs, one for all workers of pytest-xdist. No test may change it."""
    out = Path(os.environ["TMPDIR"], "undisturbed", "run")
    out.parent.mkdir(exist_ok=True)
    with out.with_name("lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (out / "report.html").exists():
            run_to_end(out, "--deterministic", "true")
    return out


@pytest.fixture
def run_ringtrain() -> RunRingtrain:
    """Run ``python -m ringtrain`` to its end, under a launcher or none; no process of it is left behind."""
    close_group()

    def run(
        arguments: Sequence[str],
        *,
        launcher: str | None = None,
        np: int = 2,
        env: Mapping[str, str] | None = None,
        timeout: float = 120,
        terminal: bool = False,
        cwd: Path = REPOSITORY,
        python: Sequence[str] = ("-m", "ringtrain"),
    ) -> Finished:
        start = [*LAUNCHERS[launcher], *([str(np)] if launcher else [])]
        command = [*start, sys.executable, *python, *map(str, arguments)]
        try:
            finished = run_command(
                command, env=clean_environment(**(env or {})), timeout=timeout, terminal=terminal, cwd=cwd
            )
        except subprocess.TimeoutExpired as error:
            pytest.fail(f"{error}\n{(error.stdout or b'').decode()}\n{(error.stderr or b'').decode()}")
        assert not finished.left_behind, f"processes of {command} lived on after it ended"
        return finished

    return run
