"""Opening of a run directory on rank 0: new, resumed or complete."""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from ringtrain.config import Config, flatten_settings, to_plain
from ringtrain.errors import DataError, UsageError
from ringtrain.messages.log import LOG
from ringtrain.messages.removed import SETTINGS as REMOVED_SETTINGS
from ringtrain.messages.removed import without_removed
from ringtrain.run.checkpoint import Checkpoint
from ringtrain.run.directory import (
    CONFIG_FILE,
    FIT_OF,
    METRICS_FILE,
    RunDirectory,
    as_identity,
    create_run_directory,
    describe_identity,
    draw_identity,
    find_events,
    read_config,
    read_identity,
    refuse_other_kinds,
    require_writable,
)
from ringtrain.run.lease import acquire_lease
from ringtrain.run.store import find_newest, remove_unfinished, set_aside, step_name

# They do not change the training (except dropout, by XLA and the number of ranks). Length matters only to some
# schedules.
FREE_SETTINGS = {
    "backend", "check_replicas_every", "checkpoint_every", "data_dir", "eval_every", "eval_every_epochs",
    "detached", "exit_timeout", "hang_timeout", "init_from", "jit_compile",
    "keep", "log_every", "max_hours", "on_nonfinite", "out", "profile", "resume",
    "copy_to", "shard_optimizer", "steps_per_call", "stop_after", "tracker",
}  # fmt: skip
LENGTH_SETTINGS = {"epochs", "steps"}
MAX_SIZE = 2**53
MAX_COUNT = 2**63


def is_place(value: Any) -> bool:
    """True for [step, base64 state, directory]."""
    if not (isinstance(value, (list, tuple)) and list(map(type, value)) == [int, str, str]):
        return False
    return 0 <= value[0] < MAX_COUNT and re.fullmatch(r"[A-Za-z0-9+/]*={0,2}", value[1]) is not None


@dataclass(kw_only=True)
class Progress:
    """Counters of a run, equal on all ranks, in every checkpoint."""

    evaluated_step: int = -1
    best: float | None = None  # of ``best_metric``; None: no evaluation
    best_step: int = -1
    evaluations_without_best: int = 0
    samples_seen: int = 0  # over all ranks, if not implied by the step
    epochs_done: int = 0
    batches_done: int = 0
    skipped_in_a_row: int = 0  # latest consecutive non-finite steps
    finished: Literal["completed", "stopped early"] | None = None
    # Per rank: step, the pipeline's state before it (base64), data directory; only rank 0's for a shared stream.
    places: list[tuple[int, str, str]] = field(default_factory=list)

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> Progress:
        if unknown := values.keys() - {field.name for field in fields(cls)}:
            raise ValueError(f"its progress holds {min(unknown)!r}")
        progress = cls(**values)
        for name, value in vars(progress).items():
            if name not in ("best", "finished", "places") and (type(value) is not int or not -1 <= value < MAX_COUNT):
                raise ValueError(f"its {name} is {value!r}")
        if progress.best is not None and type(progress.best) not in (int, float):
            raise ValueError(f"its best is {progress.best!r}")
        if not isinstance(progress.places, list) or not all(map(is_place, progress.places)):
            raise ValueError("its places are no list of a step, a state and a directory for each rank")
        if progress.finished not in (None, "completed", "stopped early"):
            raise ValueError(f"its finished is {progress.finished!r}")
        return progress

    def note_evaluation(self, step: int, value: float, direction: Literal["min", "max"]) -> bool:
        """Return True for a new best. NaN never is."""
        sign = 1 if direction == "max" else -1
        is_best = not math.isnan(value) and (self.best is None or sign * value > sign * self.best)
        self.evaluated_step = step
        if is_best:
            self.best, self.best_step, self.evaluations_without_best = value, step, 0
        else:
            self.evaluations_without_best += 1
        return is_best

    def gives_up_after(self, evaluations: int) -> bool:
        """Whether so many evaluations in a row were no new best; never after 0."""
        return 0 < evaluations <= self.evaluations_without_best


