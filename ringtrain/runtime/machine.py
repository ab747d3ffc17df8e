"""The resources of this process on its node: cores, processor time, memory, GPUs."""

from __future__ import annotations

import itertools
import os
import shutil
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
# Where each kind of cgroup keeps its limit of memory in bytes, and counts its processes that were killed for it.
MEMORY_FILES = (("", "memory.max", "memory.events"), ("memory", "memory.limit_in_bytes", "memory.oom_control"))
NO_MEMORY_LIMIT = 2**62  # version 1 writes it as the largest multiple of a page in 63 bits
_claims: list[socket.socket] = []  # of cores; open until the process ends
GPU_DEVICES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))  # of NVIDIA's driver on Linux, and on Linux under Windows


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The resources of this process on its node."""

    cores: tuple[int, ...]  # that the scheduler may run this process on
    quota: float | None = None  # the processor time that the cgroup grants, in cores; None if it sets no limit
    bound_by_launcher: bool = False  # the launcher gave each rank its own cores
    # A GPU's driver is there. Whether a rank uses a GPU is its own matter (``CUDA_VISIBLE_DEVICES``); what all ranks of
    # a node have to do alike cannot depend on that.
    may_have_gpus: bool = False
    shared_memory_bytes: int = 0  # the size of ``/dev/shm``
    shm_free_bytes: int = 0  # of it


def read_machine(environ: Mapping[str, str]) -> Machine:
    """Read what this process may use."""
    cores = tuple(sorted(os.sched_getaffinity(0)))
    memory = shutil.disk_usage(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else None
    return Machine(
        cores=cores,
        quota=read_cgroup_quota(Path("/")),
        bound_by_launcher=_is_bound_by_launcher(environ, cores),
        may_have_gpus=has_gpu_driver(),
        shared_memory_bytes=memory.total if memory else 0,
        shm_free_bytes=memory.free if memory else 0,
    )


def has_gpu_driver() -> bool:
    """True if this machine has what a GPU of NVIDIA's is used through."""
    return any(device.exists() for device in GPU_DEVICES)


def read_cgroup_quota(root: Path) -> float | None:
    """The processor time that the cgroups of this process grant, in cores, or None.

    Every level from the process's own group up to the root may set a limit, and the tightest counts.
    Source: Linux's Documentation/admin-guide/cgroup-v2.rst ("cpu.max") and scheduler/sched-bwc.rst.
    """
    quotas = []
    for controller, files in (("", ("cpu.max",)), ("cpu", ("cpu.cfs_quota_us", "cpu.cfs_period_us"))):
        for directory in cgroup_directories(root, controller):
            quota, _, period = " ".join(line for file in files for line in _read_lines(directory / file)).partition(" ")
            quotas += [int(quota) / int(period)] if quota.isdigit() else []
    return min(quotas, default=None)


def read_memory_limits(root: Path) -> list[tuple[int, Path]]:
    """The memory limits of this process' cgroups, in bytes, each with the file that counts its kills.

    Source: Linux's Documentation/admin-guide/cgroup-v2.rst ("memory.max") and cgroup-v1/memory.rst.
    """
    limits = []
    for controller, limit_file, kills_file in MEMORY_FILES:
        for directory in cgroup_directories(root, controller):
            limit = "".join(_read_lines(directory / limit_file))
            if limit.isdigit() and int(limit) < NO_MEMORY_LIMIT:
                limits.append((int(limit), directory / kills_file))
    return limits


def cgroup_directories(root: Path, controller: str) -> list[Path]:
    """The directories of this process' cgroup and of all groups above it.

    ``controller`` is one of version 1, such as ``"cpu"``; empty for version 2, which has one hierarchy for all.
    """
    directories = []
    for line in _read_lines(root / "proc/self/cgroup"):
        _, controllers, group = line.split(":", 2)
        if controller in controllers.split(","):  # the line of version 2 names none
            mount = root / "sys/fs/cgroup" / controller
            directory = mount / group.strip("/")
            directories += [directory, *[parent for parent in directory.parents if parent.is_relative_to(mount)]]
    return directories


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
            claim.listen(socket.SOMAXCONN)  # the system tells a client which process this is
        except OSError:
            if is_run_on_core(address, core):
                for taken in claims:
                    taken.close()
                return False
    _claims.extend(claims)
    return True


def is_run_on_core(address: str, core: int) -> bool:
    """True if the process that holds the name of a core is this user's, or is really bound to that core."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(address)
            credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            pid, user, _ = struct.unpack("3i", credentials)  # unix(7); the process is 0 if it is not to be seen
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


def _is_bound_by_launcher(environ: Mapping[str, str], cores: tuple[int, ...]) -> bool:
    """True if the launcher gave this rank cores of its own: it says so, or its own process may use more."""
    if environ.get("OMPI_MCA_orte_bound_at_launch") == "1":
        return True
    if environ.get("SLURM_CPU_BIND_TYPE", "").startswith(("mask", "map", "rank")):
        return True
    return "OMPI_COMM_WORLD_RANK" in environ and set(cores) < os.sched_getaffinity(os.getppid())


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text().split("\n")[:-1]
    except OSError:
        return []
