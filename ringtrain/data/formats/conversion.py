"""``ringtrain convert``: TFRecord files from an image folder or CIFAR-10."""

from __future__ import annotations

import io
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from ringtrain.data.formats import file_error, reading
from ringtrain.data.formats.cifar10 import ARCHIVE_NAME, CLASS_NAMES, FILES, FOLDER_NAME, load_cifar10
from ringtrain.data.formats.image_folder import ImageFolderSource, load_image_folder
from ringtrain.data.formats.image_header import HeaderError, read_header
from ringtrain.data.formats.tfrecord import CLASSES_FILE
from ringtrain.errors import UsageError
from ringtrain.files.atomic import replace_text

SHARD_BYTES = 128 << 20
"""Approximate file size unless the user sets the number of files."""


class Split(NamedTuple):
    """Samples of ``train`` or ``validation``, as serialised ``tf.train.Example``."""

    name: str
    num_samples: int
    num_bytes: int
    examples: Iterator[bytes]


class Converted(NamedTuple):
    samples: dict[str, int]
    num_files: int
    num_bytes: int
    num_classes: int
    seconds: float

    def __str__(self) -> str:
        samples = ", ".join(f"{count:,} {name}" for name, count in self.samples.items())
        files = f"{self.num_files} file{'s' if self.num_files > 1 else ''}, {self.num_bytes:,} bytes"
        return f"{samples} samples of {self.num_classes} classes in {files}, {self.seconds:.1f} s"


def convert(source: Path, destination: Path, *, kind: str = "auto", num_shards: int | None = None) -> Converted:
    """Write TFRecord files and class names, atomically.

    Args:
        source: an image folder, copied without re-encoding, or CIFAR-10's binary files, which become raw records:
            faster than PNG, a fifth larger.
        destination: must not exist, or be empty.
        kind: ``"image_folder"``, ``"cifar10"``, or ``"auto"``.
        num_shards: files per split; None: of about ``SHARD_BYTES``.
    """
    start = time.monotonic()
    destination = Path(os.path.abspath(destination))
    if os.path.lexists(destination) and not (destination.is_dir() and not any(destination.iterdir())):
        what = "is not empty" if destination.is_dir() else "is a file"
        raise UsageError(f"destination {destination} {what}; name a directory that does not exist yet.")
    if source.resolve() in (destination.resolve(), *destination.resolve().parents):
        raise UsageError(f"destination {destination} is within the source {source}; name one outside of it.")
    class_names, splits = _open_source(source, kind)
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{destination.name}.partial-", dir=destination.parent))
        try:
            for split in splits:
                _write_split(partial, split, num_shards or -(-split.num_bytes // SHARD_BYTES))
            replace_text(partial / CLASSES_FILE, "".join(f"{name}\n" for name in class_names))
            sizes = [path.stat().st_size for path in partial.glob("*.tfrecord")]
            partial.chmod(0o755)
            partial.rename(destination)  # replaces an empty directory
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    except OSError as error:
        raise file_error(
            f"{destination} cannot be written: {error}. Check its place and the free space there."
        ) from error
    samples = {split.name: split.num_samples for split in splits}
    return Converted(samples, len(sizes), sum(sizes), len(class_names), time.monotonic() - start)


def _open_source(source: Path, kind: str) -> tuple[Sequence[str], list[Split]]:
    if not source.is_dir():
        raise file_error(f"source {source} is no directory that can be read. Check the path.")
    is_cifar10 = any((source / name).exists() for name in (FOLDER_NAME, ARCHIVE_NAME, *FILES))
    if kind == "cifar10" or (kind == "auto" and is_cifar10):
        return CLASS_NAMES, _open_cifar10(source)
    if kind == "auto" and not (source / "train").is_dir():
        raise file_error(
            f"source {source} is neither an image folder, which has a directory train/<class>, nor a place of "
            f"CIFAR-10, which has {FOLDER_NAME} or {ARCHIVE_NAME}. Check the path, or say what it is with --kind."
        )
    parts = load_image_folder(source, image_size=1, channels=3)  # any size: no image is read
    return parts[0].class_names, [_open_image_part(part) for part in parts if part is not None]


def _open_cifar10(source: Path) -> list[Split]:
    def examples(images: np.ndarray, labels: np.ndarray) -> Iterator[bytes]:
        for image, label in zip(images, labels.tolist(), strict=True):
            yield make_example({"image/raw": image.tobytes(), **_described(image.shape, label, CLASS_NAMES[label])})

    parts = zip(("train", "test"), load_cifar10(source), strict=True)
    return [Split(name, len(images), images.nbytes, examples(images, labels)) for name, (images, labels) in parts]


def _described(shape: Sequence[int], label: int, class_name: str) -> dict[str, bytes | int]:
    sizes = dict(zip(("image/height", "image/width", "image/channels"), shape, strict=True))
    return {**sizes, "image/class/label": label, "image/class/text": class_name.encode()}


def _write_split(directory: Path, split: Split, num_shards: int) -> None:
    num_shards = max(1, min(num_shards, split.num_samples))
    for shard in range(num_shards):
        count = split.num_samples * (shard + 1) // num_shards - split.num_samples * shard // num_shards
        path = directory / f"{split.name}-{shard:05d}-of-{num_shards:05d}.tfrecord"
        try:
            with tf.io.TFRecordWriter(os.fspath(path)) as writer:
                for _ in range(count):
                    writer.write(next(split.examples))
        except tf.errors.OpError as error:
            raise OSError(error.message) from error
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _open_image_part(part: ImageFolderSource) -> Split:
    paths = [Path(os.fsdecode(path)) for path in part.paths.numpy()]
    name = paths[0].parent.parent.name  # train, validation, val or test
    labelled = zip(paths, part.labels.numpy().tolist(), strict=True)
    examples = (_encoded_example(path, label, part.class_names[label]) for path, label in labelled)
    return Split(name, len(paths), sum(path.stat().st_size for path in paths), examples)


def _encoded_example(path: Path, label: int, class_name: str) -> bytes:
    with reading(path):
        encoded = path.read_bytes()
    try:
        header = read_header(io.BytesIO(encoded))
    except HeaderError as error:
        raise file_error(f"{path} is no image: {error}. Remove it or mend it.") from error
    return make_example(
        {
            "image/encoded": encoded,
            "image/format": b"png" if encoded.startswith(b"\x89PNG") else b"jpeg",
            "image/filename": os.fsencode(path.name),
            **_described(header, label, class_name),
        }
    )


def make_example(features: dict[str, bytes | int]) -> bytes:
    def feature(value: bytes | int) -> tf.train.Feature:
        if isinstance(value, bytes):
            return tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))
        return tf.train.Feature(int64_list=tf.train.Int64List(value=[value]))

    named = {name: feature(value) for name, value in features.items()}
    return tf.train.Example(features=tf.train.Features(feature=named)).SerializeToString(deterministic=True)