@dataclass(frozen=True, kw_only=True)
class Start:
    """Start of a run, as JSON values for all ranks."""

    path: str
    name: str = field(default="", compare=False)  # as the user wrote it
    fence: int = field(default=0, compare=False)  # number of rank 0's lease
    step: int = 0
    global_batch_size: int | None = None  # of the run's first start; None: new run
    size: int | None = None  # ranks that wrote the checkpoint; None: new run
    progress: dict[str, Any] = field(default_factory=dict)  # ``Progress``
    is_complete: bool = False


@dataclass(frozen=True, kw_only=True)
class OpenedRun:
    start: Start
    directory: RunDirectory
    checkpoint: Checkpoint | None
    identity: Mapping[str, Any]


def open_run(config: Config, *, check_path: Callable[[Path], None] = lambda path: None) -> OpenedRun:
    """Open the run directory as its only writer. Only on rank 0.

    Args:
        config: of the run.
        check_path: raises if this directory cannot be the run's, before anything is written to it.
    """
    named = choose_directory(config)
    path = named.absolute()  # the workload may change the working directory
    refuse_other_kinds(path)
    check_path(path)
    lease = acquire_lease(path, environ=os.environ)
    directory = RunDirectory(path, may_write=lease.check, on_close=lease.close)
    try:
        checkpoint = find_start(directory, config)
        is_complete = checkpoint is not None and is_finished(checkpoint, config)
        known = (read_identity(path) or as_identity(checkpoint.run.get("identity"))) if checkpoint else None
        identity = known or draw_identity(config.seed)
        if not is_complete:
            for name in ("checkpoints", "tensorboard", "nonfinite", *(["profile"] if config.profile else [])):
                require_writable(path / name)
            directory.forget_after(checkpoint.step if checkpoint else 0)
            directory.write_config(to_plain(asdict(config)))
            directory.write_identity(identity)
    except BaseException:
        directory.close()
        raise
    start = Start(path=str(path), name=str(named), fence=lease.number)
    if checkpoint is not None:
        start = replace(
            start,
            step=checkpoint.step,
            global_batch_size=checkpoint.run.get("global_batch_size"),
            size=checkpoint.run["world_size"],
            progress={**checkpoint.progress, "finished": None},
            is_complete=is_complete,
        )
    return OpenedRun(start=start, directory=directory, checkpoint=checkpoint, identity=identity)


def choose_directory(config: Config) -> Path:
    name = Path(config.workload.rpartition(":")[2]).name.removesuffix(".py")
    wanted = config.out or Path("runs") / name.lower()
    if config.resume == "must" and not (wanted / CONFIG_FILE).is_file():
        raise UsageError(
            f"resume is 'must', but {str(wanted)!r} holds no run. Name the run's directory with --out, or leave "
            "--resume out to start a new one."
        )
    return create_run_directory(wanted, is_anew=config.resume == "never")


def find_start(directory: RunDirectory, config: Config) -> Checkpoint | None:
    """Return the checkpoint, None for a new run; raise if settings or run differ."""
    former = read_config(directory.path)
    if former is None:
        return None
    checkpoint, damages = find_checkpoints(directory)
    if checkpoint is not None:
        refuse_other_settings(directory.path, former, to_plain(asdict(config)))
        refuse_other_run(directory, checkpoint, former)
    for damage in damages:
        LOG.warning(f"{damage}")
    if checkpoint is None:
        if config.resume == "must":
            raise UsageError(f"resume is 'must', but the run in {str(directory.path)!r} holds no checkpoint yet.")
        LOG.info(f"the run in {directory.path} holds no checkpoint yet: it starts from the beginning")
        return None
    for moved in set_aside(directory.checkpoints, checkpoint.step):
        LOG.warning(f"the damaged checkpoint is kept as {moved}")
    return checkpoint


