"""Cores that a rank has for itself, against other runs of ringtrain on this machine, and cores in words."""

from __future__ import annotations

import itertools
import os
import socket
import struct

_claims: list[socket.socket] = []  # open until the process ends


def claim_cores(cores: tuple[int, ...]) -> bool:
    """Take cores for this process, until it ends; False, and none taken, where another run on this machine has one.

    A core's name is an address of Linux's abstract socket name space (unix(7)): taken by one process at a time, freed
    by the system however that process ends, and without a file that could be left behind. Any user can take a name, so
    that a name alone is not believed: see ``is_run_on_core``.
    """
    claims: list[socket.socket] = []
    for core in cores:
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        claims.append(claim)
        address = f"\0ringtrain/core/{core}"
        try:
            claim.bind(address)
            claim.listen(socket.SOMAXCONN)  # whoever connects is told by the system which process this is
        except OSError:
            if is_run_on_core(address, core):
                for taken in claims:
                    taken.close()
                return False
    _claims.extend(claims)
    return True


def is_run_on_core(address: str, core: int) -> bool:
    """Whether the process that holds the name of a core is this user's, or is really bound to that core."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(address)
            credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            pid, user, _ = struct.unpack("3i", credentials)  # unix(7); the process is 0 where it is not to be seen
            bound_to = os.sched_getaffinity(pid) if pid else set()
        except BlockingIOError:  # many have asked before
            return True
        except OSError:  # no run of ringtrain, or it has ended
            return False
    return user == os.getuid() or (core in bound_to and len(bound_to) < len(os.sched_getaffinity(0)))


def format_cores(cores: tuple[int, ...]) -> str:
    """Cores as a list of ranges, such as ``0-3,8``."""
    by_run = itertools.groupby(enumerate(sorted(cores)), key=lambda numbered: numbered[1] - numbered[0])
    runs = [[core for _, core in run] for _, run in by_run]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
