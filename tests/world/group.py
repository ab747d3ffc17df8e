"""Groups of real ranks that run test bodies: started once for a world size, and anew after a failure.

    @on_ranks(1, 2, 3)
    def test_sum_adds_over_all_ranks(collective): ...

is a test that runs its body in 1, then 2, then 3 processes. In a body, `collective` is that of the rank; all other
parameters are the test's own and must be JSON values.
"""

from __future__ import annotations

import inspect
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.world.fork_server import LESS_POLLING
from tests.world.processes import BACKEND, MarkedProcess, clean_environment

START_TIMEOUT_SECONDS = 120
BODY_TIMEOUT_SECONDS = 60
# Once a rank has failed, this long for the others to say how they fared; they may wait for it for ever.
GRACE_SECONDS = 2.0
SOCKET_DIRECTORY = "RINGTRAIN_TEST_SOCKET_DIRECTORY"

_running: list[Group] = []  # at most one: idle ranks of another world would take the cores from this one


class BodyFailedError(AssertionError):
    """A test body failed on some rank, or was not done in time."""


@dataclass(frozen=True)
class Launch:
    """How a group of ranks is started.

    Attributes:
        size: number of ranks.
        launcher: ``"mpirun"`` or ``"horovodrun --gloo"``.
        env: variables beside the usual ones.
        is_bare: True for ranks without TensorFlow and without a collective, which start at once.
    """

    size: int
    launcher: str = "mpirun"
    env: Mapping[str, str] = field(default_factory=dict, hash=False)
    is_bare: bool = False

    def __str__(self) -> str:
        if BACKEND in self.env:
            return f"{self.size} without Horovod"
        return f"{self.size} over Gloo" if self.launcher == "horovodrun --gloo" else str(self.size)

    def command(self) -> list[str]:
        program = [sys.executable, "-m", "tests.world.rank_main", *(["--bare"] if self.is_bare else [])]
        if self.launcher == "horovodrun --gloo":
            return ["horovodrun", "--gloo", "-np", str(self.size), *program]
        return ["mpirun", "-np", str(self.size), "--oversubscribe", "--bind-to", "none", *program]


GLOO = Launch(2, "horovodrun --gloo")
BY_MPI = Launch(3, env={BACKEND: "native"})  # without Horovod
# pytest keeps a fixture from test to test where its parameter is the very same object.
OVER_MPI = {size: Launch(size) for size in (1, 2, 3)}


