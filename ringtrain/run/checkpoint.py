"""Checkpoints: atomic, verified when read, without executable content.

``variables.bin`` has the variables' bytes (little endian); ``manifest.json`` has offsets and the checksums of both
files. They are flushed in a temporary directory, then renamed: a name without a leading dot is complete.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringtrain.errors import DataError
from ringtrain.files import atomic
from ringtrain.files.bounded import open_regular, parse_json, read_bounded
from ringtrain.runtime import activity

if TYPE_CHECKING:  # the commands of ``launch`` read facts, and start in half the time without NumPy
    import numpy as np
    import numpy.typing as npt

FORMAT = 2
MANIFEST_FILE = "manifest.json"
VARIABLES_FILE = "variables.bin"
HASHED_CHUNK_BYTES = 16 * 2**20
MAX_MANIFEST_BYTES = 32 * 2**20  # about 100,000 variables
NUMBERS = "biufcV"  # kinds of types of NumPy; V: float8 of ml_dtypes
# Not damage: errors of this process or the connection to the disk.
NO_DAMAGE = {errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE, errno.ETIMEDOUT}


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    step: int
    variables: Mapping[str, npt.NDArray[Any]]  # by name: weights, optimizer slots, averages, loss scale
    progress: Mapping[str, Any]  # ``ringtrain.run.resume.Progress``; JSON values
    # Workload, world size, global batch size, versions, command, configuration; JSON values.
    run: Mapping[str, Any]


class DamagedError(DataError):
    pass


def write_files(directory: Path, checkpoint: Checkpoint) -> None:
    digest, offset, variables = hashlib.sha256(), 0, []
    with (directory / VARIABLES_FILE).open("xb") as file:
        for name, value in checkpoint.variables.items():
            data = _bytes_of(value)
            file.write(data)
            digest.update(data)
            item = {"name": name, "dtype": value.dtype.name, "shape": list(value.shape)}
            variables.append({**item, "offset": offset, "bytes": data.nbytes})
            offset += data.nbytes
            activity.move()
        file.flush()
        atomic.flush(file.fileno())
    content = {
        "format": FORMAT,
        "step": checkpoint.step,
        "files": {VARIABLES_FILE: {"bytes": offset, "sha256": digest.hexdigest()}},
        "progress": dict(checkpoint.progress),
        "run": dict(checkpoint.run),
        "variables": variables,
    }
    with (directory / MANIFEST_FILE).open("x", encoding="utf-8") as manifest:
        json.dump({"sha256": digest_of(content), "content": content}, manifest, indent=1)
        manifest.flush()
        atomic.flush(manifest.fileno())
    atomic.flush_directory(directory)


def read_checkpoint(path: Path) -> Checkpoint:
    """Read and verify; see ``read_manifest`` for errors."""
    import numpy as np

    content = read_manifest(path / MANIFEST_FILE)
    try:
        data = memoryview(_read_verified(path / VARIABLES_FILE, content["files"][VARIABLES_FILE]))
        variables = {
            _text(item["name"]): np.frombuffer(
                data[item["offset"] : item["offset"] + item["bytes"]], _dtype(item["dtype"])
            ).reshape(item["shape"])
            for item in content["variables"]
        }
        progress, run = {**content["progress"]}, {**content["run"]}
        return Checkpoint(step=content["step"], variables=variables, progress=progress, run=run)
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise DamagedError(f"{str(path)!r} holds no variables that ringtrain wrote: {error}.") from None


def read_facts(path: Path) -> dict[str, Any]:
    run = read_manifest(path / MANIFEST_FILE).get("run")
    if not isinstance(run, dict):
        raise DamagedError(f"{str(path)!r} holds no facts about a run.")
    return run


def read_manifest(path: Path) -> dict[str, Any]:
    """Raise DamagedError if it is missing or damaged, another DataError for version or permission."""
    try:
        manifest = parse_json(read_bounded(path, MAX_MANIFEST_BYTES))
        content, digest = manifest["content"], manifest["sha256"]
        if type(content["format"]) is int and content["format"] != FORMAT:
            raise DataError(
                f"{str(path)!r} has format {content['format']}, and this ringtrain reads format {FORMAT}. Use "
                "the version that wrote it, or update ringtrain if that is newer."
            )
        if digest != digest_of(content):
            raise DamagedError(f"{str(path)!r} does not have the checksum that it states.")
    except OSError as error:
        raise _unreadable(path, error) from None
    except (ValueError, KeyError, TypeError):
        raise DamagedError(f"{str(path)!r} is no manifest of a checkpoint (cut off, or overwritten).") from None
    return dict(content)


def _read_verified(path: Path, expected: Mapping[str, Any]) -> bytearray:
    digest = hashlib.sha256()
    try:
        with open_regular(path) as file:
            num_bytes = os.fstat(file.fileno()).st_size
            if num_bytes != expected["bytes"]:
                raise DamagedError(f"{str(path)!r} holds {num_bytes} bytes; it must hold {expected['bytes']}.")
            if num_bytes > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
                raise MemoryError  # the system may overcommit, then kill the process
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


def digest_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _unreadable(path: Path, error: OSError) -> DataError:
    if isinstance(error, FileNotFoundError):
        return DamagedError(f"{str(path)!r} is missing.")
    said = f"{str(path)!r} cannot be read: {error.strerror}."
    return DataError(f"{said} Mend that, and start again.") if error.errno in NO_DAMAGE else DamagedError(said)


def _bytes_of(value: npt.NDArray[Any]) -> memoryview:
    import numpy as np

    if value.dtype.byteorder == ">":
        value = value.astype(value.dtype.newbyteorder("<"))
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8).data


def _dtype(name: str) -> np.dtype[Any]:
    import numpy as np

    if name == "bfloat16":
        import ml_dtypes  # from TensorFlow; NumPy lacks this type

        return np.dtype(ml_dtypes.bfloat16)
    dtype = np.dtype(name)
    if dtype.name != name or dtype.kind not in NUMBERS:
        raise ValueError(f"its type {name!r} is none of numbers")
    return dtype.newbyteorder("<")


def _text(name: Any) -> str:
    """Raise ValueError unless it is a text."""
    if not isinstance(name, str):
        raise ValueError(f"the name of a variable is {name!r}")
    return name
