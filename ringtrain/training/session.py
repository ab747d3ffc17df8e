"""An active run: its directory, checkpoints, logs and requests to stop. The loop and ``fit`` share it."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import keras
import numpy.typing as npt
import tensorflow as tf

from ringtrain.collectives import Collective, all_gather_object, run_on_rank0
from ringtrain.config import Config
from ringtrain.errors import Cause, PreemptedError, RingtrainError, UsageError
from ringtrain.files.atomic import WRITING, replacing
from ringtrain.files.bounded import make_directory
from ringtrain.guard.preflight import package_versions
from ringtrain.messages.defects import describe_defect, strip_nodes
from ringtrain.messages.rules import shorten
from ringtrain.report.event_files import FRAME_BYTES, iterate_records, list_event_files, parse_event
from ringtrain.run.checkpoint import Checkpoint
from ringtrain.run.directory import RunDirectoryError
from ringtrain.run.lease import find_job
from ringtrain.run.resume import OpenedRun, Progress, Start, describe_way_on
from ringtrain.runtime.activity import Phase, set_phase
from ringtrain.runtime.machine import format_cores, read_peak_memory
from ringtrain.runtime.run_record import is_signal_passed_on
from ringtrain.runtime.stopping import StopRequests
from ringtrain.terminal.console import Console
from ringtrain.training.ending import write_warning
from ringtrain.training.saving import CheckpointWriter, describe_run, take_snapshot
from ringtrain.workloads.base import Histogram, Images

MAX_RANKS = 2000  # limits the line length in metrics.jsonl
Variables = Mapping[str, keras.Variable]
Arrays = Mapping[str, npt.NDArray[Any]]


class RunSession:
    """An active run. ``config``, ``start`` and ``progress`` are equal on all ranks; rank 0 writes the files."""

    def __init__(
        self,
        config: Config,
        collective: Collective,
        *,
        start: Start | None = None,
        opened: OpenedRun | None = None,
        requests: StopRequests | None = None,
        console: Console | None = None,
    ) -> None:
        """``opened`` is None on ranks other than 0; without ``start`` no run directory is used."""
        self.config, self.collective = config, collective
        self.start = start or Start(path="")
        self.path = Path(self.start.path) if start else None
        self.progress = Progress(**self.start.progress)
        self.requests = requests or StopRequests()  # to this rank
        self.console = console or Console(None, is_terminal=False)
        self.directory = opened.directory if opened else None
        self.checkpoint = opened.checkpoint if opened else None
        self._identity = opened.identity if opened else None
        self._events: EventFiles | None = None
        self._writer: CheckpointWriter | None = None
        self._facts: dict[str, Any] = {}  # in every checkpoint

    def begin(self, **facts: Any) -> None:
        """Open the files, and from now on handle requests to stop after a step.

        ``facts``: about the samples, for checkpoints.
        """
        set_phase(Phase.OPEN, self.start.step, takes_long=True)
        if self.directory is not None:
            step = self.start.step
            self._events = EventFiles(self.directory.tensorboard, first_step=step)
            self._writer = CheckpointWriter(self.directory, keep=self.config.keep, last_step=step)
            self._facts = describe_run(self.config, self.collective.world.size, self._identity) | facts
        self.requests.start_training(self._confirm)

    @property
    def last_saved_step(self) -> int:
        """Step to resume from, or 0; known on rank 0."""
        return self._writer.last_step if self._writer else 0

    def _confirm(self, reason: str) -> None:
        """Thread-safe. No message if the sender of the request has confirmed it."""
        if is_signal_passed_on():
            return
        saved = self.last_saved_step
        self.console.line(
            f"{reason}: saving after this step, then exiting. If the launcher ends the ranks before that, "
            + (f"the run resumes from the checkpoint of step {saved}." if saved else "nothing is saved.")
        )

    def write_start(self, model: keras.Model, *, launcher: str, **more: Any) -> None:
        """Write the ``start`` event. Collective."""
        world, ranks = self.collective.world, describe_ranks(self.collective)
        if self.directory is None:
            return
        self.directory.write_event(
            "start",
            workload=self.config.workload,
            size=world.size,
            first_step=self.start.step,
            parameters=model.count_params(),
            trained_shapes=[list(variable.shape) for variable in model.trainable_variables],
            **more,
            node=world.node,
            launcher=launcher,
            job=find_job(os.environ),
            git_revision=self._facts.get("git_revision"),
            ranks=ranks,
            versions=package_versions(),
        )

    def log(self, event: str, values: Mapping[str, float], *, step: int, **facts: Any) -> None:
        """Write an event on rank 0; ``values`` also for TensorBoard."""
        if self.directory is not None and self._events is not None:
            if event == "train" and self.directory.interrupted_at is not None:
                facts["restart_sec"] = round(time.time() - self.directory.interrupted_at, 3)
                self.console.line(f"restarted: {facts['restart_sec']:.1f} s from the last logged step to step {step}")
                self.directory.interrupted_at = None
            self.directory.write_event(event, step=step, **facts, **values)
            self._events.scalars(event, values, step=step)

    def show(self, summaries: Mapping[str, Images | Histogram], *, step: int) -> None:
        """On rank 0."""
        if self._events is not None:
            self._events.show(summaries, step=step)

    def warn(self, message: str) -> None:
        """On rank 0."""
        if self.directory is not None:
            write_warning(self.directory, self.console, message)

    def save(self, step: int, variables: Variables, extra: Arrays, *, as_step: bool, as_best: bool) -> None:
        """Start to write a checkpoint on rank 0."""
        if self._writer is not None and self._events is not None:
            self._events.flush()
            self._writer.save(self._take_snapshot(step, variables, extra), as_step=as_step, as_best=as_best)

    def finish(self, step: int, variables: Variables, extra: Arrays, seconds: Mapping[str, float]) -> str:
        """Write the last checkpoint; return the directory of checkpoints, after the save on all ranks. Collective.

        ``seconds``: this rank's time by part of the step.
        """
        usage = gather_usage(self.collective, seconds)

        def save_on_rank0() -> str:
            assert self._writer is not None
            assert self.directory is not None
            self.directory.at_end["ranks"] = usage
            with contextlib.suppress(RingtrainError):  # the checkpoint matters more
                assert self._events is not None
                self._events.flush()
            return self._writer.finish(self._take_snapshot(step, variables, extra))

        set_phase(Phase.SAVE, step, takes_long=True)
        return run_on_rank0(self.collective, save_on_rank0, name="finish")

    def _take_snapshot(self, step: int, variables: Variables, extra: Arrays) -> Checkpoint:
        set_phase(Phase.SAVE, step, takes_long=True)
        return take_snapshot(variables, step, self.progress, self._facts, extra)

    def leave_if_requested(self) -> None:
        """Raise PreemptedError on all ranks if one has a request to stop before the first step. Collective."""
        who, cause = self._find_requests()
        if cause is not None:
            self.requests.clear_file()
            step = self.start.step
            stands = f"the latest checkpoint is that of step {step}" if step else "there was nothing to save"
            raise PreemptedError(f"stopped by {who} before the first step; {stands}.", stopped_by=cause)

    def leave(self, saved: str, path: str) -> NoReturn:
        """Raise PreemptedError after the last save below ``path``. Collective."""
        who, cause = self._find_requests()
        self.requests.clear_file()
        way_on = describe_way_on(self.config, Path(path).parent)
        raise PreemptedError(f"stopped by {who}: {saved} is saved in {path}. {way_on}", stopped_by=cause or "signal")

    def _find_requests(self) -> tuple[str, Cause | None]:
        """Describe all ranks' requests to stop. Collective.

        The user's file counts first: a job must not start the run again then.
        """
        node = self.collective.world.node
        mine = [self.requests.reason, self.requests.cause, node]
        said = all_gather_object(self.collective, mine, name="stop_requests")
        who = ", ".join(
            f"{reason} at rank {rank} on {node}" if cause == "signal" else reason
            for rank, (reason, cause, node) in enumerate(said)
            if reason
        )
        given = {cause for _, cause, _ in said}
        causes: tuple[Cause, ...] = ("file", "time", "signal")
        return who, next((cause for cause in causes if cause in given), None)

    def close(self) -> None:
        """Ignore further requests to stop, finish a pending save, suppress errors."""
        self.requests.end_training()
        if self._writer is None or self._events is None:
            return
        set_phase(Phase.SAVE, self.last_saved_step, takes_long=True)
        for end in (self._writer.wait, self._events.close):
            with contextlib.suppress(RingtrainError):
                end()


def describe_ranks(collective: Collective) -> list[dict[str, Any]]:
    """Describe all ranks, in their order. Collective."""
    gpus = tf.config.get_visible_devices("GPU")
    mine = {
        "node": collective.world.node,
        "pid": os.getpid(),
        "device": gpus[0].name.removeprefix("/physical_device:") if gpus else "CPU",
        "cores": format_cores(tuple(os.sched_getaffinity(0))),
    }
    return all_gather_object(collective, mine, name="ranks")[:MAX_RANKS]


def gather_usage(collective: Collective, seconds: Mapping[str, float]) -> list[dict[str, Any]]:
    """``seconds``: this rank's, by part of the step. Collective."""
    mine = {
        **{name: round(value, 3) for name, value in seconds.items()},
        "peak_memory_mib": read_peak_memory() // 2**20,
    }
    if tf.config.get_visible_devices("GPU"):
        with contextlib.suppress(Exception):  # optional on some devices
            mine["peak_gpu_memory_mib"] = tf.config.experimental.get_memory_info("GPU:0")["peak"] // 2**20
    return all_gather_object(collective, mine, name="usage")[:MAX_RANKS]


