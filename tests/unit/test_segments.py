"""Segments of shared memory: those of killed ranks are removed, and no others."""

import mmap
import os
import secrets
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ringtrain.runtime import segments
from ringtrain.runtime.machine import SHARED_MEMORY
from ringtrain.runtime.segments import remove_dead_segments

MakeSegment = Callable[..., Path]


@pytest.fixture
def make_segment(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeSegment]:
    """Makes files named as Open MPI 4.1 names its segments: host, user, job (hexadecimal) and rank.

    They have a directory of their own, since programs of other tests remove dead segments as well.
    """
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as directory:
        monkeypatch.setattr(segments, "SHARED_MEMORY", Path(directory))
        monkeypatch.setattr(segments, "sees_all_processes", lambda: True)

        def make(*, host: str = socket.gethostname(), seconds_old: float = 60.0) -> Path:
            path = Path(directory) / f"vader_segment.{host}.{os.geteuid()}.{secrets.token_hex(4)}.0"
            path.write_bytes(bytes(4096))
            changed = path.stat().st_mtime - seconds_old
            os.utime(path, (changed, changed))
            return path

        yield make


def test_only_segments_of_dead_processes_are_removed(make_segment: MakeSegment) -> None:
    dead, new = make_segment(), make_segment(seconds_old=0)
    mapped, of_a_container = make_segment(), make_segment(host="another.host")
    with mapped.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        assert remove_dead_segments() == [dead]
    assert not dead.exists()
    assert new.exists()
    assert mapped.exists()
    assert of_a_container.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_segments_of_other_users_are_left(make_segment: MakeSegment) -> None:
    path = make_segment()
    os.chown(path, 65534, -1)
    assert path not in remove_dead_segments()
    assert path.exists()
