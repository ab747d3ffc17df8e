"""Watchdogs of many ranks: light processes without TensorFlow, forked from one, that report to rank 0 as ranks do.

Rank 0's address reaches them by a file instead of a collective: 512 processes with MPI and TensorFlow do not fit into
the memory of a workstation. It counts what no public interface shows.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
import statistics
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any

from ringtrain.runtime import activity
from ringtrain.runtime.activity import Phase
from ringtrain.runtime.world import World
from ringtrain.watchdog.thread import Watchdog

RESULT = "result.json"
HANG_TIMEOUT, STEP_SECONDS, STEADY_SECONDS, LIMIT_SECONDS = 60.0, 0.5, 10.0, 300.0
LOST_RANKS = 5
FORK = multiprocessing.get_context("fork")


class CountingWatchdog(Watchdog):
    """Counts what rank 0 hears."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.messages = self.num_bytes = 0
        self.lost_at: dict[int, float] = {}

    def _take(self, rank: int, message: dict[str, Any] | None) -> None:
        super()._take(rank, message)
        if message is None:
            self.lost_at[rank] = time.monotonic()
        self.messages += 1
        self.num_bytes += len(json.dumps(message)) + 1


def measure(size: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="ringtrain-hub-") as name:
        directory, barrier, pids = Path(name), FORK.Barrier(size), FORK.Array("i", size, lock=False)
        ranks = [FORK.Process(target=run_rank, args=(rank, pids, directory, barrier)) for rank in range(size)]
        try:
            for process in ranks:
                process.start()
            ranks[0].join(LIMIT_SECONDS)
            if ranks[0].exitcode != 0:
                raise RuntimeError(f"rank 0 of {size} ended with {ranks[0].exitcode}")
            return {"ranks": size, **json.loads((directory / RESULT).read_text())}
        finally:
            (directory / RESULT).touch()
            end = time.monotonic() + LIMIT_SECONDS
            for process in ranks:
                process.join(max(0.0, end - time.monotonic()))
                process.kill()


def run_rank(rank: int, pids: Any, directory: Path, barrier: Any) -> None:
    pids[rank] = os.getpid()
    world = World(rank=rank, size=len(pids), local_rank=rank, local_size=len(pids), node="node", launcher="fork")
    first, result = directory / "first.json", directory / RESULT

    def gather(collective: Any, value: dict[str, Any], *, name: str) -> list[Any]:
        if world.is_rank0:
            first.write_text(json.dumps(value))
        barrier.wait(LIMIT_SECONDS)
        return [json.loads(first.read_text()), *([{"node": world.node}] * (world.size - 1))]

    sys.modules["ringtrain.collectives"] = types.SimpleNamespace(all_gather_object=gather)  # type: ignore[assignment]
    watchdog = CountingWatchdog(world, HANG_TIMEOUT, report=lambda error: None, warn=lambda message: None)
    watchdog.start()
    watchdog.meet(None)  # type: ignore[arg-type]
    if world.is_rank0:
        result.write_text(json.dumps(measure_rank0(watchdog, pids)))
    step = 0
    while not result.exists():  # not by an event: its waiters were killed
        activity.set_phase(Phase.STEP, step := step + 1)
        time.sleep(STEP_SECONDS)
    watchdog.stop()
    os._exit(0)


def measure_rank0(watchdog: CountingWatchdog, pids: Any) -> dict[str, float]:
    """What rank 0 sees of the others; it ends some of them."""
    begin = time.monotonic()
    wait_until(lambda: watchdog._has_met and not watchdog._unheard)
    heard_sec, before = time.monotonic() - begin, cpu_seconds()
    messages, num_bytes = watchdog.messages, watchdog.num_bytes
    for step in range(int(STEADY_SECONDS / STEP_SECONDS)):
        activity.set_phase(Phase.STEP, step + 1)
        time.sleep(STEP_SECONDS)
    figures = {
        "seconds until all watchdogs are connected": heard_sec,
        "share of a core for rank 0's watchdog": (cpu_seconds() - before) / STEADY_SECONDS,
        "messages a second to rank 0's watchdog": (watchdog.messages - messages) / STEADY_SECONDS,
        "bytes a second to rank 0's watchdog": (watchdog.num_bytes - num_bytes) / STEADY_SECONDS,
        "sockets of rank 0's watchdog": sum(each.is_socket() for each in Path("/proc/self/fd").iterdir()),
        "threads of rank 0's watchdog": len(os.listdir("/proc/self/task")) - 1,
    }
    seconds = []
    for rank in range(1, len(pids))[-LOST_RANKS:]:
        killed_at = time.monotonic()
        os.kill(pids[rank], signal.SIGKILL)
        wait_until(lambda rank=rank: rank in watchdog.lost_at)
        seconds.append(watchdog.lost_at[rank] - killed_at)
    return figures | {"seconds to notice a killed rank": statistics.median(seconds)}


def wait_until(condition: Any) -> None:
    end = time.monotonic() + LIMIT_SECONDS / 3
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"nothing came within {LIMIT_SECONDS / 3:g} s")
        time.sleep(0.001)


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
