"""Groups of ranks, and whole runs, for the tests of this directory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.world.group import Group, Launch
from tests.world.processes import REPOSITORY, Finished, clean_environment, run_command

RunRingtrain = Callable[..., Finished]
LAUNCHERS = {
    None: [],
    "mpirun": ["mpirun", "--oversubscribe", "--bind-to", "none", "-np"],
    "horovodrun": ["horovodrun", "-np"],
    "horovodrun --gloo": ["horovodrun", "--gloo", "-np"],
}

_living: list[Group] = []  # at most one: idle ranks of another world would take the cores from this one


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the tests of one world follow each other, so that its ranks start once."""
    mine = [item for item in items if launch_of(item) is not None]
    if mine:
        launches = list(dict.fromkeys(id(launch_of(item)) for item in mine))
        place = items.index(mine[0])
        others = [item for item in items if launch_of(item) is None]
        mine.sort(key=lambda item: launches.index(id(launch_of(item))))
        items[:] = [*others[:place], *mine, *others[place:]]


def launch_of(item: pytest.Item) -> Launch | None:
    """The world of a test that runs in a group of ranks."""
    callspec = getattr(item, "callspec", None)
    launch = callspec.params.get("world") if callspec else None
    return launch if isinstance(launch, Launch) else None


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the last world's ranks when its tests are done: waiting, they take half a core from those that follow."""
    if nextitem is not None and launch_of(item) is not None and launch_of(nextitem) is None:
        for group in _living:
            group.close()


@pytest.fixture(scope="session")
def world(request: pytest.FixtureRequest) -> Iterator[Group]:
    """The ranks of a world (see `tests.world.group.on_ranks`)."""
    group = Group(request.param)
    _living.append(group)
    yield group
    _living.remove(group)
    group.close()


@pytest.fixture
def run_ringtrain() -> RunRingtrain:
    """Run ``python -m ringtrain`` to its end, under a launcher or none; no process of it is left behind."""
    for group in _living:
        group.close()

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
