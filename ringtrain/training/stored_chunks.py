"""The chunks of an HDF5 dataset, checked before HDF5 unpacks them.

HDF5 inflates a chunk until its end, whatever size the dataset states, and allocates a whole chunk to read one
value. So a small file can ask for any amount of memory.
"""

from __future__ import annotations

import itertools
import math
import zlib

import h5py

KNOWN_FILTERS = {
    h5py.h5z.FILTER_SHUFFLE: "shuffle",
    h5py.h5z.FILTER_DEFLATE: "gzip",
    h5py.h5z.FILTER_FLETCHER32: "fletcher32",
}
CHECKSUM_BYTES = 4  # of fletcher32
SMALL_CHUNK_BYTES = 2**20
MAX_CHUNKS = 1_000_000


def require_whole_chunks(dataset: h5py.Dataset, path: str) -> None:
    """Check that each chunk of a dataset unpacks to the bytes that its shape states.

    Args:
        dataset: of numbers, with a shape that the caller accepts.
        path: for messages.

    Raises:
        ValueError: it does not, or is compressed by other filters than gzip, shuffle and fletcher32.
    """
    if dataset.chunks is None:
        return
    chunk_bytes = math.prod(dataset.chunks) * dataset.dtype.itemsize
    if chunk_bytes > max(dataset.nbytes, SMALL_CHUNK_BYTES):
        raise ValueError(f"{path} has {dataset.nbytes:,} bytes in chunks of {chunk_bytes:,}")
    starts = [range(0, size, step) for size, step in zip(dataset.shape, dataset.chunks, strict=True)]
    num_chunks = math.prod(len(starts_of_axis) for starts_of_axis in starts)
    if num_chunks > MAX_CHUNKS:
        raise ValueError(f"{path} has {num_chunks:,} chunks, and at most {MAX_CHUNKS:,} are read")
    filters = find_filters(dataset, path)
    if not filters:
        return
    for start in itertools.product(*starts):
        num_bytes = unpacked_bytes(dataset, start, filters, most=chunk_bytes + CHECKSUM_BYTES)
        if num_bytes is not None and not chunk_bytes <= num_bytes <= chunk_bytes + CHECKSUM_BYTES:
            raise ValueError(f"{path}: its chunk at {list(start)} does not unpack to {chunk_bytes:,} bytes")


def find_filters(dataset: h5py.Dataset, path: str) -> list[int]:
    """Return the numbers of a dataset's filters. Raise ValueError for unknown or repeated ones."""
    properties = dataset.id.get_create_plist()
    filters = [properties.get_filter(position)[0] for position in range(properties.get_nfilters())]
    unknown = [number for number in filters if number not in KNOWN_FILTERS]
    if unknown or len(set(filters)) < len(filters):
        raise ValueError(
            f"{path} is stored by the HDF5 filters {filters}; at most one each of "
            f"{', '.join(KNOWN_FILTERS.values())} is read: h5repack -f NONE writes it without"
        )
    return filters


def unpacked_bytes(dataset: h5py.Dataset, start: tuple[int, ...], filters: list[int], *, most: int) -> int | None:
    """Return the size of a chunk, counted up to ``most`` + 1; None if it is not stored."""
    stored = dataset.id.get_chunk_info_by_coord(start)
    if stored.byte_offset is None:
        return None
    skipped_filters, packed = dataset.id.read_direct_chunk(start)
    applied = [number for bit, number in enumerate(filters) if not skipped_filters >> bit & 1]
    if h5py.h5z.FILTER_DEFLATE not in applied:
        return len(packed)
    return len(zlib.decompressobj().decompress(packed, most + 1))
