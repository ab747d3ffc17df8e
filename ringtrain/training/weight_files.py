"""Files of weights that others wrote: Keras' HDF5 files and archives, and safetensors.

A file is opened as a table of variables. A value is read only on request, so that its shape can be compared
before: memory, disk and time are bounded by the file and the model, whatever the file promises.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import h5py
import ml_dtypes
import numpy as np
import numpy.typing as npt

from ringtrain.errors import DataError, RingtrainError
from ringtrain.files.bounded import open_regular, parse_json
from ringtrain.messages.defects import describe_defect
from ringtrain.training.stored_chunks import require_whole_chunks

KIND = "weights/"
WEIGHTS_MEMBER = "model.weights.h5"

# A compressed archive may unpack to the largest of these. Weights shrink by a tenth, zeros of an
# optimizer to nothing.
MAX_RATIO_TO_FILE = 4
MAX_RATIO_TO_MODEL = 8
ALWAYS_UNPACKED_BYTES = 64 * 2**20
COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
ENCRYPTED_FLAG = 0x1

MAX_SAFETENSORS_HEADER_BYTES = 100_000_000  # as safetensors itself
SAFETENSORS_TYPES: dict[str, npt.DTypeLike] = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "U16": np.uint16,
    "I16": np.int16,
    "U32": np.uint32,
    "I32": np.int32,
    "U64": np.uint64,
    "I64": np.int64,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F32": np.float32,
    "F64": np.float64,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
}


@dataclass(frozen=True)
class SavedVariable:
    """A variable of a file, not read yet."""

    shape: tuple[int, ...]
    read: Callable[[], npt.NDArray[Any]]


SavedVariables = dict[str, SavedVariable]
"""By name, such as ``weights/inner/dense/0``."""


@contextlib.contextmanager
def open_weight_file(path: Path, *, model_bytes: int) -> Iterator[SavedVariables]:
    """Yield the variables of a ``.weights.h5``, ``.keras`` or ``.safetensors`` file.

    Args:
        path: of the file; its suffix says the format.
        model_bytes: of all weights of the model that takes them.

    Raises:
        DataError: the file is damaged, or not of this format; also when a value is read.
    """
    with contextlib.ExitStack() as opened:
        with explaining_content(path):
            file: IO[bytes] = opened.enter_context(open_regular(path, follows_links=True))
            if path.suffix == ".keras":
                file = opened.enter_context(unpack_weights(file, model_bytes=model_bytes))
            if path.suffix == ".safetensors":
                variables = list_safetensors(file)
            else:
                variables = list_h5(opened.enter_context(h5py.File(file, "r")))
        yield {name: explained(variable, path) for name, variable in variables.items()}


@contextlib.contextmanager
def explaining_content(path: Path) -> Iterator[None]:
    """Raise DataError with the file and the reason for every error of a reader.

    The readers are of HDF5, zip and others, and raise almost any exception for wrong content.
    """
    try:
        yield
    except RingtrainError:
        raise
    except Exception as error:
        reason = describe_defect(error).rstrip(". ")
        raise DataError(
            f"init_from {str(path)!r} cannot be read: {reason}. The file is damaged, or no {path.suffix} file of "
            "weights. Write it again, or give another."
        ) from None


def explained(variable: SavedVariable, path: Path) -> SavedVariable:
    """Return a variable whose errors name the file."""

    def read() -> npt.NDArray[Any]:
        with explaining_content(path):
            return variable.read()

    return SavedVariable(variable.shape, read)


# --- .keras ---


@contextlib.contextmanager
def unpack_weights(file: IO[bytes], *, model_bytes: int) -> Iterator[IO[bytes]]:
    """Yield the HDF5 file in an archive of Keras; all other members are ignored, since they may name code.

    Raises:
        ValueError, KeyError, zipfile.BadZipFile, zlib.error: damaged, encrypted, or too large unpacked.
    """
    with zipfile.ZipFile(file) as archive, tempfile.TemporaryFile() as unpacked:
        member = archive.getinfo(WEIGHTS_MEMBER)
        require_small_member(member, os.fstat(file.fileno()).st_size, model_bytes)
        with archive.open(member) as packed:  # never yields more than ``file_size``
            shutil.copyfileobj(packed, unpacked)
        yield unpacked


def require_small_member(member: zipfile.ZipInfo, archive_bytes: int, model_bytes: int) -> None:
    """Raise ValueError if the member is encrypted, compressed otherwise than by Deflate, or too large unpacked."""
    if member.flag_bits & ENCRYPTED_FLAG:
        raise ValueError(f"its member {member.filename} is encrypted")
    if member.compress_type not in COMPRESSIONS:
        raise ValueError(f"its member {member.filename} is compressed by method {member.compress_type}, not Deflate")
    most = max(MAX_RATIO_TO_FILE * archive_bytes, MAX_RATIO_TO_MODEL * model_bytes, ALWAYS_UNPACKED_BYTES)
    if member.file_size > most:
        raise ValueError(
            f"its member {member.filename} unpacks to {member.file_size:,} bytes, and at most {most:,} are unpacked "
            f"({MAX_RATIO_TO_FILE} times the file or {MAX_RATIO_TO_MODEL} times the model). If it is right, unpack "
            "it yourself, and give it as NAME.weights.h5"
        )


# --- .weights.h5 ---


def list_h5(file: h5py.File) -> SavedVariables:
    """Name variables by their layers and their number there, such as ``weights/inner/dense/0``.

    Datasets whose values are in other files are left out, and so are links.
    """
    objects: dict[str, Any] = {}
    file.visititems(lambda path, item: objects.update({f"/{path}": item}))
    names = {path.removesuffix("/vars"): read_name(item) for path, item in objects.items()}
    variables: SavedVariables = {}
    for path, item in objects.items():
        owner, is_value, number = path.rpartition("/vars/")
        if not is_value or owner.startswith("/optimizer") or not isinstance(item, h5py.Dataset):
            continue
        if item.external or item.is_virtual:
            continue
        groups = itertools.accumulate(owner.split("/"), "{}/{}".format)
        layers = [names.get(group) for group in groups]
        name = "/".join([*filter(None, layers[1:]), number])  # the first is the model
        require_numbers(item, path)
        variables[KIND + name] = SavedVariable(item.shape, functools.partial(read_dataset, item, path))
    return variables


def read_name(item: Any) -> str | None:
    """Return the name of a layer, which Keras writes as an attribute; None without one.

    Raises:
        ValueError: the attribute is no text.
    """
    if "name" not in item.attrs:
        return None
    stored = item.attrs.get_id("name")
    is_text = stored.shape == () and h5py.check_string_dtype(stored.dtype) is not None
    if not is_text:
        raise ValueError(f"the attribute 'name' of {item.name} is of type {stored.dtype}, and must be one text")
    return str(item.attrs["name"])


def is_bfloat16(dataset: h5py.Dataset) -> bool:
    """Return True for bytes of bfloat16, which HDF5 lacks: Keras says so in an attribute."""
    return dataset.dtype.itemsize == 2 and "dtype" in dataset.attrs and dataset.attrs["dtype"] == "bfloat16"


def require_numbers(dataset: h5py.Dataset, path: str) -> None:
    """Raise ValueError unless a dataset is an array of numbers."""
    if dataset.shape is None:
        raise ValueError(f"{path} is an empty dataset, and a variable must be an array of numbers")
    if dataset.dtype.kind not in "biufc" and not is_bfloat16(dataset):
        raise ValueError(f"{path} is of type {dataset.dtype}, and a variable must be an array of numbers")


def read_dataset(dataset: h5py.Dataset, path: str) -> npt.NDArray[Any]:
    """Return the values. Raise ValueError if its chunks would unpack to more than its shape says."""
    require_whole_chunks(dataset, path)
    value: npt.NDArray[Any] = dataset[()]
    return np.asarray(value).view(ml_dtypes.bfloat16) if is_bfloat16(dataset) else value


# --- .safetensors ---


def list_safetensors(file: IO[bytes]) -> SavedVariables:
    """Read the header of a safetensors file: its length in 8 bytes, then JSON (https://github.com/huggingface/safetensors).

    Raises:
        ValueError: it is no such file, or promises values that it does not have.
    """
    file_bytes = os.fstat(file.fileno()).st_size
    header_bytes = int.from_bytes(file.read(8), "little")
    start = 8 + header_bytes
    if header_bytes > MAX_SAFETENSORS_HEADER_BYTES or start > file_bytes:
        raise ValueError(f"its header would have {header_bytes:,} bytes; the file has {file_bytes:,}")
    header = parse_json(file.read(header_bytes))
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    variables: SavedVariables = {}
    for name, item in header.items():
        if name != "__metadata__":
            variables[KIND + name] = list_tensor(file, name, item, start=start, num_bytes=file_bytes - start)
    return variables


def list_tensor(file: IO[bytes], name: str, item: Any, *, start: int, num_bytes: int) -> SavedVariable:
    """Return a tensor of a safetensors file, whose values are ``num_bytes`` bytes from ``start`` on."""
    try:
        dtype = np.dtype(SAFETENSORS_TYPES[item["dtype"]])
        shape = tuple(item["shape"])
        first, end = item["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"its header says {str(item)[:100]} of tensor {name!r}") from None
    are_sizes = all(type(size) is int and size >= 0 for size in (*shape, first, end))
    if not are_sizes or end > num_bytes or end - first != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"its tensor {name!r} of shape {list(shape)} would be bytes {first} to {end} of {num_bytes}")

    def read() -> npt.NDArray[Any]:
        file.seek(start + first)
        return np.frombuffer(file.read(end - first), dtype).reshape(shape)

    return SavedVariable(shape, read)
