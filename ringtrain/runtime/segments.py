"""Open MPI's segments of shared memory that killed ranks have left in ``/dev/shm``: 4 MiB each, for as long as the node
is up."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path

from ringtrain.runtime.machine import SHARED_MEMORY

# A program that has just created a segment has not mapped it yet.
SECONDS_TO_MAP = 5.0
FIRST_PID_NAMESPACE = 0xEFFFFFFC  # PROC_PID_INIT_INO of Linux


def remove_dead_segments() -> list[Path]:
    """Remove the segments of this user and host that no living process has mapped, and return their paths.

    Containers may share ``/dev/shm``, and even the host's name: a process is known to be dead only if those of the
    whole machine are visible here. A failure to clean up is no error.
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
    """True in the first PID namespace of the machine, from which the processes of all others are visible."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino == FIRST_PID_NAMESPACE
    except OSError:
        return False


def find_mapped_files() -> set[tuple[int, int]]:
    """Device and inode of all files that living processes have mapped, as far as this one may see.

    It sees those of all ranks of the same user, which have no more capabilities than it has.
    """
    mapped = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            lines = (process / "maps").read_text(errors="replace").splitlines()
        except OSError:  # another user's, or it has ended
            continue
        for line in lines:
            _, _, _, device, inode, *_ = line.split(maxsplit=5)
            major, _, minor = device.partition(":")
            mapped.add((os.makedev(int(major, 16), int(minor, 16)), int(inode)))
    return mapped