MAX_IMAGES = 8


class EventFiles:
    """Methods raise RunDirectoryError if files cannot be written; ``show`` raises UsageError for invalid values."""

    def __init__(self, directory: Path, *, first_step: int) -> None:
        """Removes events after ``first_step``: these steps are trained again."""
        self._directory = directory
        with explaining(self._directory):
            make_directory(directory)
            forget_after(directory, first_step)
            # Random name: TensorFlow would write through an existing link.
            ending = f".{secrets.token_hex(8)}.v2"
            self._writer = tf.summary.create_file_writer(str(directory), filename_suffix=ending)

    def scalars(self, prefix: str, values: Mapping[str, float], *, step: int) -> None:
        with explaining(self._directory), self._writer.as_default(step=step):
            for name, value in values.items():
                tf.summary.scalar(f"{prefix}/{name}", value)

    def show(self, values: Mapping[str, Images | Histogram], *, step: int) -> None:
        is_known = isinstance(values, Mapping) and all(isinstance(v, Images | Histogram) for v in values.values())
        if not is_known:
            raise UsageError(
                f"it gave {shorten(repr(values))}; it must give a mapping of names to Images or Histogram."
            )
        with explaining(self._directory), self._writer.as_default(step=step):
            for name, value in values.items():
                try:
                    if isinstance(value, Images):
                        tf.summary.image(name, value.values, max_outputs=MAX_IMAGES)
                    else:
                        tf.summary.histogram(name, value.values)
                except (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError, TypeError, ValueError) as error:
                    raise UsageError(
                        f"the summary {name!r} cannot be shown: {describe_defect(error)} Give images as [n, h, w, c] "
                        "with 1, 3 or 4 channels, and numbers to a histogram."
                    ) from error

    def flush(self) -> None:
        """Flush before a checkpoint, whose steps are not trained again."""
        with explaining(self._directory):
            self._writer.flush()

    def close(self) -> None:
        with explaining(self._directory):
            self._writer.close()


@contextlib.contextmanager
def explaining(directory: Path) -> Iterator[None]:
    """TensorFlow's errors name an operation."""
    try:
        yield
    except (tf.errors.OpError, OSError) as error:
        reason = getattr(error, "strerror", None) or strip_nodes(getattr(error, "message", str(error)))
        raise RunDirectoryError(directory, reason.splitlines()[0]) from error


def forget_after(directory: Path, step: int) -> None:
    for unfinished in directory.glob(f"{WRITING}*"):  # from a killed process
        unfinished.unlink()
    for path in list_event_files(directory):
        if all(is_kept for is_kept, _ in _read_records(path, step)):
            continue
        with replacing(path) as file:
            file.writelines(record for is_kept, record in _read_records(path, step) if is_kept)


def _read_records(path: Path, step: int) -> Iterator[tuple[bool, bytes]]:
    """Yield (is kept, record with frame), up to a truncated record."""
    for content, begin, num_bytes in iterate_records(path):
        event = parse_event(content[begin : begin + num_bytes])
        if event is None:
            return
        frame = begin - 12
        yield event.step <= step, content[frame : frame + FRAME_BYTES + num_bytes]
