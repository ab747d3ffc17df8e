"""Removal of Open MPI's shared memory that killed ranks left in ``/dev/shm``."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from ringtrain.runtime.machine import SHARED_MEMORY

# A new segment is not mapped at once.
SECONDS_TO_MAP = 5.0
FIRST_PID_NAMESPACE = 0xEFFFFFFC  # Linux's PROC_PID_INIT_INO
MAPPED = re.compile(r"^\S+ \S+ \S+ (\w+):(\w+) ([1-9]\d*)", re.MULTILINE)  # device and inode in /proc/PID/maps


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
    for process in Path("/proc").glob("[0-9]*"):
        if not dead:
            break
        for file in find_mapped_files(process):
            dead.pop(file, None)
    for path in dead.values():
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
    return list(dead.values())


def sees_all_processes() -> bool:
    """True in the machine's first PID namespace."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino == FIRST_PID_NAMESPACE
    except OSError:
        return False


def find_mapped_files(process: Path) -> Iterator[tuple[int, int]]:
    """Yield device and inode of each file that a process maps; nothing if it has exited or is another user's."""
    with contextlib.suppress(OSError):
        for major, minor, inode in MAPPED.findall((process / "maps").read_text(errors="replace")):
            yield os.makedev(int(major, 16), int(minor, 16)), int(inode)
