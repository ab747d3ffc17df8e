"""Copies a run's checkpoints, log and report to a store, by fsspec. Nothing of another run is replaced there."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import fsspec

from ringtrain.errors import DataError, UsageError
from ringtrain.files.bounded import MAX_RECORD_BYTES, open_regular, parse_json
from ringtrain.run.checkpoint import MANIFEST_FILE, VARIABLES_FILE, DamagedError, read_manifest
from ringtrain.run.directory import (
    CONFIG_FILE,
    IDENTITY_FILE,
    METRICS_FILE,
    REPORT_FILE,
    as_identity,
    describe_identity,
    read_identity,
)

CHUNK_BYTES = 16 * 2**20
PROBE = ".ringtrain-copy-"  # prefix of an object that shows if the store is the run directory
PARTIAL = ".partial-"  # prefix of objects that are not complete yet


class Copy:
    """The copy of one run in a store.

    Each object is written under a temporary name, read back, and moved to its own name. Of a checkpoint
    the manifest comes last, so that a checkpoint with a manifest is complete.
    """

    def __init__(self, path: Path, address: str, *, move: Callable[[], object] = lambda: None) -> None:
        """Open the store.

        Args:
            path: the run directory.
            address: of the store, such as ``s3://bucket/runs``; the copy has the run's name below it.
            move: called for each chunk.

        Raises:
            UsageError: see ``refuse_copy``.
        """
        refuse_copy(path, address)
        self._path = path
        self._move = move
        self._store, root = fsspec.core.url_to_fs(address)
        self._target = f"{root.rstrip('/')}/{path.resolve().name}"
        self._copied: set[str] = set()
        self._is_own = False  # the store was seen to be another place than the run directory

    def send(self, *, ends: bool = True, is_dead: bool = False) -> None:
        """Copy new checkpoints and the log; if ``ends``, also the report.

        Raises:
            DataError: a checkpoint here is damaged, or the store does not return what was written. All
                else is copied before.
            UsageError: the store has another run of this name, or is the run directory itself.
            Exception: whatever the store raises.
        """
        self._claim()
        root = self._path / "checkpoints"
        names = [path.name for path in sorted(root.glob("[!.]*")) if not path.is_symlink()]
        new = [name for name in names if name not in self._copied]
        damages = []
        for name in new:
            try:
                self._copy_checkpoint(f"checkpoints/{name}")
            except DamagedError as damage:
                damages.append(damage)
            else:
                self._copied.add(name)
        if new or ends:
            for name in (CONFIG_FILE, METRICS_FILE, *([REPORT_FILE] if ends else [])):
                self._copy_file(name)
        if damages:
            raise damages[0]

    def _claim(self) -> None:
        """Write the run's identity to the store, unless it is there; refuse that of another run."""
        is_first = not self._is_own
        if is_first:
            self._refuse_own_directory_by_probe()
            self._is_own = True
        stored = self._read_stored_identity()
        own = read_identity(self._path)
        if stored is None:
            self._copy_file(IDENTITY_FILE)
        elif own is None or stored["id"] != own["id"]:
            raise UsageError(_other_run_message(self._path, own, self._target, stored))
        if is_first:
            self._remove_partial_objects()

    def _remove_partial_objects(self) -> None:
        """Remove what an earlier sender of this run left when it was killed; there is one sender at a time."""
        for location in self._store.find(self._target):
            if location.rpartition("/")[2].startswith(PARTIAL):
                self._store.rm_file(location)

    def _read_stored_identity(self) -> dict[str, Any] | None:
        location = self._location(IDENTITY_FILE)
        try:
            content = self._store.cat_file(location, start=0, end=MAX_RECORD_BYTES)
        except FileNotFoundError:
            return None
        identity = None
        with contextlib.suppress(ValueError):
            identity = as_identity(parse_json(content))
        if identity is None:
            raise DataError(f"{location!r} is no identity of a run. Remove it, or give another address.")
        return identity

    def _refuse_own_directory_by_probe(self) -> None:
        """Detect that the store is the run directory by another name, such as a mounted bucket."""
        name = f"{PROBE}{secrets.token_hex(8)}"
        self._store.makedirs(self._target, exist_ok=True)
        self._store.pipe_file(self._location(name), b"ringtrain")
        try:
            is_here = (self._path / name).exists()
        finally:
            self._store.rm_file(self._location(name))
        if is_here:
            raise UsageError(_own_directory_message(self._path, self._target))

    def _copy_checkpoint(self, name: str) -> None:
        """Copy a checkpoint, unless it is complete there. One that ``--keep`` removes meanwhile is left out.

        Raises DamagedError if its bytes are not those of its manifest; nothing of it stays in the store.
        """
        directory = self._path / name
        location = self._location(f"{name}/{MANIFEST_FILE}")
        try:
            content = read_manifest(directory / MANIFEST_FILE)
            file = dict(content["files"][VARIABLES_FILE])
        except DataError:
            if directory.is_dir():
                raise
            return
        except (KeyError, TypeError, ValueError):
            raise DamagedError(f"{str(directory / MANIFEST_FILE)!r} names no {VARIABLES_FILE}.") from None
        if self._is_complete(name, content, file):
            return
        if self._store.exists(location):
            self._store.rm_file(location)  # incomplete, or of an earlier checkpoint of this step
        try:
            self._copy_file(f"{name}/{VARIABLES_FILE}", expected_digest=file.get("sha256"))
            self._copy_file(f"{name}/{MANIFEST_FILE}")
        except DamagedError:
            self._remove(name)
            if directory.is_dir():
                raise
            return
        if not self._store.exists(location):  # removed here in the meantime
            self._remove(name)

    def _is_complete(self, name: str, content: Mapping[str, Any], file: Mapping[str, Any]) -> bool:
        """Compare the manifest in the store and the size of the variables there."""
        try:
            stored = json.loads(self._store.cat_file(self._location(f"{name}/{MANIFEST_FILE}")))
            info = self._store.info(self._location(f"{name}/{VARIABLES_FILE}"))
        except (FileNotFoundError, ValueError):
            return False
        is_same = isinstance(stored, dict) and stored.get("content") == content
        return is_same and info.get("size") == file.get("bytes")

    def _copy_file(self, name: str, *, expected_digest: str | None = None) -> None:
        """Copy a file, if it is here.

        The store's own FileNotFoundError, of a bucket that does not exist, is not suppressed.

        Raises:
            DamagedError: it does not have the expected SHA-256.
            DataError: the store does not return what was written.
        """
        location = self._location(name)
        folder, _, last = location.rpartition("/")
        self._store.makedirs(folder, exist_ok=True)
        try:
            file = open_regular(self._path / name)
        except FileNotFoundError:
            if expected_digest is not None:
                raise DamagedError(f"{str(self._path / name)!r} is missing.") from None
            return
        partial = f"{folder}/{PARTIAL}{secrets.token_hex(8)}-{last}"
        sent = hashlib.sha256()
        received = hashlib.sha256()
        try:
            with file, self._store.open(partial, "wb") as target:
                for chunk in self._chunks(file):
                    sent.update(chunk)
                    target.write(chunk)
            if expected_digest not in (None, sent.hexdigest()):
                raise DamagedError(
                    f"{str(self._path / name)!r} does not have the checksum that its manifest states: its bytes have "
                    "changed. It is not copied."
                )
            with self._store.open(partial, "rb") as stored:
                for chunk in self._chunks(stored):
                    received.update(chunk)
            if sent.digest() != received.digest():
                raise DataError(f"{location!r} does not have the bytes that were written.")
            self._store.mv(partial, location)
        except BaseException:
            with contextlib.suppress(Exception):
                self._store.rm_file(partial)
            raise

    def _remove(self, name: str) -> None:
        """Remove an incomplete checkpoint from the store."""
        with contextlib.suppress(FileNotFoundError):
            self._store.rm(self._location(name), recursive=True)

    def _chunks(self, file: Any) -> Iterator[bytes]:
        while chunk := file.read(CHUNK_BYTES):
            self._move()
            yield chunk

    def _location(self, name: str) -> str:
        return f"{self._target}/{name}"


