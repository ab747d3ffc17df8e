"""Resources of this process on its node."""

from __future__ import annotations

import itertools
import os
import re
import resource
import shutil
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
# For each cgroup version: limit in bytes, and file that counts OOM kills.
MEMORY_FILES = (("", "memory.max", "memory.events"), ("memory", "memory.limit_in_bytes", "memory.oom_control"))
NO_MEMORY_LIMIT = 2**62  # version 1's value for no limit
# A name for the claims of cores, so that tests do not depend on other runs of the machine.
CLAIMS_VARIABLE = "RINGTRAIN_CORE_CLAIMS"
_claims: list[socket.socket] = []  # of cores; open until exit
GPU_DEVICES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))  # NVIDIA's driver on Linux and on WSL


@dataclass(frozen=True, kw_only=True)
class Machine:
    cores: tuple[int, ...]  # in the affinity mask
    quota: float | None = None  # cgroup's limit, in cores
    bound_by_launcher: bool = False  # each rank has its own cores
    # A driver exists: the same on a node's ranks, which may hide GPUs (``CUDA_VISIBLE_DEVICES``).
    may_have_gpus: bool = False
    shared_memory_bytes: int = 0  # size of ``/dev/shm``
    shm_free_bytes: int = 0


def read_machine(environ: Mapping[str, str]) -> Machine:
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


def read_peak_memory() -> int:
    """Return the largest resident memory of this program, in bytes.

    Linux's getrusage(2) counts that of the program which has started this one, too. Sandboxes have no other.
    """
    found = re.search(r"^VmHWM:\s*(\d+) kB$", "\n".join(_read_lines(Path("/proc/self/status"))), re.MULTILINE)
    return 1024 * (int(found[1]) if found else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def has_gpu_driver() -> bool:
    return any(device.exists() for device in GPU_DEVICES)


def read_cgroup_quota(root: Path) -> float | None:
    """Return the tightest CPU limit of all cgroup levels, in cores.

    Source: Linux's Documentation/admin-guide/cgroup-v2.rst ("cpu.max") and scheduler/sched-bwc.rst.
    """
    quotas = []
    for controller, files in (("", ("cpu.max",)), ("cpu", ("cpu.cfs_quota_us", "cpu.cfs_period_us"))):
        for directory in cgroup_directories(root, controller):
            quota, _, period = " ".join(line for file in files for line in _read_lines(directory / file)).partition(" ")
            quotas += [int(quota) / int(period)] if quota.isdigit() else []
    return min(quotas, default=None)


def read_memory_limits(root: Path) -> list[tuple[int, Path]]:
    """Return limits in bytes, each with the file that counts its kills.

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
    """From this process's cgroup to the root. ``controller``: of version 1, such as ``"cpu"``; empty for version 2."""
    directories = []
    for line in _read_lines(root / "proc/self/cgroup"):
        _, controllers, group = line.split(":", 2)
        if controller in controllers.split(","):  # empty for version 2
            mount = root / "sys/fs/cgroup" / controller
            directory = mount / group.strip("/")
            directories += [directory, *[parent for parent in directory.parents if parent.is_relative_to(mount)]]
    return directories


def claim_cores(cores: tuple[int, ...]) -> bool:
    """Reserve all cores until exit, or none if another run on this machine holds one.

    A claim is an address in Linux's abstract socket namespace (unix(7)): exclusive, freed by the system. Any user can
    bind it: see ``is_run_on_core``. Runs with different values of ``CLAIMS_VARIABLE`` do not see each other's claims.
    """
    namespace = os.environ.get(CLAIMS_VARIABLE, "ringtrain")
    claims: list[socket.socket] = []
    for core in cores:
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        claims.append(claim)
        address = f"\0{namespace}/core/{core}"
        try:
            claim.bind(address)
            claim.listen(socket.SOMAXCONN)  # for SO_PEERCRED
        except OSError:
            if is_run_on_core(address, core):
                for taken in claims:
                    taken.close()
                return False
    _claims.extend(claims)
    return True


def is_run_on_core(address: str, core: int) -> bool:
    """The holder must be this user's, or bound to the core."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(address)
            credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            pid, user, _ = struct.unpack("3i", credentials)  # unix(7); pid 0: not visible
            bound_to = os.sched_getaffinity(pid) if pid else set()
        except BlockingIOError:  # full backlog
            return True
        except OSError:  # no run, or it has exited
            return False
    return user == os.getuid() or (core in bound_to and len(bound_to) < len(os.sched_getaffinity(0)))


def format_cores(cores: tuple[int, ...]) -> str:
    """Format ranges, such as ``0-3,8``."""
    by_run = itertools.groupby(enumerate(sorted(cores)), key=lambda numbered: numbered[1] - numbered[0])
    runs = [[core for _, core in run] for _, run in by_run]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _is_bound_by_launcher(environ: Mapping[str, str], cores: tuple[int, ...]) -> bool:
    """True if the launcher reports binding, or may itself use more cores."""
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
