"""TFRecord files of images, with random access by an index.

A record is a ``tf.train.Example`` with ``image/encoded`` (JPEG or PNG), or ``image/raw`` (uint8) with ``image/height``,
``image/width`` and ``image/channels``, and ``image/class/label`` (int64, from 0), as in TensorFlow's ImageNet scripts.
"""

from __future__ import annotations

import functools
import hashlib
import os
import weakref
import zlib
from pathlib import Path

import numpy as np
import tensorflow as tf

from ringtrain.data.formats import file_error
from ringtrain.data.formats.image_folder import (
    EVALUATION_FOLDERS,
    TRAIN_FOLDER,
    Channels,
    decode_batch,
    decode_image,
    reason_of,
    resize_middle,
)
from ringtrain.data.formats.tfrecord_index import DAMAGED, HEADER_BYTES, RAW, Index, load_index
from ringtrain.data.sources import UnreadableSample
from ringtrain.files import cache_directory
from ringtrain.files.bounded import read_bounded

CLASSES_FILE = "classes.txt"
MAX_CLASSES_BYTES = 64 * 2**20
_PATTERNS = ("{}.tfrecord", "{}-*.tfrecord", "{}-*-of-*")
_MAX_OPEN_FILES = 64
DAMAGED_REASON = "the checksum (CRC32C) of its data is wrong"
Shape = tuple[int, int, int]


class _RecordError(Exception):
    """Why a record is unreadable."""


def load_tfrecords(
    data_dir: Path,
    *,
    image_size: int | None,
    channels: Channels,
    index_dir: Path | None = None,
) -> tuple[TFRecordSource, TFRecordSource | None]:
    """Load training and, if present, evaluation samples. The first call reads all records, to index them.

    Args:
        data_dir: holds ``train-*.tfrecord`` or ``train.tfrecord``, optionally ``validation``, ``val`` or ``test``
            likewise, and ``classes.txt`` with one class name per line.
        image_size: resize each image's central square to this side in pixels, and convert channels. None: all images
            must have one size and ``channels`` channels.
        channels: 1 for grey images, 3 for colour. Raw images must have them.
        index_dir: directory of the index; None: ``data_dir``, or if read-only, ``$XDG_CACHE_HOME/ringtrain/index`` or
            ``~/.cache/ringtrain/index``.

    Raises:
        DataError: files are missing or damaged; a label is out of range; a class has no training sample; shapes differ.
    """
    class_names = read_class_names(data_dir)
    parts = {"train": find_files(data_dir, TRAIN_FOLDER), "evaluation": find_files(data_dir, *EVALUATION_FOLDERS)}
    if not parts["train"]:
        raise file_error(
            f"{data_dir} has no files {TRAIN_FOLDER}-*.tfrecord. Name their directory with --data_dir, or make them "
            "with ringtrain convert."
        )
    place = hashlib.sha256(os.fsencode(data_dir.resolve())).hexdigest()[:12]
    index_dirs = [index_dir] if index_dir else [data_dir, cache_directory("index")]
    num_classes = len(class_names)
    sources: list[TFRecordSource] = []
    for name, paths in parts.items():
        if not paths:
            continue
        file_name = f".tfrecord-{name}-{place}.index"
        index = load_index(paths, [directory / file_name for directory in index_dirs])
        num_classes = num_classes or 1 + int(index.entries["label"].max())  # from the training samples
        _check_labels(index, num_classes, class_names, must_have_all=name == "train")
        train_shape = sources[0].image_shape if sources else None
        sources.append(TFRecordSource(index, image_size, channels, train_shape, num_classes))
    return sources[0], sources[1] if len(sources) > 1 else None


def find_files(data_dir: Path, *names: str) -> tuple[Path, ...]:
    """Use the first name with any files."""
    for name in names:
        paths = {path for pattern in _PATTERNS for path in data_dir.glob(pattern.format(name)) if path.is_file()}
        if paths:
            return tuple(sorted(paths))
    return ()


def read_class_names(data_dir: Path) -> list[str]:
    try:
        return read_bounded(data_dir / CLASSES_FILE, MAX_CLASSES_BYTES, follows_links=True).decode().splitlines()
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise file_error(
            f"{data_dir / CLASSES_FILE} cannot be read: {error}. It names a class on each line; remove or mend it."
        ) from error


def _check_labels(index: Index, num_classes: int, class_names: list[str], *, must_have_all: bool) -> None:
    entries = index.entries
    whole = np.flatnonzero(entries["kind"] != DAMAGED)
    labels = entries["label"][whole]
    wrong = whole[labels >= num_classes]
    if len(wrong):
        raise file_error(
            f"{index.describe(wrong[0])} has the label {entries['label'][wrong[0]]}; with {num_classes} classes labels "
            f"must be 0 to {num_classes - 1} ({len(wrong):,} of {len(entries):,} records are wrong). Mend the records, "
            f"or {CLASSES_FILE}."
        )
    there = np.unique(labels)
    if must_have_all and len(there) < num_classes:
        # First gap in the labels; not by counts, since wrong labels can be huge.
        missing = int(np.argmax(np.append(there, -1) != np.arange(len(there) + 1)))
        name = f" ({class_names[missing]!r})" if missing < len(class_names) else ""
        raise file_error(
            f"no record of {index.paths[0].parent} has the label {missing}{name}; each of the {num_classes} classes "
            f"needs a sample to train on ({num_classes - len(there)} of them without). Labels count from 0: add the "
            f"samples, or mend {CLASSES_FILE}."
        )


