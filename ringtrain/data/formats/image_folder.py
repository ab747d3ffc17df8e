"""Image folders: ``train/<class>/*.jpg``, and ``validation/``, ``val/`` or ``test/`` for evaluation."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import tensorflow as tf

from ringtrain.data.augment import graph_code
from ringtrain.data.formats import file_error, reading
from ringtrain.data.formats.image_header import HeaderError, ImageHeader, read_header
from ringtrain.data.sources import UnreadableSample
from ringtrain.runtime import activity

TRAIN_FOLDER = "train"
EVALUATION_FOLDERS = ("validation", "val", "test")
ENDINGS = (".jpg", ".jpeg", ".png")  # in any case

IO_THREADS = 16  # they mostly wait for the disk
_HEADERS_PER_TASK = 256
_HEADER_BUFFER_BYTES = 4096

Channels = Literal[1, 3]


@dataclass(frozen=True, eq=False, kw_only=True)
class ImageFolderSource:
    """Images uint8 [n, h, w, c] and classes int64 [n], from ``load_image_folder``."""

    paths: tf.Tensor  # string [num_samples]
    labels: tf.Tensor  # indices into class_names, int64 [num_samples]
    num_samples: int
    class_names: tuple[str, ...]  # sorted
    image_shape: tuple[int, int, int]  # (h, w, c)
    is_resized: bool  # other images are resized and converted, else refused
    fingerprint: str  # SHA-256 of classes, relative paths and sizes
    damaged: tuple[UnreadableSample, ...]  # corrupt headers; empty if is_resized

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    def gather(self, indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Read images uint8 [n, h, w, c] and classes int64 [n]; runs in a graph."""
        with tf.device("CPU"):
            paths = tf.gather(self.paths, indices)
            images = decode_batch(self._decode, paths, image_shape=self.image_shape)
            images.set_shape([*indices.shape[:1], *self.image_shape])
            return images, tf.gather(self.labels, indices)

    def why_unreadable(self, number: int) -> UnreadableSample | None:
        """Decode one image; return None if that succeeds."""
        with tf.device("CPU"):
            path = self.paths[number]
            try:
                self._decode(path)
            except (tf.errors.OpError, ValueError) as error:  # ValueError: another shape
                name = os.fsdecode(path.numpy())
                return UnreadableSample(number, name, reason_of(error), name)
        return None

    def _decode(self, path: tf.Tensor) -> tf.Tensor:
        """uint8 [h, w, c]."""
        return decode_image(tf.io.read_file(path), self.image_shape, is_resized=self.is_resized)


def load_image_folder(
    data_dir: Path, *, image_size: int | None, channels: Channels
) -> tuple[ImageFolderSource, ImageFolderSource | None]:
    """Load training and, if present, evaluation samples.

    The classes are the folders in ``train/``, sorted. Hidden files are ignored.

    Args:
        data_dir: holds ``train/<class>/`` with .jpg, .jpeg and .png files, and optionally ``validation``, ``val`` or
            ``test``.
        image_size: resize each image's central square to this side in pixels, and convert channels. None: all images
            must have one size and ``channels`` channels.
        channels: 1 for grey images, 3 for colour.

    Raises:
        DataError: a folder is missing, empty, or has unexpected contents; a file cannot be read; sizes or channels
            differ.
    """
    parts = [_list_part(data_dir / TRAIN_FOLDER)]
    class_names = tuple(dict.fromkeys(file.class_name for file in parts[0]))
    evaluation = next((name for name in EVALUATION_FOLDERS if os.path.isdir(data_dir / name)), None)
    if evaluation is not None:
        parts.append(_list_part(data_dir / evaluation))
        known = set(class_names)
        unknown = [file.class_name for file in parts[1] if file.class_name not in known]
        if unknown:
            raise file_error(
                f"{data_dir / evaluation} holds the class {unknown[0]!r}, which {TRAIN_FOLDER}/ does not: nothing "
                f"would train it. Training has {len(class_names)} classes, {class_names[0]!r} to {class_names[-1]!r}. "
                f"Remove or rename {data_dir / evaluation / unknown[0]}."
            )
    shape: dict[str, Any] = {"is_resized": image_size is not None}
    headers: list[list[ImageHeader | str]] = [[] for _ in parts]
    if image_size is None:
        headers = [_read_headers([file.path for file in files]) for files in parts]
        shape["image_shape"] = _common_shape(data_dir, parts, headers, channels)
    else:
        shape["image_shape"] = (image_size, image_size, channels)
    sources = [_create_source(data_dir, *part, class_names, **shape) for part in zip(parts, headers, strict=True)]
    return sources[0], sources[1] if len(sources) > 1 else None


