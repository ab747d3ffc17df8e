"""Size and channels of JPEG and PNG images, without reading the whole file.

As ``tf.io.decode_image`` with ``channels=0``. JPEG: ITU-T T.81, annex B; PNG: W3C Portable Network Graphics, sections 5
and 11.
"""

from __future__ import annotations

import os
import struct
from typing import BinaryIO, NamedTuple

_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PNG_CHANNELS = {0: 1, 2: 3, 3: 3, 4: 2, 6: 4}  # by colour type
_PNG_PALETTE = 3
# Start of frame, all coding processes: 0xC0 to 0xCF except DHT, JPG and DAC.
_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_JPEG_WITHOUT_CONTENT = frozenset({0x01, *range(0xD0, 0xD9)})  # TEM, RST0 to RST7, SOI
_JPEG_END, _JPEG_SCAN = 0xD9, 0xDA


class ImageHeader(NamedTuple):
    height: int
    width: int
    channels: int

    def __str__(self) -> str:
        return f"{self.height}x{self.width} with {self.channels} channel{'s' if self.channels > 1 else ''}"


class HeaderError(Exception):
    """No JPEG or PNG image, or truncated."""


def read_header(file: BinaryIO) -> ImageHeader:
    start = file.read(len(_PNG_SIGNATURE))
    if start == _PNG_SIGNATURE:
        header = _read_png(file)
    elif start[:3] == b"\xff\xd8\xff":
        file.seek(2)
        header = _read_jpeg(file)
    else:
        raise HeaderError(f"neither a JPEG nor a PNG image: it begins with {start!r}" if start else "an empty file")
    if not all(header):
        raise HeaderError(f"its header says {header}")
    return header


def _read_jpeg(file: BinaryIO) -> ImageHeader:
    while True:
        marker = _next_marker(file)
        if marker in _JPEG_WITHOUT_CONTENT:
            continue
        if marker in (_JPEG_END, _JPEG_SCAN):
            raise HeaderError("its pixels begin, or it ends, without a frame header")
        (length,) = struct.unpack(">H", _read_exactly(file, 2))  # includes itself
        if length < 2:
            raise HeaderError(f"a segment of {length} bytes")
        if marker in _JPEG_FRAMES:
            _, height, width, channels = struct.unpack(">BHHB", _read_exactly(file, 6))
            return ImageHeader(height, width, channels)
        file.seek(length - 2, os.SEEK_CUR)


def _next_marker(file: BinaryIO) -> int:
    """Skip other bytes, as libjpeg does."""
    while True:
        while _read_exactly(file, 1) != b"\xff":
            pass
        while (code := _read_exactly(file, 1)) == b"\xff":  # fill bytes
            pass
        if code != b"\0":
            return code[0]


def _read_png(file: BinaryIO) -> ImageHeader:
    _, kind, width, height, _, colour = struct.unpack(">I4sIIBB", _read_exactly(file, 18))
    if kind != b"IHDR" or colour not in _PNG_CHANNELS:
        raise HeaderError(f"its first chunk is {kind!r} with colour type {colour}")
    channels = _PNG_CHANNELS[colour]
    if colour == _PNG_PALETTE:
        file.seek(3 + 4, os.SEEK_CUR)  # rest of IHDR, and checksum
        channels += _has_transparency(file)
    return ImageHeader(height, width, channels)


def _has_transparency(file: BinaryIO) -> bool:
    """The palette's transparency is decoded as a channel."""
    while True:
        length, kind = struct.unpack(">I4s", _read_exactly(file, 8))
        if kind in (b"tRNS", b"IDAT"):
            return kind == b"tRNS"
        file.seek(length + 4, os.SEEK_CUR)


def _read_exactly(file: BinaryIO, count: int) -> bytes:
    data = file.read(count)
    if len(data) < count:
        raise HeaderError("it ends within its header")
    return data
