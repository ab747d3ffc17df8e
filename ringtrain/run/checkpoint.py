"""Checkpoints: complete, or not there. Written off the training thread, verified when read; nothing in them is code.

A checkpoint is a directory of two files. ``variables.bin`` holds the variables' bytes one after the other (little
endian); ``manifest.json`` says which variable lies where, and carries the checksum of that file and of itself. Both are
written and flushed in a temporary directory that is then renamed: a name without leading dot is a whole checkpoint.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ringtrain.errors import DataError
from ringtrain.files.bounded import open_regular, parse_json, read_bounded
from ringtrain.run.manifest import MAX_BYTES as MAX_MANIFEST_BYTES
from ringtrain.run.manifest import digest_of, require_sound
from ringtrain.runtime import activity

FORMAT = 2  # in the first, slots have the name of their optimizer, such as slots/adam/iteration
MANIFEST_FILE = "manifest.json"
VARIABLES_FILE = "variables.bin"
BEST = "best"
BEST_FILE = "best.json"
MAX_BEST_BYTES = 4096
UNNAMED = re.compile(r"variable(_\d+)?")
STEP_NAME = re.compile(r"step-(\d+)", re.ASCII)
BEST_NAME = re.compile(rf"{BEST}-{STEP_NAME.pattern}", re.ASCII)
HASHED_CHUNK_BYTES = 16 * 2**20
# Of this process and of the way to the disk; they say nothing about what lies there.
NO_DAMAGE = {errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE, errno.ETIMEDOUT}


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """All that a run needs to go on bit for bit.

    Attributes:
        step: the steps done.
        variables: name to value: weights, optimizer slots, averages, loss scale.
        progress: what the run remembers besides (see ``ringtrain.run.progress``); JSON values.
        run: what the run is: workload, world size, global batch size, versions, command, configuration; JSON values.
    """

    step: int
    variables: Mapping[str, npt.NDArray[Any]]
    progress: Mapping[str, Any]
    run: Mapping[str, Any]


class DamagedError(DataError):
    """A checkpoint that is not whole."""


def step_name(step: int) -> str:
    """The name of a step's checkpoint, such as ``step-000001000``."""
    return f"step-{step:09d}"


def write_checkpoint(
    root: Path, checkpoint: Checkpoint, *, is_best: bool, may_write: Callable[[], None] = lambda: None
) -> Path:
    """Write a checkpoint below ``root``; it is there once this returns, and whole.

    Args:
        is_best: write it as ``best-step-N``, and let ``best`` mean it.
        may_write: called just before the checkpoint becomes visible; raises where another process has taken over.

    Raises:
        OSError: it cannot be written, such as on a full disk. What was there before is untouched.
    """
    name = (f"{BEST}-" if is_best else "") + step_name(checkpoint.step)
    temporary = root / f".writing-{name}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        _write_files(temporary, checkpoint)
        may_write()
        _rename_over(temporary, root / name)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if is_best:
        _point_best_to(root, name)
    return root / name


def read_checkpoint(path: Path) -> Checkpoint:
    """Read and verify a checkpoint.

    Raises:
        DamagedError: a file is missing, or not what was written; the message names it and what is wrong.
        DataError: it was written by a newer version of ringtrain, or this process may not read it.
    """
    content = _read_manifest(path / MANIFEST_FILE)
    data = _read_verified(path / VARIABLES_FILE, content["files"][VARIABLES_FILE])
    names = [item["name"] for item in content["variables"]]
    if content["format"] == 1:
        names = _modernise(names)
    variables = {}
    for name, item in zip(names, content["variables"], strict=True):
        part = memoryview(data)[item["offset"] : item["offset"] + item["bytes"]]
        variables[name] = np.frombuffer(part, _dtype(item["dtype"])).reshape(item["shape"])
    return Checkpoint(step=content["step"], variables=variables, progress=content["progress"], run=content["run"])


def without_optimizer_names(paths: Sequence[str]) -> list[str]:
    """The paths of an optimizer's variables without the name of the optimizer, which Keras chooses.

    Each optimizer counts its updates in a variable ``iteration``: what stands before that is its name. An optimizer
    that holds others has theirs among its own. A variable that the optimizer does not name (one of Nadam's) Keras calls
    ``variable``, with the number that the process had made before: it goes without.
    """
    prefixes = {path.removesuffix("iteration") for path in paths if path.endswith("/iteration")}
    names = [path.removeprefix(max((p for p in prefixes if path.startswith(p)), key=len, default="")) for path in paths]
    return ["variable" if UNNAMED.fullmatch(name) else name for name in names]


