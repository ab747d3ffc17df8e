"""A run that is watched while it trains, and interrupted on purpose."""

import contextlib
import hashlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.world.processes import REPOSITORY, MarkedProcess, clean_environment

WORKLOAD = REPOSITORY / "tests/world/workloads/lasting.py"
STAYING = WORKLOAD.with_name("staying.py")
START_SECONDS = 60.0
NUM_SAMPLES = 50


class Run:
    """``mpirun -np N python -m ringtrain``, or another start of it, on the workload ``Lasting``, under way."""

    def __init__(
        self,
        out: Path,
        *flags: str,
        np: int = 2,
        start: Sequence[str] | None = None,
        env: Mapping[str, str] | None = None,
        log: Path | None = None,
        workload: str = f"{WORKLOAD}:Lasting",
    ) -> None:
        """``start`` is the command up to ringtrain's flags; mpirun's, for ``np`` ranks, by default."""
        self.out = out
        self.log = log or out.with_name(f"{out.name}.log")
        if start is None:
            mpirun = ["mpirun", "-np", str(np), "--oversubscribe", "--bind-to", "none"] if np > 1 else []
            start = [*mpirun, sys.executable, "-m", "ringtrain"]
        command = [*start, "--workload", workload, "--out", str(out)]
        with self.log.open("ab") as log_file:
            self._process = MarkedProcess(
                [*command, *flags], clean_environment(**(env or {})), stdout=log_file, stderr=subprocess.STDOUT
            )

    def wait_for(self, what: str, is_there: Callable[[], bool], timeout: float = START_SECONDS) -> None:
        """Wait until something has happened, while the run is under way."""
        end = time.monotonic() + timeout
        while True:
            begin = time.monotonic()
            if is_there():
                return
            assert self._process.popen.poll() is None, f"ended before {what}:\n{self.text()}"
            assert begin < end, f"no {what} after {timeout} s:\n{self.text()}"
            # To look takes a tenth of a core at most, which the ranks want; a save is soon over.
            time.sleep(min(0.2, max(0.002, 9 * (time.monotonic() - begin))))

    def wait_for_step(self, step: int) -> None:
        self.wait_for(f"step {step}", lambda: last_step(self.out) >= step)

    def wait_for_starts(self, starts: int) -> None:
        """Wait until the run directory has been opened for training so often."""
        self.wait_for(f"start {starts}", lambda: len(events(self.out, "start")) >= starts)

    def wait_for_checkpoint_after(self, step: int) -> None:
        self.wait_for(
            f"a checkpoint after step {step}", lambda: any(e["step"] > step for e in events(self.out, "checkpoint"))
        )

    def wait_for_save(self) -> None:
        """Wait until a checkpoint is being written."""
        self.wait_for("a save", lambda: any((self.out / "checkpoints").glob(".writing-*")))

    def kill(self) -> None:
        """End all processes at one stroke."""
        self.send(self._process.pids(), signal.SIGKILL)
        self.end()

    def signal_rank(self, rank: int, number: signal.Signals) -> None:
        os.kill(self.rank_pid(rank), number)

    def rank_pid(self, rank: int) -> int:
        [pid] = [pid for pid in self._process.pids() if self._is_rank(pid, rank)]
        return pid

    def pids_of(self, program: str) -> list[int]:
        """The processes of this run in whose command line a word is the name of ``program``."""
        return [
            pid for pid in self._process.pids() if program in (word.rpartition("/")[2] for word in _command_line(pid))
        ]

    def signal_launcher(self, number: signal.Signals) -> None:
        os.kill(self.launcher_pid, number)

    @property
    def launcher_pid(self) -> int:
        return self._process.popen.pid

    def send(self, pids: Sequence[int], number: signal.Signals) -> None:
        """Signal processes of this run; one that has just ended is no error."""
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def wait(self, timeout: float = START_SECONDS) -> int:
        """The launcher's exit code, once the run has ended."""
        try:
            code = self._process.popen.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not at its end after {timeout} s:\n{self.text()}") from None
        assert self._process.wait_until_gone(10), "processes live on after the launcher ended"
        return code

    def wait_until_gone(self, timeout: float = START_SECONDS) -> None:
        """Wait for the ends of all processes, where the launcher has been killed."""
        assert self._process.wait_until_gone(timeout), f"processes live on after {timeout} s:\n{self.text()}"

    @property
    def is_under_way(self) -> bool:
        """Whether the launcher lives."""
        return self._process.popen.poll() is None

    def end(self) -> None:
        self._process.end()

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def _is_rank(self, pid: int, rank: int) -> bool:
        command = _command_line(pid)
        is_script = any(word.endswith("/kept.py") for word in command)  # of tests/keras
        if not ("ringtrain" in command or is_script) or "launch.rank" in command:
            return False
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return False
        return any(f"{name}={rank}".encode() in variables for name in ("OMPI_COMM_WORLD_RANK", "HOROVOD_RANK"))


