"""Runs of ``callbacks.Run`` in an audited script, kept in a directory of the audit."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ringtrain.config import Config
from ringtrain.errors import RingtrainError
from ringtrain.run.resume import is_finished, require_resumable
from ringtrain.run.store import find_newest


class AuditEnd(SystemExit):
    """End of an audited script, after the same step on all ranks. Its exit code is 0."""


class AuditedRuns:
    """The directory for the runs of an audited script, and notes about its former runs."""

    def __init__(self, directory: Path) -> None:
        self.notes: list[str] = []
        self._directory = directory

    def redirect(self, config: Config, *, is_rank0: bool) -> Config:
        """Return settings of a new run that writes nothing outside of the audit's directory."""
        if not is_rank0:  # rank 0 alone writes a run
            return config
        note = describe_former_run(config)
        if note:
            self.notes.append(note)
        print(f"audit: {config.out} is left unchanged; this run is temporary", flush=True)
        self._directory.mkdir(parents=True, exist_ok=True)
        directory = Path(tempfile.mkdtemp(prefix="run-", dir=self._directory))
        return dataclasses.replace(
            config,
            out=directory,
            resume="auto",
            tracker="none",
            copy_to=None,
        )


_current: contextvars.ContextVar[AuditedRuns | None]
_current = contextvars.ContextVar("audited_runs", default=None)


def audited_runs() -> AuditedRuns | None:
    """Return the audit that redirects the runs of this script, or None."""
    return _current.get()


@contextlib.contextmanager
def redirecting_runs(directory: Path) -> Iterator[AuditedRuns]:
    """Keep the runs of a script in ``directory``, which the caller removes."""
    runs = AuditedRuns(directory)
    former = _current.set(runs)
    try:
        yield runs
    finally:
        _current.reset(former)


def describe_former_run(config: Config) -> str:
    """Return a sentence about the run that the script would resume, or nothing. It only reads."""
    if config.out is None or config.resume == "never":
        return ""
    try:
        checkpoint, _ = find_newest(config.out / "checkpoints", check=require_resumable)
    except (OSError, RingtrainError):  # the script's own start reports it
        return ""
    if checkpoint is None:
        return ""
    if is_finished(checkpoint, config):
        return (
            f"The run in {config.out} is complete already ({checkpoint.step} steps): the script "
            "trains nothing when it is started again. The audit trained from the script's first "
            "weights, and left the run unchanged."
        )
    return (
        f"The run in {config.out} has a checkpoint of step {checkpoint.step}, which the script "
        "resumes. The audit trained from the script's first weights, and left the run unchanged."
    )
