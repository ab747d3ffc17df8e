"""The checkpoints of a run: write, list, find and remove."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

from ringtrain.errors import DataError
from ringtrain.files.atomic import flush_directory
from ringtrain.files.bounded import make_directory, open_directory
from ringtrain.run.checkpoint import (
    MANIFEST_FILE,
    Checkpoint,
    DamagedError,
    read_checkpoint,
    write_files,
)

BEST = "best"
STEP_NAME = re.compile(r"step-(\d+)", re.ASCII)


def step_name(step: int) -> str:
    """For example ``step-000001000``."""
    return f"step-{step:09d}"


def write_checkpoint(
    root: Path, checkpoint: Checkpoint, *, is_best: bool, may_write: Callable[[], None] = lambda: None
) -> Path:
    """Write below ``root``, durable on return; the best is named ``best-step-N``.

    ``may_write`` raises after a takeover, before the rename. An OSError leaves earlier checkpoints. Parents of ``root``
    are not created: the run directory may have been moved.
    """
    make_directory(root)
    flush_directory(root.parent)  # which lists it
    name = (f"{BEST}-" if is_best else "") + step_name(checkpoint.step)
    temporary = root / f".writing-{name}-{secrets.token_hex(8)}"
    temporary.mkdir()
    try:
        write_files(temporary, checkpoint)
        may_write()
        _rename_over(temporary, root / name)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if is_best:
        for step in _list_bests(root):
            if step > checkpoint.step:  # repeated by a run that resumed from an older checkpoint
                _remove(root / f"{BEST}-{step_name(step)}")
    return root / name


def list_steps(root: Path, prefix: str = "") -> list[int]:
    """Ascending, with damaged ones."""
    names = {entry.name for entry in root.iterdir()} if root.is_dir() else set()
    steps = {int(match[1]) for name in names if (match := STEP_NAME.fullmatch(name.removeprefix(prefix)))}
    return sorted(step for step in steps if f"{prefix}{step_name(step)}" in names)


def find_newest(
    root: Path, check: Callable[[Checkpoint], None] = lambda checkpoint: None
) -> tuple[Checkpoint | None, list[str]]:
    """Return the latest valid checkpoint, and the damages of later ones."""
    damages: list[str] = []
    for step in reversed(list_steps(root)):
        path = root / step_name(step)
        try:
            checkpoint = read_checkpoint(path)
            if checkpoint.step != step:  # a wrong name would hide others
                raise ValueError(f"it is of step {checkpoint.step}")
            check(checkpoint)
            return checkpoint, damages
        except DamagedError as error:
            damages.append(str(error))
        except ValueError as error:
            damages.append(f"{str(path)!r} is no checkpoint of its name that a run could resume from: {error}.")
    if damages:
        raise DataError(
            f"{str(root)!r} holds {len(damages)} checkpoint{'s' if len(damages) > 1 else ''}, and none is whole: "
            f"{' '.join(damages)} Put a whole one back, or start a new run with --resume never."
        )
    return None, []


def find_checkpoint(source: Path, which: str = BEST) -> Path:
    """Resolve a checkpoint, or a run's ``best`` (default: the latest), ``newest`` or a name."""
    if (source / MANIFEST_FILE).exists():
        return source
    root = source / "checkpoints"
    steps = [step_name(step) for step in list_steps(root)]
    best = find_best(root) if which == BEST else None
    if best is not None:
        return best
    name = steps[-1] if steps and which in ("newest", BEST) else which
    if not (root / name).is_dir():
        raise DataError(
            f"{str(source)!r} holds no checkpoint {which!r}; it holds: {', '.join(steps) or 'none'}. Give a run "
            "directory or a checkpoint."
        )
    return root / name


def find_best(root: Path) -> Path | None:
    steps = _list_bests(root)
    return root / f"{BEST}-{step_name(steps[-1])}" if steps else None


def _list_bests(root: Path) -> list[int]:
    return [step for step in list_steps(root, f"{BEST}-") if (root / f"{BEST}-{step_name(step)}").is_dir()]


def set_aside(root: Path, newer_than: int) -> list[Path]:
    """Rename damaged checkpoints, so that these steps can be written again."""
    moved = []
    for step in list_steps(root):
        if step > newer_than:
            path = root / step_name(step)
            others = (path.with_name(f"{path.name}.damaged-{number}") for number in range(1, 10_000))
            moved.append(path.rename(next(other for other in others if not os.path.lexists(other))))
    return moved


def tidy(root: Path, keep: int) -> None:
    for step in list_steps(root)[:-keep]:
        _remove(root / step_name(step))
    for step in _list_bests(root)[:-1]:
        _remove(root / f"{BEST}-{step_name(step)}")


def remove_unfinished(root: Path) -> None:
    """Clean up after a process killed during a write, replacement or removal."""
    if not root.is_dir():
        return
    with open_directory(root):  # refuses a link
        pass
    for path in root.glob(".replaced-*"):
        if not (root / path.name.removeprefix(".replaced-")).exists():
            path.rename(root / path.name.removeprefix(".replaced-"))
    for pattern in (".writing-*", ".removing-*", ".replaced-*"):
        for path in root.glob(pattern):
            with contextlib.suppress(OSError):
                _delete(path)


def _rename_over(source: Path, target: Path) -> None:
    if os.path.lexists(target):
        replaced = target.with_name(f".replaced-{target.name}")
        shutil.rmtree(replaced, ignore_errors=True)
        target.rename(replaced)
        source.rename(target)
        _delete(replaced)
    else:
        source.rename(target)
    flush_directory(target.parent)


def _remove(path: Path) -> None:
    """Remove a checkpoint atomically."""
    removed = path.with_name(f".removing-{path.name}")
    path.rename(removed)
    _delete(removed)


def _delete(path: Path) -> None:
    """Delete a directory or a link (an archived checkpoint), not its target."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
