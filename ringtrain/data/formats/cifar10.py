"""CIFAR-10 (Krizhevsky 2009): binary files, downloaded if missing.

A record is a label byte, 0 to 9, and 3,072 pixel bytes: 1,024 red, 1,024 green, 1,024 blue, row by row
(https://www.cs.toronto.edu/~kriz/cifar.html).
"""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import hashlib
import http.client
import os
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import BinaryIO, NamedTuple, cast

import numpy as np

from ringtrain.data.formats import file_error, reading
from ringtrain.files import cache_directory
from ringtrain.files.atomic import replacing
from ringtrain.files.bounded import LimitedReader, open_regular, read_bounded
from ringtrain.runtime import activity

ARCHIVE_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
ARCHIVE_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
ARCHIVE_NAME = "cifar-10-binary.tar.gz"
FOLDER_NAME = "cifar-10-batches-bin"
TRAIN_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST_FILE = "test_batch.bin"
FILES = (*TRAIN_FILES, TEST_FILE)
MAX_FILE_BYTES = 2**30
MAX_UNPACKED_BYTES = 2**29  # of the archive; the published one has 184 million

CLASS_NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
NUM_CLASSES = len(CLASS_NAMES)
IMAGE_SIZE = 32
RECORD_BYTES = 1 + 3 * IMAGE_SIZE * IMAGE_SIZE

DOWNLOAD_LIMIT_S = 1800.0  # for the download, and for processes waiting for it
SILENCE_LIMIT_S = 30.0  # of the server
_LOCK_POLL_S = 0.2
_BLOCK_BYTES = 1 << 20

Samples = tuple[np.ndarray, np.ndarray]
"""Images uint8 [n, 32, 32, 3] and their labels int64 [n], 0 to 9."""


class Download(NamedTuple):
    url: str = ARCHIVE_URL
    md5: str = ARCHIVE_MD5
    limit_s: float = DOWNLOAD_LIMIT_S


def load_cifar10(data_dir: Path | None, *, download: Download | None = None) -> tuple[Samples, Samples]:
    """Return training and test samples.

    ``data_dir`` holds the files, ``cifar-10-batches-bin`` or ``cifar-10-binary.tar.gz``; otherwise one process per node
    downloads the archive. Default: ``$XDG_CACHE_HOME/ringtrain/cifar10``, or ``~/.cache/ringtrain/cifar10``.
    """
    place = cache_directory("cifar10") if data_dir is None else data_dir
    # Path's methods raise if a directory may not be searched.
    folder = place / FOLDER_NAME if os.path.isdir(place / FOLDER_NAME) else place
    if folder != place or any(os.path.exists(place / name) for name in FILES):
        contents = {name: _read_file(folder / name) for name in FILES}
        container = folder
    else:
        container = place / ARCHIVE_NAME
        if not os.path.exists(container):
            _download_once(container, download or Download())
        contents = _read_archive(container)
    samples = {name: parse_records(data, container / name) for name, data in contents.items()}
    images, labels = zip(*(samples[name] for name in TRAIN_FILES), strict=True)
    return (np.concatenate(images), np.concatenate(labels)), samples[TEST_FILE]


def parse_records(data: bytes, path: Path) -> Samples:
    """``path`` is for messages."""
    if not data or len(data) % RECORD_BYTES:
        raise file_error(
            f"{path} has {len(data):,} bytes; it must have a whole number of records of {RECORD_BYTES:,} bytes, and at "
            f"least one (published: 10,000 records, 30,730,000 bytes). It is damaged, or no CIFAR-10 file: {_REMEDY}"
        )
    records = np.frombuffer(data, np.uint8).reshape(-1, RECORD_BYTES)
    labels = records[:, 0].astype(np.int64)
    if labels.max() >= NUM_CLASSES:
        record = int(np.argmax(labels >= NUM_CLASSES))
        raise file_error(
            f"{path}: record {record} (at byte {record * RECORD_BYTES:,}) has the label {labels[record]}; labels are 0 "
            f"to {NUM_CLASSES - 1}. The file is damaged, or no CIFAR-10 file: {_REMEDY}"
        )
    planes = records[:, 1:].reshape(-1, 3, IMAGE_SIZE, IMAGE_SIZE)  # [n, c, h, w]
    return np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), labels


_REMEDY = f"fetch it again from {ARCHIVE_URL}."


def _read_file(path: Path) -> bytes:
    with reading(path):
        try:
            return read_bounded(path, MAX_FILE_BYTES, follows_links=True)
        except FileNotFoundError:
            raise file_error(
                f"there is no file {path}; CIFAR-10 has the six files {', '.join(FILES)}. Put it there: unpack "
                f"{ARCHIVE_NAME} again, from {ARCHIVE_URL}."
            ) from None


