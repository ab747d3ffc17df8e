"""Pipes that are full: what is printed waits for a reader that is slow, and not for one that stands still."""

import errno
import io
import os
import select
import threading
import time
from collections.abc import Iterator

import pytest

from ringtrain.runtime import stdio
from ringtrain.runtime.stdio import FaultTolerantStream

LINE = "x" * 99 + "\n"
NUM_LINES = 2000  # more than a pipe holds


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Its reading and its writing end."""
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def text_stream(descriptor: int) -> io.TextIOWrapper:
    """As ``keep_streams`` makes them."""
    return io.TextIOWrapper(io.BufferedWriter(FaultTolerantStream(descriptor, "<stdout>")), line_buffering=True)


def read_all(descriptor: int) -> bytes:
    """What a pipe holds."""
    data = b""
    while select.select([descriptor], [], [], 0)[0]:
        data += os.read(descriptor, 65536)
    return data


@pytest.mark.parametrize("waits", [True, False], ids=["blocking", "non-blocking"])
def test_a_slow_reader_gets_everything(pipe: tuple[int, int], waits: bool) -> None:
    """A pipe is non-blocking where another process that has it made it so, such as Node."""
    reader, writer = pipe
    os.set_blocking(writer, waits)
    data: list[bytes] = []

    def read() -> None:
        while sum(map(len, data)) < NUM_LINES * len(LINE):
            time.sleep(0.01)
            data.append(os.read(reader, 65536))

    thread = threading.Thread(target=read)
    thread.start()
    stream = text_stream(writer)
    for _ in range(NUM_LINES):
        stream.write(LINE)
    stream.flush()
    thread.join()
    assert b"".join(data) == NUM_LINES * LINE.encode()


def test_a_blocked_reader_does_not_block_the_run(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``| less`` and Ctrl-S: the run continues, says so once, and prints again once it is read again."""
    reader, writer = pipe
    warnings: list[str] = []
    monkeypatch.setattr(stdio, "PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr(stdio, "_warn", warnings.append)
    stream = text_stream(writer)
    for _ in range(NUM_LINES):
        stream.write(LINE)
    assert warnings == ["stdout is not read any more: what does not fit is left out until it is."]
    seen = read_all(reader).decode()
    left_out = NUM_LINES * len(LINE) - len(seen)
    assert left_out > 0
    stream.write("again\n")
    gap = f"\nringtrain: warning: {left_out:,} bytes of stdout are left out here.\n"
    assert read_all(reader).decode() == f"{gap}again\n"
    assert len(warnings) == 1


def test_a_stream_lost_before_the_run_is_reported_to_the_run(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where ``head`` has its lines before there is a run directory."""
    monkeypatch.setattr(stdio, "_warn", None)
    monkeypatch.setattr(stdio, "_untold", [])
    descriptor = os.dup(pipe[1])
    stdio.give_up(descriptor, "stdout", OSError(errno.EPIPE, "Broken pipe"))
    os.close(descriptor)
    warnings: list[str] = []
    stdio.warn_by(warnings.append)
    stdio.warn_by(warnings.append)  # once is enough
    assert warnings == ["stdout cannot be written any more (Broken pipe): the program continues without it."]
