"""Removal of Open MPI's shared memory that killed ranks left in ``/dev/shm``."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path

from ringtrain.runtime.machine import SHARED_MEMORY

# A new segment is not mapped at once.
SECONDS_TO_MAP = 5.0
FIRST_PID_NAMESPACE = 0xEFFFFFFC  # Linux's PROC_PID_INIT_INO


def remove_dead_segments() -> list[Path]:
    """Remove this user's and host's segments that no living process maps; return their paths.

    Needs to see all processes of the machine: containers may share ``/dev/shm`` and the host name.
    """
    dead = {}
    if not sees_all_processes():
        return []
    for path in SHARED_MEMORY.glob(f"vader_segment.{socket.gethostname()}.*"):
        with contextlib.suppress(FileNotFoundError):
            status = path.lstat()
            if status.st_uid == os.geteuid() and time.time() - status.st_mtime > SECONDS_TO_MAP:
                dead[status.st_dev, status.st_ino] = path
    mapped = find_mapped_files() if dead else set()
    removed = [path for file, path in dead.items() if file not in mapped]
    for path in removed:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
    return removed


def sees_all_processes() -> bool:
    """True in the machine's first PID namespace."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino == FIRST_PID_NAMESPACE
    except OSError:
        return False


def find_mapped_files() -> set[tuple[int, int]]:
    """Return device and inode; includes those of the same user's ranks."""
    mapped = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            lines = (process / "maps").read_text(errors="replace").splitlines()
        except OSError:  # another user's, or it has exited
            continue
        for line in lines:
            _, _, _, device, inode, *_ = line.split(maxsplit=5)
            major, _, minor = device.partition(":")
            mapped.add((os.makedev(int(major, 16), int(minor, 16)), int(inode)))
    return mapped