def _command_line(pid: int) -> list[str]:
    """A process's argv; empty if it is gone, or only the stand-in of one (see `tests.world.fork_server`)."""
    try:
        if Path(f"/proc/{pid}/comm").read_text().strip() == "stand-in":
            return []
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return []


@contextlib.contextmanager
def running(out: Path, *flags: str, **options: Any) -> Iterator[Run]:
    """A run that is ended at the end, however the test goes."""
    run = Run(out, *flags, **options)
    try:
        yield run
    finally:
        run.end()


def run_to_end(out: Path, *flags: str, **options: Any) -> Run:
    """Train to the end."""
    with running(out, *flags, **options) as run:
        assert run.wait(120) == 0, run.text()
    return run


def events(out: Path, event: str = "") -> list[dict[str, Any]]:
    """The whole lines of metrics.jsonl."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for line in (out / "metrics.jsonl").read_text().splitlines():
            with contextlib.suppress(ValueError):  # being written
                found.append(json.loads(line))
    return [item for item in found if not event or item["event"] == event]


def last_step(out: Path) -> int:
    return max((item["step"] for item in events(out, "train")), default=0)


def read_tensorboard(out: Path) -> Any:
    """TensorBoard's own reader of a run, which has the same numbers as metrics.jsonl, each step once."""
    import numpy as np
    import tensorflow as tf
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(out / "tensorboard"), size_guidance={"tensors": 0})
    reader.Reload()
    for kind in ("train", "eval"):
        expected = [(e["step"], np.float32(e["loss"])) for e in events(out, kind)]
        found = [(e.step, np.float32(tf.make_ndarray(e.tensor_proto))) for e in reader.Tensors(f"{kind}/loss")]
        assert found == expected, kind
    return reader


def ledger(out: Path) -> list[list[int]]:
    """The samples of each step of the surviving history, in order."""
    from tests.world.workloads.lasting import read_ledger

    steps = []
    seen = 0
    for item in events(out, "train"):
        samples = item["samples_seen"] - seen
        seen = item["samples_seen"]
        steps.append(read_ledger(item, samples))
        assert len(steps[-1]) == samples
    return steps


def assert_history_is_whole(out: Path, *, epochs: int, steps: int) -> None:
    """Every step once, and every sample once in each epoch."""
    assert [item["step"] for item in events(out, "train")] == list(range(1, steps + 1))
    steps_of = ledger(out)
    per_epoch = steps // epochs
    for epoch in range(epochs):
        samples = sorted(itertools.chain(*steps_of[epoch * per_epoch : (epoch + 1) * per_epoch]))
        assert samples == list(range(NUM_SAMPLES)), f"epoch {epoch}"


def digest(checkpoint: Path) -> str:
    return hashlib.sha256((checkpoint / "variables.bin").read_bytes()).hexdigest()


def final_checkpoint(out: Path, steps: int) -> Path:
    return out / "checkpoints" / f"step-{steps:09d}"
