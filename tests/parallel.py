"""A pytest plugin that decides which tests may run at the same time on the workers of pytest-xdist.

The longest come first. Jobs of Slurm run on one worker, since they share a cluster. Bodies that run in the long-lived
groups of ranks (`tests.world.group`) run on three: those for two ranks of each directory, and all others. Programs
follow, file by file, on whichever worker is free, with the tests that mostly sleep; and at the end the tests of one
process, each on any worker, so that no worker is without work. A test that is marked ``alone`` measures time: no other
test runs meanwhile, and no group of ranks waits.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Generator
from pathlib import Path
from typing import IO, Any

import pytest

from tests.world.group import OVER_MPI, close_group, launch_of

INDEPENDENT_TESTS = "tests/unit/"
SCOPE_BY_PATH = {  # tests that share something: a browser, a compiled program, a cluster, a large model
    "tests/report/": "report",
    "tests/native/": "native",
    "tests/unit/test_inception.py": "inception",
    "tests/faults/test_fuzz.py": "fuzz",
    "tests/faults/test_foreign_files.py": "fuzz",
    "tests/slurm/": "slurm",
}
FILES_OF_WAITING_TESTS = tuple(  # that mostly sleep
    f"tests/unit/{name}.py"
    for name in (
        "test_watchdog",
        "test_lease",
        "launch/test_family",
        "test_hub",
        "test_doctor_probes",
        "test_time_limit",
    )
)
FILES_OF_LONG_TESTS = ("tests/faults/test_matrix.py", "tests/world/test_other_versions.py")
# Slow tests of programs that take minutes: none may still run when all other tests are done.
FILES_OF_LONGEST_TESTS = tuple(f"tests/world/test_{name}.py" for name in ("other_versions", "verify", "wheel"))
ALONE = "alone"
BODIES_OF_TWO = "bodies of 2 ranks in tests/"
FIRST = ("slurm", f"{BODIES_OF_TWO}world", f"{BODIES_OF_TWO}keras", "bodies", "report", "fuzz", "native", "inception")


def scope_of(item: pytest.Item) -> str:
    """Name of the group of tests that one worker must run; empty if the test can run on any worker."""
    if item.get_closest_marker("alone"):
        return ALONE
    for start, scope in SCOPE_BY_PATH.items():
        if item.nodeid.startswith(start):
            return scope
    if item.nodeid.startswith(INDEPENDENT_TESTS):
        return ""
    launch = launch_of(item)
    if launch is None:
        return item.nodeid if item.nodeid.startswith(FILES_OF_LONG_TESTS) else item.nodeid.partition("::")[0]
    return f"{BODIES_OF_TWO}{item.nodeid.split('/')[1]}" if launch is OVER_MPI[2] else "bodies"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort the tests by scope; pass the scopes to the scheduler, which is in another process."""
    items.sort(key=_position_of)
    if hasattr(config, "workerinput"):
        scopes = {item.nodeid: scope_of(item) for item in items if scope_of(item)}
        file = _shared_file("scopes.json")
        temporary = file.with_name(f"{file.name}-{os.getpid()}")
        temporary.write_text(json.dumps(scopes))
        temporary.replace(file)


def _position_of(item: pytest.Item) -> float:
    """Tests that must run alone come last, when no long one is under way."""
    scope = scope_of(item)
    if scope == ALONE:
        return len(FIRST) + 2
    if not scope and not item.nodeid.startswith(FILES_OF_WAITING_TESTS):
        return len(FIRST) + 1
    if scope in FIRST:
        return FIRST.index(scope)
    is_longest = item.nodeid.startswith(FILES_OF_LONGEST_TESTS) and item.get_closest_marker("slow") is not None
    return len(FIRST) - 0.5 * is_longest


def pytest_configure(config: pytest.Config) -> None:
    """Let processes that become ready wait for their turn: with less preemption, ranks that share a core are faster."""
    if hasattr(config, "workerinput"):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


@pytest.hookimpl(optionalhook=True, tryfirst=True)  # pytest-xdist has its own
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Number of workers of ``-n auto``: more than cores, since ranks often wait, those of slow tests less often."""
    return len(os.sched_getaffinity(0)) + (2 if "not slow" in config.option.markexpr else 1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Schedule whole scopes, in the order of the tests."""
    from xdist.scheduler import LoadScopeScheduling

    class ByScope(LoadScopeScheduling):
        def schedule(self) -> None:
            scopes = _shared_file("scopes.json")  # missing if pytest has collected nothing
            self.scopes = json.loads(scopes.read_text()) if scopes.exists() else {}
            has_new_node = self.collection is not None
            super().schedule()
            if has_new_node:  # a worker starts a test only when it has the next one as well
                for node in self.nodes:
                    self._reschedule(node)

        def remove_node(self, node: Any) -> str | None:
            """Queue the unfinished scopes of a worker, but not the test that was running when it died.

            Upstream queues that test again, so that it kills one worker after another. It also queues finished scopes:
            a new worker that is assigned one waits for ever.
            """
            scopes = self.assigned_work.pop(node)
            unfinished = (test for tests in scopes.values() for test, is_done in tests.items() if not is_done)
            crashed = next(unfinished, None)
            if crashed is None:
                return None
            scopes[self._split_scope(crashed)][crashed] = True
            self.workqueue.update({scope: tests for scope, tests in scopes.items() if not all(tests.values())})
            for other in self.nodes:
                self._reschedule(other)
            return crashed

        def _reschedule(self, node: Any) -> None:
            if node in self.registered_collections:  # else it still collects, and schedule() follows
                super()._reschedule(node)

        def _split_scope(self, nodeid: str) -> str:
            scope: str = self.scopes.get(nodeid, nodeid)
            return scope

    config.option.loadscopereorder = False
    return ByScope(config, log)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Run a test marked ``alone``, with its fixtures, while no other test runs."""
    is_alone = item.get_closest_marker("alone") is not None
    with _shared_file("turnstile").open("w") as turnstile, _shared_file("tests").open("w") as tests:
        if not _can_lock(turnstile, seconds=0.2):  # another test waits to be alone, and lets no further one start
            close_group()
            fcntl.flock(turnstile, fcntl.LOCK_EX)
        fcntl.flock(tests, fcntl.LOCK_EX if is_alone else fcntl.LOCK_SH)
        fcntl.flock(turnstile, fcntl.LOCK_UN)
        try:
            return (yield)
        finally:
            fcntl.flock(tests, fcntl.LOCK_UN)  # a forked child may still hold the file open


def _can_lock(file: IO[str], *, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.01)
        else:
            return True
    return False


def _shared_file(name: str) -> Path:
    return Path(os.environ["TMPDIR"], name)
