"""Fuzz the readers of manifests and of TFRecord indices, led by what they run through, for a bounded time.

``python -m tests.faults.guided manifest|index SECONDS`` in an environment that has atheris besides, which no lock here
holds. What is made up gets the right checksum first, as a forger would give it one: else nothing would pass it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import struct
import sys
import tempfile
from pathlib import Path

import atheris
import numpy as np

with atheris.instrument_imports():
    from ringtrain.data.formats import tfrecord_index
    from ringtrain.errors import DataError
    from ringtrain.files import bounded
    from ringtrain.run.checkpoint import MANIFEST_FILE, VARIABLES_FILE, DamagedError, digest_of, read_checkpoint

DIRECTORY = Path(tempfile.mkdtemp())
VARIABLES = bytes(20)
SOUND = {
    "format": 2,
    "step": 15,
    "files": {VARIABLES_FILE: {"bytes": 20, "sha256": hashlib.sha256(VARIABLES).hexdigest()}},
    "progress": {"samples_seen": 240},
    "run": {"world_size": 2, "global_batch_size": 16, "config": {"seed": 0}},
    "variables": [{"name": "weights/w", "dtype": "float32", "shape": [5], "offset": 0, "bytes": 20}],
}
FILES = (tfrecord_index.FileState("a", 400, 0), tfrecord_index.FileState("b", 120, 0))


def try_manifest(data: bytes) -> None:
    """A manifest of any content: read, or damaged."""
    with contextlib.suppress(ValueError):  # no JSON, which needs no signature
        data = json.dumps({"sha256": digest_of(content := bounded.parse_json(data)), "content": content}).encode()
    (DIRECTORY / MANIFEST_FILE).write_bytes(data)
    (DIRECTORY / VARIABLES_FILE).write_bytes(VARIABLES)
    with contextlib.suppress(DamagedError, DataError):
        checkpoint = read_checkpoint(DIRECTORY)
        assert type(checkpoint.step) is int
        assert checkpoint.step >= 0
        assert sum(value.nbytes for value in checkpoint.variables.values()) == len(VARIABLES)


def try_index(data: bytes) -> None:
    """An index of any entries: one whose records lie within their files, or none."""
    header = json.dumps({"files": FILES, "entry": tfrecord_index.ENTRY.descr}).encode()
    body = struct.pack("<Q", len(header)) + header + data
    (DIRECTORY / "index").write_bytes(b"ringtfr1" + hashlib.sha256(body).digest() + body)
    index = tfrecord_index._read_cache(DIRECTORY / "index", FILES)
    if index is not None:
        sizes = np.array([file.num_bytes for file in FILES])[index.entries["file"]]
        assert (index.entries["offset"] >= 0).all()
        assert (index.entries["offset"] + index.entries["length"] <= sizes).all()


def main() -> None:
    which, seconds = sys.argv[1:]
    seeds = DIRECTORY / "seeds"
    seeds.mkdir()
    entries = np.zeros(2, tfrecord_index.ENTRY)
    entries["file"], entries["length"] = [0, 1], [384, 104]
    (seeds / "sound").write_bytes(json.dumps(SOUND).encode() if which == "manifest" else entries.tobytes())
    target = {"manifest": try_manifest, "index": try_index}[which]
    atheris.Setup(
        [
            sys.argv[0],
            str(seeds),
            f"-max_total_time={seconds}",
            f"-artifact_prefix={DIRECTORY}/",
            "-timeout=2",
            "-verbosity=1",
        ],
        target,
    )
    atheris.Fuzz()


if __name__ == "__main__":
    main()