def refuse_copy(path: Path, address: str) -> None:
    """Check the address of a copy, as far as that is possible without a connection.

    Args:
        path: the run directory; it may not exist yet.
        address: of the store.

    Raises:
        UsageError: the store is a local directory, and the copy would be the run itself or inside it,
            or another run is there.
    """
    store, root = fsspec.core.url_to_fs(address)
    if "file" not in store.protocol:
        return
    run = os.path.realpath(path)
    target = os.path.realpath(os.path.join(root, os.path.basename(run)))
    is_same = False
    with contextlib.suppress(OSError):
        is_same = os.path.samefile(target, run)
    if is_same or os.path.commonpath([run, target]) == run:
        raise UsageError(_own_directory_message(path, target))
    stored = read_identity(Path(target))
    own = read_identity(path)
    if stored is not None and (own is None or own["id"] != stored["id"]):
        raise UsageError(_other_run_message(path, own, target, stored))


def _own_directory_message(path: Path, target: str) -> str:
    return (
        f"the copy of {str(path)!r} would be written to {target!r}, which is the run directory itself or inside it. "
        "Give an address outside of the run, and not that of its parent directory."
    )


def _other_run_message(path: Path, own: Mapping[str, Any] | None, target: str, stored: Mapping[str, Any]) -> str:
    own_text = "a new run" if own is None else describe_identity(own)
    return (
        f"{target!r} holds the copy of another run, {describe_identity(stored)}; {str(path)!r} is {own_text}. "
        "Nothing is copied. Give another address, or another name to the run directory."
    )
