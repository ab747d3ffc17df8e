"""Index of TFRecord files: offset, kind, shape and label of each record.

A record: length (8 bytes), masked CRC32C (4), data, masked CRC32C (4); see TensorFlow's ``tsl/lib/io/record_writer.h``.
TensorFlow's reader checks both CRCs once; zlib's CRC-32 checks later reads, as Python lacks a fast CRC32C.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import json
import os
import stat
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from ringtrain.data.formats import file_error, reading
from ringtrain.data.formats.image_header import HeaderError, read_header
from ringtrain.files.atomic import replacing
from ringtrain.files.bounded import read_bounded
from ringtrain.runtime import activity
from ringtrain.runtime.private import random_record_reader

HEADER_BYTES = 12  # length and its CRC
FOOTER_BYTES = 4  # the data's CRC

ENTRY = np.dtype(
    [
        ("file", "<i4"),
        ("offset", "<i8"),
        ("length", "<i8"),  # of the data
        ("crc32", "<u4"),  # of the data
        ("kind", "u1"),  # ENCODED, RAW or DAMAGED
        ("label", "<i8"),
        ("height", "<i4"),  # 0, as width and channels, if the header is corrupt
        ("width", "<i4"),
        ("channels", "<i4"),
    ]
)
ENCODED, RAW, DAMAGED = 0, 1, 2

_MAGIC = b"ringtfr1"
_PARSED_TOGETHER = 64


class FileState(NamedTuple):
    """A data file when it was indexed."""

    name: str
    num_bytes: int
    mtime_ns: int


class Index(NamedTuple):
    """Records of files; ``entries`` of type ``ENTRY``, in file order."""

    files: tuple[FileState, ...]
    entries: np.ndarray
    paths: tuple[Path, ...]

    def describe(self, sample: int) -> str:
        entry = self.entries[sample]
        first = np.searchsorted(self.entries["file"], entry["file"])  # first record of the file
        return _name(self.paths[entry["file"]], sample - first, entry["offset"])

    @property
    def fingerprint(self) -> str:
        """SHA-256 of files' names and sizes, and all entries."""
        digest = hashlib.sha256(json.dumps([file[:2] for file in self.files]).encode())
        digest.update(self.entries.tobytes())
        return digest.hexdigest()


def load_index(paths: Sequence[Path], caches: Sequence[Path] = ()) -> Index:
    """Use a valid cache, or read the files and write the first writable cache."""
    states = []
    for path in paths:
        with reading(path):
            status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise file_error(f"{path} is no regular file. Remove it, or make it again with ringtrain convert.")
        states.append(FileState(path.name, status.st_size, status.st_mtime_ns))
    files = tuple(states)
    for cache in caches:
        if (known := _read_cache(cache, files)) is not None:
            return Index(files, known, tuple(paths))
    entries = [scan_file(path, number) for number, path in enumerate(paths)]
    index = Index(files, np.concatenate(entries), tuple(paths))
    for cache in caches:
        with contextlib.suppress(OSError):  # without a cache the next run reads again
            _write_cache(cache, index)
            break
    return index


# --- The cache: magic, SHA-256 of the rest, length of the header (8 bytes), header (JSON), entries ---


def _header(files: tuple[FileState, ...]) -> bytes:
    header = json.dumps({"files": files, "entry": ENTRY.descr}).encode()
    return struct.pack("<Q", len(header)) + header


def _write_cache(cache: Path, index: Index) -> None:
    body = _header(index.files) + index.entries.tobytes()
    cache.parent.mkdir(parents=True, exist_ok=True)
    with replacing(cache) as file:
        file.write(_MAGIC + hashlib.sha256(body).digest() + body)


def _read_cache(cache: Path, files: tuple[FileState, ...]) -> np.ndarray | None:
    header, start = _header(files), len(_MAGIC) + hashlib.sha256().digest_size
    most_records = sum(file.num_bytes for file in files) // (HEADER_BYTES + FOOTER_BYTES)
    try:
        most_bytes = start + len(header) + most_records * ENTRY.itemsize
        content = read_bounded(cache, most_bytes, follows_links=True)
        body = content[start:]
        if content[:start] != _MAGIC + hashlib.sha256(body).digest() or not body.startswith(header):
            return None
        return np.frombuffer(body, ENTRY, offset=len(header))
    except (OSError, ValueError):
        return None


# --- The scan ---


def scan_file(path: Path, number: int) -> np.ndarray:
    """Mark records with damaged data; after other damage later records cannot be found: an error."""
    records = _read_records(path)
    parts: list[np.ndarray] = []
    while some := list(itertools.islice(records, _PARSED_TOGETHER)):
        activity.move()
        parts.append(_describe(path, number, _PARSED_TOGETHER * len(parts), *zip(*some, strict=True)))
    if not parts:
        raise file_error(f"{path} is empty; it must hold records. Remove it, or make it again.")
    return np.concatenate(parts)