def number_twins(names: Sequence[str]) -> list[str]:
    """The names, of which the second and further ones of a name have ``#2`` and so on behind them."""
    numbered: dict[str, None] = {}
    for name in names:
        twins = (name if number == 1 else f"{name}#{number}" for number in itertools.count(1))
        numbered[next(twin for twin in twins if twin not in numbered)] = None
    return list(numbered)


def _modernise(names: Sequence[str]) -> list[str]:
    """The names of the first format as they are today."""
    slots = [name for name in names if name.startswith("slots/")]
    paths = without_optimizer_names([re.sub(r"^slots/|#\d+$", "", name) for name in slots])
    today = dict(zip(slots, paths, strict=True))
    return number_twins([f"slots/{today[name]}" if name in today else name for name in names])


def read_facts(path: Path) -> dict[str, Any]:
    """What a checkpoint says about the run that wrote it, without reading its variables.

    Raises:
        DamagedError: its manifest is missing, or not what was written.
        DataError: it was written by a newer version of ringtrain.
    """
    return dict(_read_manifest(path / MANIFEST_FILE)["run"])


def list_steps(root: Path) -> list[int]:
    """The steps that ``root`` holds a checkpoint of, whole or not, in order."""
    if not root.is_dir():
        return []
    names = [entry.name for entry in root.iterdir()]
    steps = [int(match[1]) for name in names if (match := STEP_NAME.fullmatch(name))]
    return sorted(step for step in steps if step_name(step) in names)


def find_newest(
    root: Path, check: Callable[[Checkpoint], None] = lambda checkpoint: None
) -> tuple[Checkpoint | None, list[str]]:
    """The newest whole checkpoint of a run, and what is wrong with those that are newer.

    Args:
        check: what else must hold of a whole one; raises ValueError where it does not.

    Raises:
        DataError: there are checkpoints, and none is whole.
    """
    damages: list[str] = []
    for step in reversed(list_steps(root)):
        path = root / step_name(step)
        try:
            checkpoint = read_checkpoint(path)
            if checkpoint.step != step:  # as it is, its name would have others taken for newer
                raise ValueError(f"it is of step {checkpoint.step}")
            check(checkpoint)
            return checkpoint, damages
        except DamagedError as error:
            damages.append(str(error))
        except ValueError as error:
            damages.append(f"{str(path)!r} is no checkpoint of its name that a run could go on from: {error}.")
    if damages:
        raise DataError(
            f"{str(root)!r} holds {len(damages)} checkpoint{'s' if len(damages) > 1 else ''}, and none is whole: "
            f"{' '.join(damages)} Put a whole one back, or start anew beside this run with --resume never."
        )
    return None, []


def find_checkpoint(source: Path, which: str = BEST) -> Path:
    """The checkpoint that a path means: itself, or one of a run directory.

    Args:
        source: a checkpoint, or a run directory.
        which: of a run directory's: ``best`` (the newest where none is), ``newest``, or a name.

    Raises:
        DataError: there is none.
    """
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
    """The best checkpoint of a run; None where it has none.

    The file ``best.json`` names it, which survives any copy. Where there is none, an older ringtrain wrote it, and the
    link ``best`` says so. A copy that follows links makes a directory of that one, and some leave links out: then it is
    the newest that was written as a best one, as each was better than those before.
    """
    named = _named_best(root)
    if named is None and (root / BEST).is_symlink():
        named = os.readlink(root / BEST)
    if named is not None and (root / named).is_dir():
        return root / named
    steps = [int(match[1]) for path in root.glob(f"{BEST}-*") if (match := BEST_NAME.fullmatch(path.name))]
    newest = root / (f"{BEST}-{step_name(max(steps))}" if steps else BEST)
    return newest if newest.is_dir() and (steps or (newest / MANIFEST_FILE).is_file()) else None


