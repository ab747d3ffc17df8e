"""Callbacks of Keras that write files or restore a model, in a ``fit`` of several ranks."""

from __future__ import annotations

import collections
import contextlib
import contextvars
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras

from ringtrain.errors import UsageError
from ringtrain.messages.ranks import name_ranks

# The attributes that say where a callback of Keras writes.
TARGETS = {
    "CSVLogger": ("filename",),
    "ModelCheckpoint": ("filepath",),
    "OrbaxCheckpoint": ("directory",),
    "RemoteMonitor": ("root", "path"),
    "TensorBoard": ("log_dir",),
}
_silenced: contextvars.ContextVar[list[keras.callbacks.Callback]]
_silenced = contextvars.ContextVar("silenced")  # of the current fit


class Writers:
    """The callbacks of a ``fit`` that write. Ranks that would write the same files leave it to the first."""

    def __init__(self, callbacks: Iterable[keras.callbacks.Callback]) -> None:
        self._callbacks = list(callbacks)

    def restores(self) -> bool:
        """Return True if ``BackupAndRestore`` is among the callbacks."""
        return any(isinstance(each, keras.callbacks.BackupAndRestore) for each in self._callbacks)

    def targets(self) -> list[str]:
        """Return the class and the absolute path to which each callback writes; "" for one that does not write."""
        return list(map(target_of, self._callbacks))

    def leave_to_first(self, targets_by_rank: Sequence[Sequence[str]], mine: int) -> None:
        """Silence this rank's callbacks whose target an earlier rank has, until the fit ends.

        Args:
            targets_by_rank: of all ranks.
            mine: this rank's position among them.
        """
        earlier = {target for targets in targets_by_rank[:mine] for target in targets}
        for callback, target in zip(self._callbacks, targets_by_rank[mine], strict=True):
            if target and target in earlier:
                silence(callback)


def shared_targets(targets_by_rank: Sequence[Sequence[str]]) -> list[str]:
    """Return the targets that several ranks have."""
    counts = collections.Counter(target for targets in targets_by_rank for target in set(targets))
    return sorted(target for target, count in counts.items() if target and count > 1)


def target_of(callback: keras.callbacks.Callback) -> str:
    """Return the class and the path to which a callback of Keras writes, or an empty string."""
    for class_name, attributes in TARGETS.items():
        kind = getattr(keras.callbacks, class_name, None)
        if kind is not None and isinstance(callback, kind):
            parts = [str(getattr(callback, name, "")) for name in attributes]
            path = "".join(parts)
            if not path:
                return ""
            is_local = "://" not in path
            return f"{class_name} {os.path.abspath(path) if is_local else path}"
    return ""


def silence(callback: keras.callbacks.Callback) -> None:
    """Make all hooks of this object do nothing, until the end of the block of ``restoring_silenced``."""
    for name in hook_names(callback):
        vars(callback)[name] = do_nothing
    _silenced.get().append(callback)


@contextlib.contextmanager
def restoring_silenced() -> Iterator[None]:
    """Restore the hooks of callbacks that are silenced in this block, also after an exception."""
    silenced: list[keras.callbacks.Callback] = []
    former = _silenced.set(silenced)
    try:
        yield
    finally:
        _silenced.reset(former)
        for callback in silenced:
            for name in hook_names(callback):
                vars(callback).pop(name, None)


def do_nothing(*args: Any, **kwargs: Any) -> None:
    """Take the place of a callback's hook."""


def hook_names(callback: keras.callbacks.Callback) -> list[str]:
    """Return the names of the methods that ``fit`` calls, such as ``on_epoch_end``."""
    return [name for name in dir(type(callback)) if name.startswith("on_")]


def refuse_restores(restores: Sequence[bool], ranks: Sequence[int]) -> None:
    """Raise UsageError if a rank has ``BackupAndRestore``. ``restores``: of each of the ranks."""
    which = [rank for rank, is_restoring in zip(ranks, restores, strict=True) if is_restoring]
    if which:
        raise UsageError(
            f"BackupAndRestore was passed to fit() on {name_ranks(which)}. It restores each rank from "
            "files that all ranks write, or one rank only: ranks would start from other epochs and "
            "weights. Use hvd.callbacks.Run('runs/mine') instead, on all ranks: it saves once, and "
            "resumes all ranks with the next batch."
        )


def refuse_with_run(callbacks: Iterable[keras.callbacks.Callback]) -> None:
    """Raise UsageError for callbacks that ``callbacks.Run`` cannot be combined with."""
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            raise UsageError(
                "fit() has both callbacks.Run and BackupAndRestore, and each restores the model. "
                "Leave BackupAndRestore out: callbacks.Run resumes with the next batch."
            )
        if isinstance(callback, keras.callbacks.SwapEMAWeights) and callback.swap_on_epoch:
            raise UsageError(
                "fit() has callbacks.Run and SwapEMAWeights(swap_on_epoch=True), which exchanges weights and "
                "averages at the end of an epoch, when Run saves: a resume would train the averages. Pass "
                "SwapEMAWeights(swap_on_epoch=False): validation uses the averages all the same."
            )