def _read_records(path: Path) -> Iterator[tuple[int, int, bytes | None]]:
    """Yield offset, length and data; None for damaged data."""
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c  # in Python: slow for data

    try:
        with path.open("rb", buffering=0) as file:
            num_bytes = os.fstat(file.fileno()).st_size
            reader = random_record_reader(os.fspath(path))
            offset = count = 0
            while offset < num_bytes:
                # TensorFlow allocates the given length, and aborts if it is too large.
                where, header = _name(path, count, offset), os.pread(file.fileno(), HEADER_BYTES, offset)
                length, crc = struct.unpack("<QI", header.ljust(HEADER_BYTES, b"\0"))
                if len(header) == HEADER_BYTES and crc != masked_crc32c(header[:8]):
                    raise file_error(
                        f"{where} has a wrong checksum (CRC32C) of its length: the file is damaged, or no plain "
                        "TFRecord file. Copy it again, or make it again with ringtrain convert."
                    )
                end = offset + HEADER_BYTES + length + FOOTER_BYTES
                if len(header) < HEADER_BYTES or end > num_bytes:
                    raise file_error(
                        f"{where} is cut off: the file ends within it, after {num_bytes:,} bytes. Copy it again, or "
                        "make it again with ringtrain convert."
                    )
                try:
                    data, _ = reader.read(offset)
                except IndexError as error:
                    raise file_error(f"{where} was cut off while it was read. Write the file again.") from error
                except tf.errors.DataLossError:
                    data = None
                yield offset, length, data
                offset, count = end, count + 1
    except (OSError, tf.errors.OpError) as error:
        raise file_error(f"{path} cannot be read: {error}. Check the file and its permissions.") from error


def _describe(
    path: Path,
    number: int,
    first: int,
    offsets: Sequence[int],
    lengths: Sequence[int],
    records: Sequence[bytes | None],
) -> np.ndarray:
    def name(place: int) -> str:
        return _name(path, first + place, offsets[place])

    entries = np.zeros(len(records), ENTRY)
    entries["file"], entries["offset"], entries["length"] = number, offsets, lengths
    entries["kind"] = [DAMAGED if record is None else ENCODED for record in records]
    whole = np.flatnonzero(entries["kind"] == ENCODED).tolist()
    features = _parse([records[place] for place in whole], lambda place: name(whole[place]))
    for place, encoded, raw, label, *shape in zip(whole, *features, strict=True):
        entry = entries[place]
        entry["crc32"] = zlib.crc32(records[place] or b"")
        entry["label"] = label
        entry["kind"] = RAW if raw else ENCODED
        entry["height"], entry["width"], entry["channels"] = shape if raw else _shape_of(encoded)
        problem = _problem(encoded, raw, label, shape)
        if problem:
            raise file_error(f"{name(place)} {problem}")
    return entries


def _parse(records: list[bytes | None], name_of: Callable[[int], str]) -> list[np.ndarray]:
    """Return encoded and raw image, label, height, width and channels, [n] each."""
    texts = dict.fromkeys(("image/encoded", "image/raw"), tf.io.FixedLenFeature([], tf.string, b""))
    numbers = {"image/class/label": -1, "image/height": 0, "image/width": 0, "image/channels": 0}  # defaults
    spec = texts | {name: tf.io.FixedLenFeature([], tf.int64, value) for name, value in numbers.items()}
    with tf.device("CPU"):
        try:
            parsed = tf.io.parse_example(tf.constant(records, tf.string), spec)
        except tf.errors.InvalidArgumentError:
            for place, record in enumerate(records):
                try:
                    tf.io.parse_example(tf.constant([record]), spec)
                except tf.errors.InvalidArgumentError as error:
                    raise file_error(
                        f"{name_of(place)} is no tf.train.Example with the features {', '.join(spec)}, each of one "
                        f"value: {error.message}. Write it so."
                    ) from error
            raise
    return [parsed[name].numpy() for name in spec]


def _shape_of(encoded: bytes) -> tuple[int, int, int]:
    try:
        return read_header(io.BytesIO(encoded))
    except HeaderError:
        return (0, 0, 0)  # decoding reports the error


def _name(path: Path, record: int, offset: int) -> str:
    return f"record {record} (at byte {offset:,}) of {path}"


def _problem(encoded: bytes, raw: bytes, label: int, shape: list[int]) -> str | None:
    if label < 0:
        return "has no label of 0 or above; it must have one, as image/class/label (int64)."
    if raw and len(raw) != np.prod(shape):
        height, width, channels = shape
        return (
            f"has {len(raw):,} bytes in image/raw; with image/height {height}, image/width {width} and image/channels "
            f"{channels} it must have {np.prod(shape):,}."
        )
    if bool(raw) == bool(encoded):
        what = "both image/encoded and" if raw else "neither image/encoded nor"
        return f"has {what} image/raw; it must have one of them."
    return None