def _find_stored_shape(
    index: Index, image_size: int | None, channels: int, train_shape: Shape | None
) -> tuple[bool, Shape | None]:
    """Return if images are raw, and their shape unless they are converted: one, ``train_shape`` for evaluation."""
    entries = index.entries
    known = np.flatnonzero((entries["kind"] != DAMAGED) & (entries["height"] > 0))
    if not len(known):
        raise file_error(
            f"no record of {index.paths[0].parent} holds an image that can be read. Write the files again."
        )
    first = entries[known[0]]
    is_raw = bool(first["kind"] == RAW)
    fixed: dict[str, int] = {"kind": int(first["kind"])}
    if is_raw or image_size is None:
        size = train_shape if train_shape and image_size is None else (first["height"], first["width"])
        fixed |= {"channels": channels, "height": int(size[0]), "width": int(size[1])}
    for name, value in fixed.items():
        wrong = known[entries[name][known] != value]
        if len(wrong):
            rule = {"kind": "encoded, or all raw", "channels": f"with {channels} channels"}.get(name, "of one size")
            raise file_error(
                f"{index.describe(wrong[0])} holds an image of {_shape_text(entries[wrong[0]])}, and the first is of "
                f"{_shape_text(first)}; all must be {rule}. Bring them to one form, or have encoded ones resized and "
                "converted with --options.image_size."
            )
    return is_raw, (fixed["height"], fixed["width"], channels) if "height" in fixed else None


def _shape_text(entry: np.void) -> str:
    kind = "raw" if entry["kind"] == RAW else "encoded"
    return f"{entry['height']}x{entry['width']} with {entry['channels']} channels ({kind})"


class TFRecordSource:
    """Images uint8 [n, h, w, c] and labels int64 [n], from ``load_tfrecords``."""

    def __init__(
        self, index: Index, image_size: int | None, channels: int, train_shape: Shape | None, num_classes: int
    ) -> None:
        self._is_raw, self._stored_shape = _find_stored_shape(index, image_size, channels, train_shape)
        image_shape = (image_size, image_size, channels) if image_size else self._stored_shape
        assert image_shape is not None  # one of them is known
        self.num_samples = len(index.entries)  # including damaged ones
        self.image_shape, self.num_classes, self._index = image_shape, num_classes, index
        self.fingerprint = hashlib.sha256(f"{index.fingerprint} {image_shape}".encode()).hexdigest()
        self._open = functools.lru_cache(_MAX_OPEN_FILES)(_OpenFile)  # keeps recently used files open
        with tf.device("CPU"):
            self.paths = tf.constant([os.fsencode(path) for path in index.paths])  # [files]
        self._labels = np.asarray(index.entries["label"], np.int64)
        self.damaged = tuple(
            UnreadableSample(number, index.describe(number), DAMAGED_REASON, self._path_of(number))
            for number in np.flatnonzero(index.entries["kind"] == DAMAGED).tolist()
        )

    def gather(self, indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Read images uint8 [n, h, w, c] and labels int64 [n]; runs in a graph."""
        with tf.device("CPU"):
            records = tf.numpy_function(self._read, [indices], tf.string)
            records.set_shape(indices.shape[:1])
            stored = self._stored_in(records)
            if self._is_raw and self._stored_shape == self.image_shape:
                images = tf.reshape(tf.io.decode_raw(stored, tf.uint8), [-1, *self.image_shape])
            else:
                images = decode_batch(self._decode_one, stored, image_shape=self.image_shape)
            images.set_shape([*indices.shape[:1], *self.image_shape])
            return images, tf.gather(self._labels, indices)

    def why_unreadable(self, number: int) -> UnreadableSample | None:
        """Read and decode one record; return None if that succeeds."""
        try:
            with tf.device("CPU"):
                self._decode_one(self._stored_in(tf.constant([self._read_record(number)]))[0])
            return None
        except _RecordError as error:
            reason = str(error)
        except (ValueError, tf.errors.OpError) as error:  # ValueError: another shape
            reason = f"cannot be decoded: {reason_of(error)}"
        return UnreadableSample(number, self._index.describe(number), reason, self._path_of(number))

    def _path_of(self, number: int) -> str:
        return os.fspath(self._index.paths[self._index.entries[number]["file"]])

    # --- Reading, on the host ---

    def _read(self, indices: np.ndarray) -> np.ndarray:
        """Return records, bytes [n]."""
        return np.array([self._read_record(int(index)) for index in indices], object)

    def _read_record(self, index: int) -> bytes:
        """Raise ``_RecordError`` with the reason."""
        entry = self._index.entries[index]
        if entry["kind"] == DAMAGED:
            raise _RecordError(DAMAGED_REASON)
        try:
            file = self._open(self._index.paths[entry["file"]])  # a reference, so that no other thread closes it
            record = os.pread(file.descriptor, int(entry["length"]), int(entry["offset"]) + HEADER_BYTES)
        except OSError as error:
            raise _RecordError(f"{error.strerror}") from error
        if zlib.crc32(record) != entry["crc32"]:
            raise _RecordError("it is not what it was when its file was indexed: the file is damaged")
        return record

    # --- Decoding, in the graph ---

    def _stored_in(self, records: tf.Tensor) -> tf.Tensor:
        name = "image/raw" if self._is_raw else "image/encoded"
        return tf.io.parse_example(records, {name: tf.io.FixedLenFeature([], tf.string)})[name]

    def _decode_one(self, stored: tf.Tensor) -> tf.Tensor:
        """[h, w, c]."""
        if self._is_raw:
            image = tf.reshape(tf.io.decode_raw(stored, tf.uint8), self._stored_shape)
            return resize_middle(image, self.image_shape[0])
        return decode_image(stored, self.image_shape, is_resized=self._stored_shape is None)


class _OpenFile:
    """Descriptor open while referenced."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        # Not __del__: at exit its modules may be gone.
        weakref.finalize(self, os.close, self.descriptor)
