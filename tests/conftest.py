"""The groups of ranks that run test bodies, of one world at a time for all directories."""

from __future__ import annotations

import compileall
import os
import shlex
import sys
from collections.abc import Generator, Iterator

import pytest
from _pytest.assertion import rewrite

from ringtrain.runtime.machine import CLAIMS_VARIABLE
from ringtrain.terminal.startup import skipping_garbage_collection
from tests.world.fork_server import SERVERS, SWITCH, hand_on_no_ignored_signals
from tests.world.group import Group, close_group, launch_of
from tests.world.processes import BACKEND

# oneDNN compiles a kernel for each shape of a matrix: a tenth of the CPU time of all tests, whose models are tiny.
# NumPy's threads wait for work in a loop. Programs that start cold use both, as those of a user do.
QUICKER = {"TF_ENABLE_ONEDNN_OPTS": "0", "OPENBLAS_NUM_THREADS": "1"}
if os.environ.get(SWITCH) != "1":
    os.environ.update(QUICKER | os.environ)


# No other run on this machine, and no other run of the tests, holds the cores of the tests' ranks.
os.environ.setdefault(CLAIMS_VARIABLE, f"ringtrain-tests-{os.getpid()}")


def pytest_configure() -> None:
    hand_on_no_ignored_signals()


def compile_tests(config: pytest.Config) -> None:
    """Compile the tests, with pytest's assertions and without, where that has not been done.

    Otherwise each worker compiles all of them, and each rank those that it runs, all at the same time.
    """
    state = config.stash.get(rewrite.assertstate_key, None)  # None with --assert=plain
    for path in (config.rootpath / "tests").rglob("*.py"):
        compileall.compile_file(path, quiet=2)
        compiled = rewrite.get_cache_dir(path) / f"{path.stem}{rewrite.PYC_TAIL}"
        if state and path.name.startswith(("test_", "conftest")) and not rewrite._read_pyc(path, compiled):
            source_hash, code = rewrite._rewrite_test(path, config)
            rewrite._write_pyc(state, code, source_hash, compiled)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Start the fork server of all workers of pytest-xdist, and let it fork the workers."""
    options = session.config.option
    if getattr(options, "numprocesses", None) and os.environ.get(SWITCH) != "1":
        SERVERS.start()
        compile_tests(session.config)
        SERVERS.wait_for(os.uname().nodename)
        options.tx = [f"popen//python={shlex.quote(sys.executable)} -m tests.worker" for _ in options.tx]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let the tests of one world follow each other, so that its ranks start once; leave out what is of native sums
    where the ranks are to sum by Horovod."""
    if os.environ.get(BACKEND) == "horovod":
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("native")])
        items[:] = [item for item in items if not item.get_closest_marker("native")]
    mine = [item for item in items if launch_of(item) is not None]
    if mine:
        launches = list(dict.fromkeys(id(launch_of(item)) for item in mine))
        place = items.index(mine[0])
        others = [item for item in items if launch_of(item) is None]
        mine.sort(key=lambda item: launches.index(id(launch_of(item))))
        items[:] = [*others[:place], *mine, *others[place:]]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exempt the million objects of TensorFlow and Keras from garbage collection."""
    with skipping_garbage_collection():
        return (yield)


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the last world's ranks when its tests are done: waiting, they take half a core from those that follow."""
    if nextitem is not None and launch_of(item) is not None and launch_of(nextitem) is None:
        close_group()


@pytest.fixture(autouse=True)
def cold_starts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start the programs of a test that is marked ``cold`` as a user does."""
    if request.node.get_closest_marker("cold"):
        monkeypatch.setenv(SWITCH, "1")
        for name in QUICKER:
            monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def world(request: pytest.FixtureRequest) -> Iterator[Group]:
    """The ranks of a world (see `tests.world.group.on_ranks`)."""
    group = Group(request.param)
    yield group
    group.close()


@pytest.fixture(autouse=True)
def restored_keras_types() -> Iterator[None]:
    """Restore Keras' types, which a job or a model of a test sets for the whole process."""
    yield
    keras = sys.modules.get("keras")
    if keras is None or not hasattr(keras, "config"):
        return
    if keras.config.floatx() != "float32":
        keras.config.set_floatx("float32")
    if keras.config.dtype_policy().name != "float32":
        keras.config.set_dtype_policy("float32")
