"""TensorBoard event files, read without TensorFlow; for images, only their records.

A record: length (uint64), checksum (4 bytes), data, checksum (4 bytes). Reading stops at an invalid record.
"""

from __future__ import annotations

import base64
import mmap
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringtrain.files.bounded import open_regular

PNG = b"\x89PNG\r\n\x1a\n"
HEAD_BYTES = 1024  # an image begins within them
FRAME_BYTES = 16  # overhead per record
MAX_RECORD_BYTES = 64 * 2**20
MAX_RECORDS = 5_000_000  # per file
MAX_FILE_BYTES = 16 * 2**30
MAX_SHOWN_STEPS = 8
MAX_SHOWN_BYTES = 3 * 2**20  # of all images of a run
MAX_IMAGES = 8  # per name and step


@dataclass(frozen=True, kw_only=True)
class ImageSet:
    steps: list[int]
    images: list[list[str]]  # per step, as ``data:`` URLs
    num_steps: int  # with images


Place = tuple[Path, int, int]  # of a record: file, offset, bytes


def list_event_files(directory: Path) -> list[Path]:
    """Exclude incomplete files of killed processes."""
    return sorted(path for path in directory.glob("*tfevents*") if not path.name.startswith("."))


def read_images(paths: Sequence[Path]) -> dict[str, ImageSet]:
    places: dict[str, dict[int, Place]] = {}
    for path in paths:
        for content, begin, num_bytes in iterate_records(path):
            if num_bytes > len(PNG) and content.find(PNG, begin, begin + min(num_bytes, HEAD_BYTES)) >= 0:
                event = parse_event(content[begin : begin + num_bytes])
                if event is None:
                    break
                for value in event.summary.value:  # the latest for each step
                    places.setdefault(value.tag, {})[event.step] = (path, begin, num_bytes)
    return {name: shown for name, at in places.items() if (shown := _read_some(name, at, len(places)))}


def _read_some(name: str, places: Mapping[int, Place], num_names: int) -> ImageSet | None:
    steps = sorted(places)
    most_bytes = max(num_bytes for _, _, num_bytes in places.values())
    wanted = choose_evenly(steps, min(MAX_SHOWN_STEPS, MAX_SHOWN_BYTES // num_names // most_bytes))
    read = [(step, images) for step in wanted if (images := _read_pngs(places[step], name))]
    if not read:
        return None
    return ImageSet(steps=[step for step, _ in read], images=[images for _, images in read], num_steps=len(steps))


def choose_evenly(values: Sequence[int], number: int) -> list[int]:
    """Return at most ``number`` values, with the last, and the first if two or more."""
    if number <= 1 or len(values) <= 1:
        return list(values[-1:]) if number else []
    count = min(number, len(values))
    return [values[round(place * (len(values) - 1) / (count - 1))] for place in range(count)]


def iterate_records(path: Path) -> Iterator[tuple[mmap.mmap, int, int]]:
    """Yield content, offset and length of records, up to an invalid one."""
    with open_regular(path) as file:
        if not os.fstat(file.fileno()).st_size:
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            offset, size = 0, min(len(content), MAX_FILE_BYTES)
            for _ in range(MAX_RECORDS):
                if offset + FRAME_BYTES > size:
                    return
                (num_bytes,) = struct.unpack_from("<Q", content, offset)
                begin, offset = offset + 12, offset + FRAME_BYTES + num_bytes
                if offset > size or not 0 < num_bytes <= MAX_RECORD_BYTES:
                    return
                yield content, begin, num_bytes


def _read_pngs(place: Place, name: str) -> list[str]:
    path, offset, num_bytes = place
    with open_regular(path) as file:
        file.seek(offset)
        event = parse_event(file.read(num_bytes))
    tensors = [value.tensor.string_val for value in (event.summary.value if event else ()) if value.tag == name]
    pngs = [item for item in tensors[-1][2:] if item.startswith(PNG)] if tensors else []  # after width and height
    return [f"data:image/png;base64,{base64.b64encode(png).decode()}" for png in pngs[:MAX_IMAGES]]


def parse_event(record: bytes) -> Any:
    from google.protobuf.message import DecodeError
    from tensorboard.compat.proto.event_pb2 import Event  # its own copy, without TensorFlow

    try:
        return Event.FromString(record)
    except DecodeError:
        return None
