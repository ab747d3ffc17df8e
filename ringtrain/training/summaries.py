"""TensorBoard's event files on rank 0; each step once, in spite of resumes."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path

import tensorflow as tf

from ringtrain.errors import UsageError
from ringtrain.files.atomic import WRITING, replacing
from ringtrain.files.bounded import make_directory
from ringtrain.messages.defects import describe_defect, strip_nodes
from ringtrain.messages.rules import shorten
from ringtrain.report.event_files import FRAME_BYTES, iterate_records, list_event_files, parse_event
from ringtrain.run.directory import RunDirectoryError
from ringtrain.workloads.base import Histogram, Images

MAX_IMAGES = 8


class EventFiles:
    """Methods raise RunDirectoryError if files cannot be written; ``show`` raises UsageError for invalid values."""

    def __init__(self, directory: Path, *, first_step: int) -> None:
        """Removes events after ``first_step``: these steps are trained again."""
        self._directory = directory
        with explaining(self._directory):
            make_directory(directory)
            forget_after(directory, first_step)
            # Random name: TensorFlow would write through an existing link.
            ending = f".{secrets.token_hex(8)}.v2"
            self._writer = tf.summary.create_file_writer(str(directory), filename_suffix=ending)

    def scalars(self, prefix: str, values: Mapping[str, float], *, step: int) -> None:
        with explaining(self._directory), self._writer.as_default(step=step):
            for name, value in values.items():
                tf.summary.scalar(f"{prefix}/{name}", value)

    def show(self, values: Mapping[str, Images | Histogram], *, step: int) -> None:
        is_known = isinstance(values, Mapping) and all(isinstance(v, Images | Histogram) for v in values.values())
        if not is_known:
            raise UsageError(
                f"it gave {shorten(repr(values))}; it must give a mapping of names to Images or Histogram."
            )
        with explaining(self._directory), self._writer.as_default(step=step):
            for name, value in values.items():
                try:
                    if isinstance(value, Images):
                        tf.summary.image(name, value.values, max_outputs=MAX_IMAGES)
                    else:
                        tf.summary.histogram(name, value.values)
                except (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError, TypeError, ValueError) as error:
                    raise UsageError(
                        f"the summary {name!r} cannot be shown: {describe_defect(error)} Give images as [n, h, w, c] "
                        "with 1, 3 or 4 channels, and numbers to a histogram."
                    ) from error

    def flush(self) -> None:
        """Flush before a checkpoint, whose steps are not trained again."""
        with explaining(self._directory):
            self._writer.flush()

    def close(self) -> None:
        with explaining(self._directory):
            self._writer.close()


@contextlib.contextmanager
def explaining(directory: Path) -> Iterator[None]:
    """TensorFlow's errors name an operation."""
    try:
        yield
    except (tf.errors.OpError, OSError) as error:
        reason = getattr(error, "strerror", None) or strip_nodes(getattr(error, "message", str(error)))
        raise RunDirectoryError(directory, reason.splitlines()[0]) from error


def forget_after(directory: Path, step: int) -> None:
    for unfinished in directory.glob(f"{WRITING}*"):  # from a killed process
        unfinished.unlink()
    for path in list_event_files(directory):
        if all(is_kept for is_kept, _ in _read_records(path, step)):
            continue
        with replacing(path) as file:
            file.writelines(record for is_kept, record in _read_records(path, step) if is_kept)


def _read_records(path: Path, step: int) -> Iterator[tuple[bool, bytes]]:
    """Yield (is kept, record with frame), up to a truncated record."""
    for content, begin, num_bytes in iterate_records(path):
        event = parse_event(content[begin : begin + num_bytes])
        if event is None:
            return
        frame = begin - 12
        yield event.step <= step, content[frame : frame + FRAME_BYTES + num_bytes]
