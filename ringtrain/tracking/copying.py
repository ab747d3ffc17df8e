"""Copies a run's checkpoints, log and report to an object store, by fsspec. Nothing is deleted there."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec

from ringtrain.errors import DataError
from ringtrain.files.bounded import open_regular
from ringtrain.run.checkpoint import MANIFEST_FILE, VARIABLES_FILE
from ringtrain.run.directory import CONFIG_FILE, IDENTITY_FILE, METRICS_FILE, REPORT_FILE

CHUNK_BYTES = 16 * 2**20


class Copy:
    def __init__(self, path: Path, address: str, *, move: Callable[[], object] = lambda: None) -> None:
        """``move``: called for each chunk."""
        self._path, self._move = path, move
        self._store, root = fsspec.core.url_to_fs(address)
        self._target = f"{root.rstrip('/')}/{path.resolve().name}"
        self._copied: set[str] = set()

    def send(self, *, ends: bool = True, is_dead: bool = False) -> None:
        """Copy new checkpoints, and the log; if ``ends``, the report, too. Raises what the store raises."""
        names = [path.name for path in sorted((self._path / "checkpoints").glob("[!.]*")) if not path.is_symlink()]
        new = [name for name in names if name not in self._copied]
        for name in new:
            self._copy_checkpoint(f"checkpoints/{name}")
            self._copied.add(name)
        if new or ends:
            for name in (CONFIG_FILE, IDENTITY_FILE, METRICS_FILE, *([REPORT_FILE] if ends else [])):
                self._copy_file(name)

    def _copy_checkpoint(self, name: str) -> None:
        """The manifest comes last: with it a checkpoint is whole."""
        manifest = f"{name}/{MANIFEST_FILE}"
        try:
            with open_regular(self._path / manifest) as file:
                content = file.read()
        except FileNotFoundError:
            return
        if not (self._store.exists(self._place(manifest)) and self._store.cat_file(self._place(manifest)) == content):
            self._copy_file(f"{name}/{VARIABLES_FILE}")
            self._copy_file(manifest)

    def _copy_file(self, name: str) -> None:
        """Read it back, to compare checksums. A file that is not here any more (``--keep``) is left out.

        The store's own FileNotFoundError, of a bucket that does not exist, is not suppressed.
        """
        self._store.makedirs(self._place(name).rpartition("/")[0], exist_ok=True)
        try:
            file = open_regular(self._path / name)
        except FileNotFoundError:
            return
        sent, received = hashlib.sha256(), hashlib.sha256()
        with file, self._store.open(self._place(name), "wb") as target:
            for chunk in self._chunks(file):
                sent.update(chunk)
                target.write(chunk)
        with self._store.open(self._place(name), "rb") as stored:
            for chunk in self._chunks(stored):
                received.update(chunk)
        if sent.digest() != received.digest():
            raise DataError(f"{self._place(name)!r} does not have the bytes that were written.")

    def _chunks(self, file: Any) -> Iterator[bytes]:
        while chunk := file.read(CHUNK_BYTES):
            self._move()
            yield chunk

    def _place(self, name: str) -> str:
        return f"{self._target}/{name}"