def _read_archive(path: Path) -> dict[str, bytes]:
    """Only the six names are read; nothing is written to disk."""
    contents: dict[str, bytes] = {}
    size = "of unknown size"
    try:
        size = f"{path.stat().st_size:,} bytes"
        with open_regular(path, follows_links=True) as opened, gzip.open(opened) as unpacked:
            stream = LimitedReader(unpacked, MAX_UNPACKED_BYTES)
            with tarfile.open(fileobj=cast(BinaryIO, stream), mode="r|") as archive:
                for member in archive:
                    folder, name = PurePosixPath(member.name).parent, PurePosixPath(member.name).name
                    is_wanted = str(folder) == FOLDER_NAME and name in FILES
                    if is_wanted and member.isreg() and member.size <= MAX_FILE_BYTES:
                        file = archive.extractfile(member)
                        assert file is not None  # a regular file
                        contents[name] = file.read()
            while stream.read(_BLOCK_BYTES):  # up to gzip's checksum
                pass
    except Exception as error:  # tarfile and gzip raise many kinds for wrong content
        reason = str(error) or type(error).__name__
        raise file_error(
            f"{path} ({size}) cannot be read as the archive of CIFAR-10: {reason}. Remove it to have it "
            f"downloaded, or put the file from {ARCHIVE_URL} in its place."
        ) from error
    missing = [name for name in FILES if name not in contents]
    if missing:
        raise file_error(
            f"{path} ({size}) has no file {', '.join(f'{FOLDER_NAME}/{name}' for name in missing)}, which "
            f"the archive of CIFAR-10 has. Put the file from {ARCHIVE_URL} in its place."
        )
    return contents


# --- The download ---


def _download_once(archive: Path, download: Download) -> None:
    """Download the archive, or wait for another process of this node.

    The downloading process holds a lock, and writes a failure into its file, so that the others fail at once.
    """
    try:
        archive.parent.mkdir(parents=True, exist_ok=True)
        with _locked(archive.with_name(f".{ARCHIVE_NAME}.lock"), limit_s=download.limit_s) as (lock, has_waited):
            if archive.exists():
                return
            if has_waited and (reason := lock.read().decode(errors="replace")):
                raise OSError(reason)
            lock.truncate(0)
            try:
                _download_to(archive, download)
            except (OSError, http.client.HTTPException) as error:
                lock.write((str(error) or type(error).__name__).encode())
                lock.flush()
                raise
    except (OSError, http.client.HTTPException) as error:
        raise file_error(
            f"CIFAR-10 is not in {archive.parent}, and could not be downloaded: {error or type(error).__name__}. Fetch "
            f"{download.url} on a machine with a network, and store it there as {ARCHIVE_NAME}, or give its "
            "directory by --data_dir."
        ) from error


@contextlib.contextmanager
def _locked(path: Path, *, limit_s: float) -> Iterator[tuple[BinaryIO, bool]]:
    """Yield a locked file; True if another process held the lock."""
    deadline = time.monotonic() + limit_s
    has_waited = False
    with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+b") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                has_waited = True
            if time.monotonic() > deadline:
                raise TimeoutError(f"another process has held {path} for more than {limit_s:g} s")
            time.sleep(_LOCK_POLL_S)
        yield file, has_waited  # closing frees the lock


def _download_to(archive: Path, download: Download) -> None:
    """Atomic. The caller has the lock."""
    for partial in archive.parent.glob(f".writing-*-{archive.name}"):  # of killed processes
        partial.unlink()
    deadline = time.monotonic() + download.limit_s
    digest = hashlib.md5(usedforsecurity=False)  # as published
    try:
        response = urllib.request.urlopen(download.url, timeout=min(SILENCE_LIMIT_S, download.limit_s))
    except urllib.error.HTTPError as error:
        error.close()  # it holds the connection
        raise OSError(f"{download.url} gave {error}") from None
    with response, replacing(archive) as file:
        while block := response.read1(_BLOCK_BYTES):  # partial blocks: the limit holds for slow servers
            if time.monotonic() > deadline:
                raise TimeoutError(f"{download.url} took more than {download.limit_s:g} s")
            digest.update(block)
            file.write(block)
            activity.move()
        if digest.hexdigest() != download.md5:
            raise OSError(
                f"{download.url} gave {file.tell():,} bytes with the MD5 {digest.hexdigest()}, but the published "
                f"archive has {download.md5}"
            )