def _create_source(
    data_dir: Path, files: list[_File], headers: list[ImageHeader | str], class_names: tuple[str, ...], **shape: Any
) -> ImageFolderSource:
    reasons = {number: header for number, header in enumerate(headers) if isinstance(header, str)}
    numbers = {name: number for number, name in enumerate(class_names)}
    fingerprint = hashlib.sha256("\0".join(class_names).encode(errors="surrogateescape"))  # determines the labels
    for file in files:
        fingerprint.update(os.fsencode(os.path.relpath(file.path, data_dir)) + b"\0%d\n" % file.num_bytes)
    with tf.device("CPU"):
        return ImageFolderSource(
            paths=tf.constant([os.fsencode(file.path) for file in files]),
            labels=tf.constant([numbers[file.class_name] for file in files], tf.int64),
            num_samples=len(files),
            class_names=class_names,
            fingerprint=fingerprint.hexdigest(),
            damaged=tuple(
                UnreadableSample(number, files[number].path, reason, files[number].path)
                for number, reason in reasons.items()
            ),
            **shape,
        )


# --- The listing ---


class _File(NamedTuple):
    path: str
    class_name: str
    num_bytes: int


def _list_part(folder: Path) -> list[_File]:
    """Sorted by class and name."""
    if not os.path.isdir(folder):
        raise file_error(
            f"the folder {folder} does not exist; an image folder contains one folder per class, as "
            f"{folder}/cat/1.jpg. Create it, or set another one with --data_dir."
        )
    entries = _scan(folder)
    others = [entry.name for entry in entries if not entry.is_dir()]
    if others:
        raise file_error(f"{folder} holds {_count_of(others)} in addition to the classes' folders. {_REMEDY}")
    if not entries:
        raise file_error(
            f"{folder} holds no class; it must hold one folder for each, as {folder}/cat/1.jpg. Put them there, or "
            "name another place with --data_dir."
        )
    with ThreadPoolExecutor(IO_THREADS) as threads:
        return list(itertools.chain(*threads.map(_list_class, [Path(entry.path) for entry in entries])))


def _list_class(folder: Path) -> list[_File]:
    entries = _scan(folder)
    others = [entry.name for entry in entries if not (entry.name.lower().endswith(ENDINGS) and entry.is_file())]
    if others:
        raise file_error(
            f"{folder} holds {_count_of(others)}; a class holds files that end in {', '.join(ENDINGS)}. {_REMEDY}"
        )
    if not entries:
        raise file_error(
            f"{folder} holds no image; each class needs at least one ({', '.join(ENDINGS)}). Put its images there, or "
            "remove the folder."
        )
    for entry in entries:
        if not os.access(entry.path, os.R_OK):
            raise file_error(f"{entry.path} cannot be read. Check the file and its permissions.")
    return [_File(entry.path, folder.name, entry.stat().st_size) for entry in entries]


_REMEDY = "Move what does not belong there to another place; names that begin with a dot are ignored."


def _scan(folder: Path) -> list[os.DirEntry[str]]:
    """Return visible entries, sorted."""
    with reading(folder, what="the folder"), os.scandir(folder) as entries:
        return sorted((entry for entry in entries if not entry.name.startswith(".")), key=lambda entry: entry.name)


