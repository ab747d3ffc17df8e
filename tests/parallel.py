"""A pytest plugin: which tests may run at the same time, on the workers of pytest-xdist.

Tests of one process come first, each on any worker. Those that start ranks are of three kinds, each for one worker:
bodies that run in the long-lived groups of ranks (`tests.world.group`), jobs of Slurm, and all others, which start
programs that claim cores. Together they keep the cores busy, since programs and jobs often wait. A test that is marked
``alone`` measures time: no other test runs meanwhile.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.world.group import launch_of

BY_THEMSELVES = "tests/unit/"
TOGETHER = {  # tests that share something: a browser, a compiled program, a cluster
    "tests/report/": "report",
    "tests/native/": "native",
    "tests/faults/test_fuzz.py": "fuzz",
    "tests/faults/test_foreign_files.py": "fuzz",
    "tests/slurm/": "slurm",
}
ORDER = ("", "native", "fuzz", "bodies", "programs", "report", "slurm")


def scope_of(item: pytest.Item) -> str:
    """The tests that one worker runs together with this one; empty if that is this one alone."""
    if item.nodeid.startswith(BY_THEMSELVES):
        return ""
    for start, scope in TOGETHER.items():
        if item.nodeid.startswith(start):
            return scope
    return "programs" if launch_of(item) is None else "bodies"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort the tests by scope; tell the scheduler, which is in another process, the scopes."""
    items.sort(key=lambda item: ORDER.index(scope_of(item)))
    if hasattr(config, "workerinput"):
        scopes = {item.nodeid: scope_of(item) for item in items if scope_of(item)}
        file = _shared_file("scopes.json")
        temporary = file.with_name(f"{file.name}-{os.getpid()}")
        temporary.write_text(json.dumps(scopes))
        temporary.replace(file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores, for those that wait (``-n auto``)."""
    return len(os.sched_getaffinity(0)) + 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Schedule whole scopes, in the order of the tests."""
    from xdist.scheduler import LoadScopeScheduling

    class ByScope(LoadScopeScheduling):
        def schedule(self) -> None:
            self.scopes = json.loads(_shared_file("scopes.json").read_text())
            super().schedule()

        def _split_scope(self, nodeid: str) -> str:
            scope: str = self.scopes.get(nodeid, nodeid)
            return scope

    config.option.loadscopereorder = False
    return ByScope(config, log)


@pytest.fixture(autouse=True)
def turn(request: pytest.FixtureRequest) -> Iterator[None]:
    """Hold back this test while another one is alone, or this one until it is."""
    is_alone = request.node.get_closest_marker("alone") is not None
    with _shared_file("turnstile").open("w") as turnstile, _shared_file("tests").open("w") as tests:
        fcntl.flock(turnstile, fcntl.LOCK_EX)  # whoever waits to be alone lets no further test begin
        fcntl.flock(tests, fcntl.LOCK_EX if is_alone else fcntl.LOCK_SH)
        fcntl.flock(turnstile, fcntl.LOCK_UN)
        yield


def _shared_file(name: str) -> Path:
    return Path(os.environ["TMPDIR"], name)
