"""Opening a run directory: a fresh run, one that goes on, or one that is complete already. Rank 0 alone does it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ringtrain.checkpoint import Checkpoint, find_newest, remove_unfinished, set_aside
from ringtrain.config import Config, flatten_settings, to_plain
from ringtrain.errors import UsageError
from ringtrain.lease import acquire_lease
from ringtrain.run_directory import CONFIG_FILE, RunDirectory, create_run_directory, read_config

# Settings that do not enter what is trained. The length of a run enters only where the learning rate follows it.
FREE_SETTINGS = {
    "backend", "cache", "check_replicas_every", "checkpoint_every", "data_dir", "eval_every", "eval_every_epochs",
    "detached", "exit_timeout", "hang_timeout",
    "init_from", "keep", "log_every", "max_hours", "on_bad_sample", "on_nonfinite", "out", "profile", "resume",
    "stop_after",
}  # fmt: skip
LENGTH_SETTINGS = {"epochs", "steps"}


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where a run begins, told to every rank; all values are JSON values.

    Attributes:
        path: the run directory.
        step: the steps done.
        global_batch_size: that of the run's first start, None for a fresh run.
        size: the number of ranks that wrote the checkpoint, None for a fresh run.
        progress: what a checkpoint remembers (see ``ringtrain.progress``).
        is_complete: nothing is left to be done.
        fence: the number of rank 0's lease (see ``ringtrain.lease``).
    """

    path: str
    fence: int = field(default=0, compare=False)  # of this opening; the run begins at the same place
    step: int = 0
    global_batch_size: int | None = None
    size: int | None = None
    progress: dict[str, Any] = field(default_factory=dict)
    is_complete: bool = False


@dataclass(frozen=True, kw_only=True)
class OpenedRun:
    """A run directory that this process may write into, and what it goes on from."""

    start: Start
    directory: RunDirectory
    checkpoint: Checkpoint | None


def open_run(config: Config, *, say: Callable[[str], None]) -> OpenedRun:
    """Open the run that the configuration names, and make it ready to be written.

    Args:
        say: shows a line to the user.

    Raises:
        UsageError: the directory holds something else, is being written, or its run has other settings.
        DataError: it holds checkpoints, and none is whole.
    """
    path = choose_directory(config)
    lease = acquire_lease(path, environ=os.environ, say=say)
    directory = RunDirectory(path, may_write=lease.check, on_close=lease.close)
    try:
        checkpoint = find_start(directory, config, say=say)
        is_complete = checkpoint is not None and is_finished(checkpoint, config)
        if not is_complete:
            directory.forget_after(checkpoint.step if checkpoint else 0)
            directory.write_config(to_plain(asdict(config)))
    except BaseException:
        directory.close()
        raise
    if checkpoint is None:
        return OpenedRun(start=Start(path=str(path), fence=lease.number), directory=directory, checkpoint=None)
    start = Start(
        path=str(path),
        fence=lease.number,
        step=checkpoint.step,
        global_batch_size=checkpoint.run["global_batch_size"],
        size=checkpoint.run["world_size"],
        progress={**checkpoint.progress, "finished": None},
        is_complete=is_complete,
    )
    return OpenedRun(start=start, directory=directory, checkpoint=checkpoint)


def choose_directory(config: Config) -> Path:
    """The run's directory, made where it is not there.

    Raises:
        UsageError: it cannot be made, or holds something that is no run; or ``resume`` is must, and there is no run.
    """
    name = Path(config.workload.rpartition(":")[2]).name.removesuffix(".py")
    wanted = config.out or Path("runs") / name.lower()
    if config.resume == "must" and not (wanted / CONFIG_FILE).is_file():
        raise UsageError(
            f"resume is 'must', but {str(wanted)!r} holds no run. Name the run's directory with --out, or leave "
            "--resume out to start a new one."
        )
    return create_run_directory(wanted, is_anew=config.resume == "never")


def find_start(directory: RunDirectory, config: Config, *, say: Callable[[str], None]) -> Checkpoint | None:
    """The checkpoint from which the run goes on; None where it begins.

    Raises:
        UsageError: the run has other settings; or ``resume`` is must, and there is no checkpoint.
        DataError: it holds checkpoints, and none is whole.
    """
    former = read_config(directory.path)
    if former is None:
        return None
    remove_unfinished(directory.checkpoints)
    checkpoint, damages = find_newest(directory.checkpoints)
    if checkpoint is not None:  # else nothing is there that other settings could contradict
        refuse_other_settings(directory.path, former, to_plain(asdict(config)))
    for damage in damages:
        say(f"warning: {damage}")
    if checkpoint is None:
        if config.resume == "must":
            raise UsageError(f"resume is 'must', but the run in {str(directory.path)!r} holds no checkpoint yet.")
        say(f"the run in {directory.path} holds no checkpoint yet: it starts anew")
        return None
    for moved in set_aside(directory.checkpoints, checkpoint.step):
        say(f"warning: the damaged checkpoint is kept as {moved}")
    return checkpoint


def refuse_other_settings(path: Path, former: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """See that a run goes on as it began.

    Raises:
        UsageError: a setting that enters the training differs; the message lists each with both values.
    """
    free = FREE_SETTINGS | (set() if wanted["optimizer"]["schedule"] in ("cosine", "linear") else LENGTH_SETTINGS)
    # A setting that came with a later version than the run's has the value that changes nothing as its default.
    old = flatten_settings(to_plain(asdict(Config()))) | flatten_settings(former)
    new = flatten_settings(wanted)
    changed = [
        f"{name} {old.get(name)} -> {new.get(name)}"
        for name in sorted({*old, *new} - free)
        if old.get(name) != new.get(name)
    ]
    if changed:
        raise UsageError(
            f"the run in {str(path)!r} was started with other settings: {'; '.join(changed)}. Give the former ones to "
            "go on, or start anew elsewhere with --out, or beside it with --resume never (--out then goes on with it)."
        )


def describe_way_on(config: Config, run: Path) -> str:
    """What to start so that a run which was stopped goes on. ``run`` is its directory."""
    if config.resume == "never":
        # The last flag wins, over a --config file's setting as well.
        return f"To go on from there, add to the same command: --out {shlex.quote(str(run))} --resume auto"
    return "The same command goes on from there."


def is_finished(checkpoint: Checkpoint, config: Config) -> bool:
    """Whether nothing is left to be done: the run ended, and is not to be longer than it was when it did."""
    then = checkpoint.run["config"]
    return checkpoint.progress["finished"] is not None and all(
        then[name] == getattr(config, name) for name in (*LENGTH_SETTINGS, "stop_after")
    )