def find_checkpoints(directory: RunDirectory) -> tuple[Checkpoint | None, list[str]]:
    """Raise DataError if saved checkpoints are missing."""
    root = directory.checkpoints
    try:
        remove_unfinished(root)
        checkpoint, damages = find_newest(root, check=require_resumable)
        events = find_events(directory.path, "checkpoint") if checkpoint is None else []
    except OSError as error:
        raise DataError(
            f"{error.filename or str(root)!r} cannot be read: {error.strerror}. Mend that, and start the same command "
            "again."
        ) from error
    saved = [event["step"] for event in events if "/best-" not in str(event.get("path"))]  # a best is not for resumes
    if not saved:
        return checkpoint, damages
    if root.is_dir():
        why = "holds none"
    elif root.is_symlink() and not root.exists():
        why = f"is a link to {os.readlink(root)!r}, which is not there"
    else:
        why = "is a file" if root.exists() else "is not there"
    raise DataError(
        f"the run in {str(directory.path)!r} has saved checkpoints, the newest of step {max(saved)} ({METRICS_FILE} "
        f"says so), but {str(root)!r} {why}. Mount it or bring it back, and start the same command again; or start a "
        "new run with --resume never."
    )


def require_resumable(checkpoint: Checkpoint) -> None:
    of_fit = checkpoint.progress.get("epochs_done") or checkpoint.progress.get("batches_done")
    for name in ("world_size", *(() if of_fit else ("global_batch_size",))):
        if type(checkpoint.run.get(name)) is not int or not 0 < checkpoint.run[name] < MAX_SIZE:
            raise ValueError(f"its {name} is {checkpoint.run.get(name)!r}")
    if not isinstance(checkpoint.run.get("config"), dict):
        raise ValueError("it holds no settings")
    Progress.from_plain(checkpoint.progress)


def refuse_other_run(directory: RunDirectory, checkpoint: Checkpoint, former: Mapping[str, Any]) -> None:
    """Compare identities, or settings if one is missing."""
    own, theirs = read_identity(directory.path), as_identity(checkpoint.run.get("identity"))
    changed = [] if own and theirs else list_changed_settings(checkpoint.run["config"], former)
    if not changed and (not own or not theirs or own["id"] == theirs["id"]):
        return
    path = directory.checkpoints / step_name(checkpoint.step)
    other = f" with other settings ({'; '.join(changed)})" if changed else ""
    raise UsageError(
        f"the newest checkpoint there, {str(path)!r}, is of another run{other}: it is of {describe_identity(theirs)}, "
        f"and {str(directory.path)!r} is that of {describe_identity(own)}. Move it away to resume; to begin a new run "
        f"with its weights, give another --out, and --init_from {shlex.quote(str(path))}."
    )


def refuse_other_settings(path: Path, former: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    changed = list_changed_settings(without_removed(former, str(path / CONFIG_FILE)), wanted)
    if changed:
        raise UsageError(
            f"the run in {str(path)!r} was started with other settings: {'; '.join(changed)}. Give the former ones to "
            "resume, or start a new run with another --out, or with --resume never (--out then resumes that one)."
        )


def list_changed_settings(former: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    is_bound = flatten_settings(wanted).get("optimizer.schedule") in ("cosine", "linear", "polynomial")
    free = FREE_SETTINGS | REMOVED_SETTINGS.keys() | (set() if is_bound else LENGTH_SETTINGS)
    # Newer settings default to the value that changes nothing.
    old = flatten_settings(to_plain(asdict(Config()))) | flatten_settings(former)
    new = flatten_settings(to_plain(asdict(Config()))) | flatten_settings(wanted)
    changed = [
        f"{name} {old.get(name)} -> {new.get(name)}"
        for name in sorted({*old, *new} - free)
        if old.get(name) != new.get(name)
    ]
    return [text if text.isprintable() else ascii(text)[1:-1] for text in changed]


def describe_way_on(config: Config, run: Path) -> str:
    if config.resume == "never" and config.workload.startswith(FIT_OF):
        return f"To resume from there: Run({str(run)!r}, resume='auto')."
    if config.resume == "never":
        # The last flag wins, also over --config.
        return f"To resume from there, add to the same command: --out {shlex.quote(str(run))} --resume auto"
    return "The same command resumes from there."


def is_finished(checkpoint: Checkpoint, config: Config) -> bool:
    """False if the run is to be longer now."""
    then = checkpoint.run["config"]
    return checkpoint.progress.get("finished") is not None and all(
        then.get(name) == getattr(config, name) for name in (*LENGTH_SETTINGS, "stop_after")
    )