def on_ranks(
    *worlds: int | Launch, slow: Collection[int] = (), timeout: float = BODY_TIMEOUT_SECONDS
) -> Callable[[Callable[..., Any]], Any]:
    """Make a test body a test that runs it in a group of ranks, once for each of these worlds.

    In those of the sizes ``slow`` it is run with the slow tests alone.
    """
    launches = [OVER_MPI[world] if isinstance(world, int) else world for world in worlds]
    params = [*launches, *(pytest.param(OVER_MPI[size], marks=pytest.mark.slow) for size in slow)]

    def decorate(body: Callable[..., Any]) -> Any:
        def test(world: Group, **arguments: Any) -> None:
            __tracebackhide__ = True
            world.run(f"{body.__module__}:{body.__qualname__}", arguments, timeout=timeout)

        first, *parameters = inspect.signature(body).parameters.values()
        assert first.name == "collective", f"the first parameter of {body.__qualname__} must be 'collective'"
        world = inspect.Parameter("world", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = inspect.Signature([world, *parameters])  # type: ignore[attr-defined]
        test.__name__, test.__qualname__, test.__doc__ = body.__name__, body.__qualname__, body.__doc__
        test.__module__ = body.__module__
        test.body = body  # type: ignore[attr-defined]
        return pytest.mark.parametrize("world", params, indirect=True, scope="session", ids=str)(test)

    return decorate


class Group:
    """The ranks of one world. They start with the first body, and start anew with the next one after a failure."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self._process: MarkedProcess | None = None
        self._connections: list[socket.socket] = []
        self._directory = Path()

    def run(
        self, body: str, arguments: Mapping[str, Any] | None = None, *, timeout: float = BODY_TIMEOUT_SECONDS
    ) -> list[Any]:
        """Run a body on all ranks.

        Args:
            body: ``module:function``.
            arguments: its arguments after ``collective``: JSON values.

        Returns:
            What it returned on each rank.

        Raises:
            BodyFailedError: it raised on some rank, or was not done after ``timeout`` seconds. The ranks are gone then.
        """
        __tracebackhide__ = True
        if self._process is None:
            self._start()
        request = json.dumps({"body": body, "arguments": dict(arguments or {})}).encode() + b"\n"
        for connection in self._connections:
            connection.sendall(request)
        replies = self._collect_replies(time.monotonic() + timeout)
        if all(reply is not None and "result" in reply for reply in replies):
            return [reply["result"] for reply in replies if reply is not None]
        text = self._describe_failure(replies, timeout)
        self.end()
        raise BodyFailedError(text)

    def close(self) -> None:
        """Let the ranks leave in good order."""
        if self._process is not None:
            for connection in self._connections:
                connection.close()
            self._process.wait_until_gone(15)
            self.end()

    def end(self) -> None:
        """End the ranks, whatever they are doing."""
        if self._process is not None:
            self._process.end()
            self._process = None
            _running.remove(self)
        for connection in self._connections:
            connection.close()
        self._connections = []
        if self._directory != Path():
            shutil.rmtree(self._directory)
            self._directory = Path()

    def _start(self) -> None:
        close_group()
        self._directory = Path(tempfile.mkdtemp(prefix="ringtrain-world-"))
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(self._directory / "socket"))
        listener.listen(self.launch.size)
        own = {SOCKET_DIRECTORY: str(self._directory), **LESS_POLLING}
        env = clean_environment(**own, **self.launch.env)
        with (self._directory / "output").open("wb") as output:
            self._process = MarkedProcess(self.launch.command(), env, stdout=output, stderr=subprocess.STDOUT)
            _running.append(self)
        try:
            self._connections = self._accept(listener, time.monotonic() + START_TIMEOUT_SECONDS)
        except BaseException:
            self.end()
            raise
        finally:
            listener.close()

    def _accept(self, listener: socket.socket, end: float) -> list[socket.socket]:
        """The ranks' connections, in the order of the ranks, once all are ready."""
        assert self._process is not None
        exited = os.pidfd_open(self._process.popen.pid)
        connections: dict[int, socket.socket] = {}
        try:
            while len(connections) < self.launch.size:
                watched: list[socket.socket | int] = [listener, exited]
                readable, _, _ = select.select(watched, [], [], max(0.0, end - time.monotonic()))
                if listener not in readable:
                    why = "ended" if exited in readable else "were not ready in time"
                    raise BodyFailedError(f"the ranks of world {self.launch} {why}:\n{self._output()}")
                connection, _ = listener.accept()
                connections[json.loads(_read_line(connection))["rank"]] = connection
        finally:
            os.close(exited)
        return [connections[rank] for rank in range(self.launch.size)]

    def _collect_replies(self, end: float) -> list[dict[str, Any] | None]:
        """Each rank's reply; None where none came in time."""
        replies: list[dict[str, Any] | None] = [None] * self.launch.size
        missing = set(range(self.launch.size))
        while missing:
            waiting = [self._connections[rank] for rank in missing]
            readable, _, _ = select.select(waiting, [], [], max(0.0, end - time.monotonic()))
            if not readable:
                break
            for rank in [rank for rank in missing if self._connections[rank] in readable]:
                line = _read_line(self._connections[rank])
                replies[rank] = json.loads(line) if line else {"traceback": "the process ended\n"}
                missing.discard(rank)
                if "result" not in (replies[rank] or {}):
                    end = min(end, time.monotonic() + GRACE_SECONDS)
        return replies

    def _describe_failure(self, replies: list[dict[str, Any] | None], timeout: float) -> str:
        parts = []
        for rank, reply in enumerate(replies):
            if reply is None:
                parts.append(f"rank {rank} was not done (of {timeout} s); it was here:\n{self._stacks(rank)}")
            elif "traceback" in reply:
                parts.append(f"rank {rank} failed:\n{reply['traceback']}")
        return f"world {self.launch}: " + "\n".join(parts) + f"\noutput of the ranks:\n{self._output()}"

    def _stacks(self, rank: int) -> str:
        """Where a rank is: it writes its stacks when it gets SIGUSR1."""
        pid = int((self._directory / f"pid-{rank}").read_text())
        file = self._directory / f"stacks-{rank}"
        os.kill(pid, signal.SIGUSR1)
        end = time.monotonic() + GRACE_SECONDS
        while "rank_main" not in file.read_text() and time.monotonic() < end:
            time.sleep(0.01)  # nothing tells that a signal handler has written its file
        return file.read_text()

    def _output(self) -> str:
        return (self._directory / "output").read_text(errors="replace")[-3000:]


def launch_of(item: pytest.Item) -> Launch | None:
    """The world of a test that runs in a group of ranks."""
    callspec = getattr(item, "callspec", None)
    launch = callspec.params.get("world") if callspec else None
    return launch if isinstance(launch, Launch) else None


def close_group() -> None:
    """Let the ranks that wait for a body leave, if there are any."""
    for group in list(_running):
        group.close()


def _read_line(connection: socket.socket) -> bytes:
    """One line, or nothing where the other end has closed."""
    line = bytearray()
    while not line.endswith(b"\n"):
        data = connection.recv(1 << 16)
        if not data:
            return b""
        line += data
    return bytes(line)