def _count_of(names: Sequence[str]) -> str:
    return f"{names[0]!r}" if len(names) == 1 else f"{len(names):,} such things as {names[0]!r}"


# --- The headers ---


def _read_headers(paths: Sequence[str]) -> list[ImageHeader | str]:
    tasks = [paths[first : first + _HEADERS_PER_TASK] for first in range(0, len(paths), _HEADERS_PER_TASK)]
    with ThreadPoolExecutor(IO_THREADS) as threads:
        return list(itertools.chain(*threads.map(lambda task: list(map(_read_header, task)), tasks)))


def _read_header(path: str) -> ImageHeader | str:
    activity.move()
    try:
        with reading(path), open(path, "rb", buffering=_HEADER_BUFFER_BYTES) as file:
            return read_header(file)
    except HeaderError as error:
        return str(error)


def _common_shape(
    data_dir: Path, parts: Sequence[Sequence[_File]], headers: Sequence[Sequence[ImageHeader | str]], channels: int
) -> tuple[int, int, int]:
    both = zip(itertools.chain(*parts), itertools.chain(*headers), strict=True)
    images = [(file.path, header) for file, header in both if not isinstance(header, str)]
    if not images:
        raise file_error(
            f"no file in {data_dir} is an image. The first, {parts[0][0].path}: {headers[0][0]}. Check their origin."
        )
    first_path, first = images[0]
    expected = first._replace(channels=channels)
    for path, header in images:
        if header != expected:
            other = "" if path == first_path else f", and the first, {first_path}, is {first}"
            raise file_error(
                f"{path} is {header}{other}; all must have one size and {channels} "
                f"channel{'s' if channels > 1 else ''}. Bring them to one form, or have them resized and converted "
                "with --options.image_size."
            )
    return (first.height, first.width, channels)


PARALLEL_DECODES = 16  # at most; limited by the input pipeline's threads


def decode_batch(
    decode: Callable[[tf.Tensor], tf.Tensor], encoded: tf.Tensor, *, image_shape: tuple[int, int, int]
) -> tf.Tensor:
    """Decode images [n] in parallel; return uint8 [n, h, w, c].

    A dataset is faster than tf.map_fn for small images.
    """
    decoded = tf.data.Dataset.from_tensor_slices(encoded).map(
        graph_code(decode), num_parallel_calls=PARALLEL_DECODES, deterministic=True
    )
    # An extra element, removed again: an empty batch has no shape.
    last = tf.data.Dataset.from_tensors(tf.zeros(image_shape, tf.uint8))
    batch = decoded.concatenate(last).batch(tf.size(encoded, tf.int64) + 1)
    return batch.get_single_element()[:-1]


def decode_image(content: tf.Tensor, image_shape: tuple[int, int, int], *, is_resized: bool) -> tf.Tensor:
    """Decode JPEG or PNG to uint8 ``image_shape``; ``is_resized``: from its central square, with converted channels."""
    height, _, channels = image_shape
    # Detects and decodes PNG too.
    image = tf.io.decode_jpeg(content, channels=channels, dct_method="INTEGER_ACCURATE")
    return resize_middle(image, height) if is_resized else tf.ensure_shape(image, image_shape)


def resize_middle(image: tf.Tensor, size: int) -> tf.Tensor:
    """Resize the central square: uint8 [h, w, c] -> [size, size, c]."""
    height, width = tf.unstack(tf.shape(image)[:2])
    side = tf.minimum(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    square = image[top : top + side, left : left + side]
    resized = tf.image.resize(square, (size, size), method="bilinear", antialias=True)
    return tf.cast(tf.clip_by_value(tf.round(resized), 0, 255), tf.uint8)


def reason_of(error: Exception) -> str:
    """Remove operation names from TensorFlow's message."""
    message = error.message if hasattr(error, "message") else str(error)
    return re.sub(r"\{\{.*?\}\}\s*|\s*\[Op:.*", "", message.splitlines()[0])