def mend_best(root: Path) -> None:
    """Give the best checkpoint its file and its link again, where a copy or an older ringtrain has left it without."""
    best = find_best(root)
    with contextlib.suppress(OSError, DataError):  # the next best one gets both
        if best is not None and best.name == BEST:
            best = best.rename(root / f"{BEST}-{step_name(_read_manifest(best / MANIFEST_FILE)['step'])}")
        is_whole = best is None or (_named_best(root) == best.name and (root / BEST).is_symlink())
        if best is not None and BEST_NAME.fullmatch(best.name) and not is_whole:
            _point_best_to(root, best.name)


def set_aside(root: Path, newer_than: int) -> list[Path]:
    """Give the damaged checkpoints after this step another name, so that the run can write them anew."""
    moved = []
    for step in list_steps(root):
        if step > newer_than:
            path = root / step_name(step)
            free = next(p for n in range(1, 10_000) if not (p := path.with_name(f"{path.name}.damaged-{n}")).exists())
            moved.append(path.rename(free))
    return moved


def tidy(root: Path, keep: int) -> None:
    """Remove all but the newest ``keep`` checkpoints, and former best ones."""
    for step in list_steps(root)[:-keep]:
        _remove(root / step_name(step))
    best = find_best(root)
    for path in root.glob(f"{BEST}-*"):
        if best is not None and path.name != best.name:
            _remove(path)


def remove_unfinished(root: Path) -> None:
    """Clear up after a process that was killed while it wrote, replaced or removed a checkpoint."""
    for path in root.glob(".replaced-*"):
        if not (root / path.name.removeprefix(".replaced-")).exists():
            path.rename(root / path.name.removeprefix(".replaced-"))
    for pattern in (".writing-*", ".removing-*", ".replaced-*"):
        for path in root.glob(pattern):
            with contextlib.suppress(OSError):
                _delete(path)


def _write_files(directory: Path, checkpoint: Checkpoint) -> None:
    """Write and flush both files."""
    digest, offset, variables = hashlib.sha256(), 0, []
    with (directory / VARIABLES_FILE).open("wb") as file:
        for name, value in checkpoint.variables.items():
            data = _bytes_of(value)
            file.write(data)
            digest.update(data)
            item = {"name": name, "dtype": value.dtype.name, "shape": list(value.shape)}
            variables.append({**item, "offset": offset, "bytes": data.nbytes})
            offset += data.nbytes
            activity.move()
        file.flush()
        _flush(file.fileno())
    content = {
        "format": FORMAT,
        "step": checkpoint.step,
        "files": {VARIABLES_FILE: {"bytes": offset, "sha256": digest.hexdigest()}},
        "progress": dict(checkpoint.progress),
        "run": dict(checkpoint.run),
        "variables": variables,
    }
    with (directory / MANIFEST_FILE).open("w", encoding="utf-8") as manifest:
        json.dump({"sha256": digest_of(content), "content": content}, manifest, indent=1)
        manifest.flush()
        _flush(manifest.fileno())
    _flush_directory(directory)


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = parse_json(read_bounded(path, MAX_MANIFEST_BYTES))
        content, digest = manifest["content"], manifest["sha256"]
        if type(content["format"]) is int and content["format"] > FORMAT:
            raise DataError(
                f"{str(path)!r} has format {content['format']}, written by a newer ringtrain; this one reads formats "
                f"up to {FORMAT}. Update ringtrain."
            )
        if digest != digest_of(content):
            raise DamagedError(f"{str(path)!r} does not have the checksum that it states.")
    except OSError as error:
        raise _unreadable(path, error) from None
    except (ValueError, KeyError, TypeError):
        raise DamagedError(f"{str(path)!r} is no manifest of a checkpoint (cut off, or overwritten).") from None
    try:
        require_sound(content, VARIABLES_FILE)
    except ValueError as error:
        raise DamagedError(f"{str(path)!r} is no manifest that ringtrain wrote: {error}.") from None
    return dict(content)


def _read_verified(path: Path, expected: Mapping[str, Any]) -> bytearray:
    """A file's bytes, held against size and checksum."""
    digest = hashlib.sha256()
    try:
        with open_regular(path) as file:
            num_bytes = os.fstat(file.fileno()).st_size
            if num_bytes != expected["bytes"]:
                raise DamagedError(f"{str(path)!r} holds {num_bytes} bytes; it must hold {expected['bytes']}.")
            data = bytearray(num_bytes)
            for start in range(0, num_bytes, HASHED_CHUNK_BYTES):
                chunk = memoryview(data)[start : start + HASHED_CHUNK_BYTES]
                file.readinto(chunk)
                digest.update(chunk)
                activity.move()
    except OSError as error:
        raise _unreadable(path, error) from None
    except MemoryError:
        raise DataError(f"{str(path)!r} holds {num_bytes:,} bytes, for which this process gets no memory.") from None
    if digest.hexdigest() != expected["sha256"]:
        raise DamagedError(
            f"{str(path)!r} does not have the checksum that its manifest states: its bytes have changed."
        )
    return data


def _unreadable(path: Path, error: OSError) -> DataError:
    if isinstance(error, FileNotFoundError):
        return DamagedError(f"{str(path)!r} is missing.")
    said = f"{str(path)!r} cannot be read: {error.strerror}."
    return DataError(f"{said} Mend that, and start again.") if error.errno in NO_DAMAGE else DamagedError(said)


def _bytes_of(value: npt.NDArray[Any]) -> memoryview:
    """An array's bytes, little endian."""
    if value.dtype.byteorder == ">":
        value = value.astype(value.dtype.newbyteorder("<"))
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8).data


def _dtype(name: str) -> np.dtype[Any]:
    if name == "bfloat16":
        import ml_dtypes  # TensorFlow's; NumPy does not know this type

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name).newbyteorder("<")


def _rename_over(source: Path, target: Path) -> None:
    """Give a directory its name; a directory that had it is removed."""
    if target.exists():
        replaced = target.with_name(f".replaced-{target.name}")
        shutil.rmtree(replaced, ignore_errors=True)
        target.rename(replaced)
        source.rename(target)
        _delete(replaced)
    else:
        source.rename(target)
    _flush_directory(target.parent)


def _remove(path: Path) -> None:
    """Remove a checkpoint so that no half of it is ever seen under its name."""
    removed = path.with_name(f".removing-{path.name}")
    path.rename(removed)
    _delete(removed)


def _delete(path: Path) -> None:
    """Delete a directory, or a link to one, such as a checkpoint that was moved to an archive: never what it means."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _named_best(root: Path) -> str | None:
    """The name in ``best.json``; None where it is none of a best checkpoint."""
    try:
        content = parse_json(read_bounded(root / BEST_FILE, MAX_BEST_BYTES))
    except (OSError, ValueError):
        return None
    name = content.get("checkpoint") if isinstance(content, dict) else None
    return name if isinstance(name, str) and BEST_NAME.fullmatch(name) and (root / name).is_dir() else None


def _point_best_to(root: Path, name: str) -> None:
    """Let ``best`` mean this checkpoint: by a file, and a link for people, for tools and for an older ringtrain.

    What counts is the file: a link does not survive every copy, and not every file system has links.
    """
    file = root / f".writing-{BEST_FILE}"
    with file.open("w", encoding="utf-8") as writing:
        json.dump({"checkpoint": name}, writing)
        writing.flush()
        _flush(writing.fileno())
    file.replace(root / BEST_FILE)
    with contextlib.suppress(OSError):
        _link_best_to(root, name)
    _flush_directory(root)


def _link_best_to(root: Path, name: str) -> None:
    best, link = root / BEST, root / f".writing-{BEST}"
    if not best.is_symlink() and best.is_dir():  # a copy's; what it holds is there under its name, or was worse
        if (best / MANIFEST_FILE).is_file():
            _remove(best)
        else:
            best.rmdir()  # fails where the user keeps something else in it, and then it stays
    link.unlink(missing_ok=True)
    link.symlink_to(name)
    link.replace(best)


def _flush(descriptor: int) -> None:
    os.fsync(descriptor)


def _flush_directory(path: Path) -> None:
    with _opened(path) as descriptor:
        _flush(descriptor)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def describe_difference(expected: Sequence[str], found: Sequence[str]) -> str:
    """Which names are on one side only, in short."""
    missing = [name for name in expected if name not in set(found)]
    extra = [name for name in found if name not in set(expected)]
    parts = []
    for title, names in (("missing", missing), ("not in the model", extra)):
        if names:
            parts.append(f"{title}: {', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}")
    return "; ".join(parts)
