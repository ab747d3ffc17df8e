"""Setup before TensorFlow starts: cores or GPU, thread pools, and communication settings.

Defaults only: the user's environment and the launcher's binding override them.
"""

from __future__ import annotations

import ctypes
import importlib.util
import math
import os
import re
import resource
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from ringtrain.errors import RingtrainError, UsageError
from ringtrain.runtime.activity import limit_seconds
from ringtrain.runtime.environment import (
    AutoGraphFilter,
    check_address_space,
    check_environment,
    explaining_tensorflow,
)
from ringtrain.runtime.machine import Machine, format_cores
from ringtrain.runtime.world import GLOO_LAUNCHER, World

Source = Literal["ringtrain", "environment", "launcher"]

# With fewer, TensorFlow runs Horovod's all-reduces after the backward pass. Native sums do so anyway, and on a single
# core a second thread competes for the cache.
MIN_INTER_OP_THREADS = 2
# Horovod copies fused tensors: within a node slower than separate messages. On GPUs and between nodes (not measured)
# its 128 MiB are kept.
FUSION_BYTES_ON_CORES = 8 * 1024 * 1024
# Between nodes. With TCP, each rank would listen on all interfaces, despite btl_tcp_if_include.
TRANSPORTS_BETWEEN_NODES = "^tcp,ofi,openib,portals4,uct,ugni,usnic"
# Open MPI takes 4 MiB of /dev/shm per rank, native sums the rest. With less, as in containers, MPI needs TCP, or ends
# the rank.
SHARED_MEMORY_BYTES_PER_RANK = 16 * 1024 * 1024
SHARED_GPUS = "NCCL_MULTI_RANK_GPU_ENABLE"  # lets NCCL sum between ranks on one GPU
DYNAMIC_TIMELINE = "DYNAMIC"  # HOROVOD_TIMELINE for a timeline that programs start and stop


@dataclass(frozen=True, kw_only=True)
class Setting:
    name: str
    value: str
    source: Source


@dataclass(frozen=True, kw_only=True)
class DevicePlan:
    own_cores: tuple[int, ...]  # only this rank's; empty if ranks share ``cores``
    cores: tuple[int, ...]  # its own, and those of no rank
    cores_source: Source
    why_unpinned: str  # empty if pinned, or alone on the node
    intra_op_threads: int
    inter_op_threads: int
    settings: tuple[Setting, ...]
    machine: Machine


@dataclass(frozen=True, kw_only=True)
class Needs:
    deterministic: bool = False  # two runs of the same size are bit-equal
    hang_timeout: float = 0.0  # of the watchdog, in seconds; 0: no watchdog
    ends_stalls: bool = False  # Horovod stops stalled ranks of a script without a watchdog
    profiles: bool = False  # Horovod's timeline may be started later
    # Each rank has one core of the same node: native sums (``collectives.native``). No operation calls Python.
    one_at_a_time: bool = False
    horovod: bool = True


NO_NEEDS = Needs()


def plan_devices(
    world: World,
    machine: Machine,
    environ: Mapping[str, str],
    needs: Needs = NO_NEEDS,
    *,
    claim_cores: Callable[[tuple[int, ...]], bool] = lambda cores: True,
) -> DevicePlan:
    """``environ`` takes precedence."""
    own_cores: tuple[int, ...] = ()
    cores, cores_source = machine.cores, "launcher" if machine.bound_by_launcher else "environment"
    limit: float = len(machine.cores)
    why_unpinned = ""
    if not machine.bound_by_launcher:
        limit = min(limit, machine.quota or math.inf) / world.local_size
        share = len(machine.cores) // world.local_size
        mine = machine.cores[world.local_rank * share : (world.local_rank + 1) * share]
        left_over = machine.cores[world.local_size * share :]
        why_unpinned = why_cannot_pin(world, machine)
        if world.local_size > 1 and not why_unpinned:
            if claim_cores(mine):
                own_cores, cores, cores_source = mine, mine + left_over, "ringtrain"
            else:
                why_unpinned = f"another run holds some of {format_cores(mine)}"
    intra_op_threads = max(1, math.floor(limit))
    is_one_node = world.size == world.local_size > 1
    least = 1 if needs.one_at_a_time and is_one_node and len(cores) == 1 else MIN_INTER_OP_THREADS
    return DevicePlan(
        own_cores=own_cores,
        cores=cores,
        cores_source=cores_source,  # type: ignore[arg-type]
        why_unpinned=why_unpinned,
        intra_op_threads=intra_op_threads,
        inter_op_threads=max(least, intra_op_threads),
        settings=plan_settings(world, machine, environ, needs),
        machine=machine,
    )


def adapt_plan(plan: DevicePlan, world: World, environ: Mapping[str, str], needs: Needs) -> DevicePlan:
    """Apply a user-defined workload's defaults, on the same cores."""
    own = {setting.name: setting.value for setting in plan.settings if setting.source == "ringtrain"}
    users = {name: value for name, value in environ.items() if own.get(name) != value}
    return plan_devices(world, plan.machine, users, needs, claim_cores=lambda cores: bool(plan.own_cores))


def why_cannot_pin(world: World, machine: Machine) -> str:
    """Empty if ranks can be pinned, or for one rank."""
    if world.local_size == 1:
        return ""
    # With a quota, other containers may be pinned to the same cores.
    if machine.quota is not None and machine.quota < len(machine.cores):
        return f"the cgroup's quota is {machine.quota:g} cores"
    if len(machine.cores) < world.local_size:
        return f"there are {world.local_size} ranks"
    return ""


def plan_settings(
    world: World, machine: Machine, environ: Mapping[str, str], needs: Needs = NO_NEEDS
) -> tuple[Setting, ...]:
    wanted = {
        "KERAS_BACKEND": "tensorflow",
        # Errors only: imports print notices.
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    if world.size > 1:
        # Otherwise Horovod's thread spins in MPI.
        wanted["OMPI_MCA_mpi_yield_when_idle"] = "1"
        if world.launcher != GLOO_LAUNCHER:
            # Seconds. With the default, 1, ranks exit with code 195 unsaved when the launcher dies.
            wanted["PMIX_MCA_pmix_event_caching_window"] = "600"
    if is_one_node_of_mpi(world):
        # Only ob1 uses these transports; Open MPI first waits 0.2 s for PSM. Same on all ranks.
        wanted["OMPI_MCA_pml"] = "ob1"
        if has_shared_memory(world, machine):
            wanted["OMPI_MCA_btl"] = TRANSPORTS_BETWEEN_NODES
    # HOROVOD_AUTOTUNE ignores settings from variables.
    if world.size > 1 and not is_on(environ.get("HOROVOD_AUTOTUNE", "")):
        # Milliseconds between checks for ready tensors: ranks idle meanwhile.
        wanted["HOROVOD_CYCLE_TIME"] = "1"
        if world.size == world.local_size and not machine.may_have_gpus:
            wanted["HOROVOD_FUSION_THRESHOLD"] = str(FUSION_BYTES_ON_CORES)
    if world.size > 1 and needs.hang_timeout:
        # The watchdog reports first: Horovod's report lacks causes, and Gloo fails half a minute after a debugger stops
        # a rank.
        patience = str(math.ceil(2 * limit_seconds(needs.hang_timeout, takes_long=True)))
        wanted["HOROVOD_STALL_CHECK_TIME_SECONDS"] = patience
        if world.launcher == GLOO_LAUNCHER:
            wanted["HOROVOD_GLOO_TIMEOUT_SECONDS"] = patience
    if world.size > 1 and needs.ends_stalls:
        # Seconds; off in Horovod. Rank 0 may evaluate meanwhile.
        wanted["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] = "3600"
    if world.size > 1 and needs.profiles:
        wanted["HOROVOD_TIMELINE"] = DYNAMIC_TIMELINE
    if needs.deterministic:
        wanted |= {
            # Fusion depends on timing, and changes the order of sums.
            "HOROVOD_DISABLE_GROUP_FUSION": "1",
            "TF_DETERMINISTIC_OPS": "1",
        }
    return tuple(
        Setting(name=name, value=environ.get(name, value), source="environment" if name in environ else "ringtrain")
        for name, value in wanted.items()
        if needs.horovod or not name.startswith("HOROVOD_")
    )


def is_one_node_of_mpi(world: World) -> bool:
    return world.size == world.local_size > 1 and world.launcher != GLOO_LAUNCHER


def has_shared_memory(world: World, machine: Machine) -> bool:
    return machine.shm_free_bytes >= world.local_size * SHARED_MEMORY_BYTES_PER_RANK


def describe_shared_memory(world: World, plan: DevicePlan) -> list[str]:
    """MPI may use TCP for lack of shared memory."""
    is_chosen = any(setting.name == "OMPI_MCA_btl" for setting in plan.settings)
    if not is_one_node_of_mpi(world) or is_chosen:
        return []
    needed = world.local_size * SHARED_MEMORY_BYTES_PER_RANK
    return [
        f"warning: /dev/shm has {plan.machine.shm_free_bytes / 2**20:.0f} MiB free, and {world.local_size} ranks need "
        f"{needed / 2**20:.0f} MiB: MPI may use TCP, which is slow. Remove what is not needed there, or give it more "
        "(docker run --shm-size=1g)."
    ]


def uses_horovod(backend: str, launcher: str) -> bool:
    """True if Horovod is used among several ranks; else MPI."""
    is_wanted = backend == "horovod" or (backend == "auto" and importlib.util.find_spec("horovod") is not None)
    return is_wanted or launcher == GLOO_LAUNCHER


def is_on(value: str) -> bool:
    """Follow Horovod: a number above 0, as parsed by C's strtol."""
    number = re.match(r"\s*[+-]?\d+", value)
    return number is not None and int(number[0]) > 0


def apply_plan(plan: DevicePlan) -> None:
    """Call before importing TensorFlow, MPI or Horovod."""
    check_environment(os.environ)
    check_address_space(resource.getrlimit(resource.RLIMIT_AS)[0])
    set_environment(plan)
    if os.environ["KERAS_BACKEND"] != "tensorflow":
        raise UsageError(
            f"KERAS_BACKEND={os.environ['KERAS_BACKEND']!r}, but ringtrain trains on TensorFlow. Unset the variable."
        )
    if plan.own_cores:
        os.sched_setaffinity(0, plan.cores)


def set_environment(plan: DevicePlan, before: DevicePlan | None = None) -> None:
    for setting in before.settings if before else ():
        if setting.source == "ringtrain" and os.environ.get(setting.name) == setting.value:
            del os.environ[setting.name]
    for setting in plan.settings:
        os.environ.setdefault(setting.name, setting.value)


def start_tensorflow(plan: DevicePlan, world: World) -> str:
    """Import TensorFlow; return the device's name, such as ``"GPU 1"`` or ``"core 0"``."""
    with explaining_tensorflow():
        import tensorflow as tf

    if not tf.executing_eagerly():
        raise UsageError(
            "TensorFlow's eager execution is off: the workload's code, or what it imports, has called "
            "tf.compat.v1.disable_eager_execution(). Leave it on; ringtrain compiles each step itself."
        )
    tf.get_logger().addFilter(AutoGraphFilter(world))
    gpus = tf.config.list_physical_devices("GPU")
    if "TF_NUM_INTRAOP_THREADS" not in os.environ:
        tf.config.threading.set_intra_op_parallelism_threads(plan.intra_op_threads)
    if "TF_NUM_INTEROP_THREADS" not in os.environ:
        least = MIN_INTER_OP_THREADS if gpus else 1  # GPUs do not use native sums
        tf.config.threading.set_inter_op_parallelism_threads(max(least, plan.inter_op_threads))
    if not gpus:
        return describe_cores(plan)
    index = choose_gpu(world, len(gpus), can_share=can_share_gpus(os.environ))
    tf.config.set_visible_devices(gpus[index], "GPU")
    tf.config.experimental.set_memory_growth(gpus[index], True)
    return f"GPU {index}"


def open_device(device: str, world: World) -> None:
    """Devices cannot be changed afterwards."""
    import tensorflow as tf

    try:
        tf.config.list_logical_devices()
    except (RuntimeError, tf.errors.OpError) as error:
        raise RingtrainError(
            f"{device} on {world.node} cannot be used: {' '.join(str(error).split())}. Another process may hold its "
            "memory: run nvidia-smi there."
        ) from error


def misses_gpus(machine: Machine, environ: Mapping[str, str]) -> bool:
    """Respect GPUs hidden by CUDA_VISIBLE_DEVICES."""
    import tensorflow as tf

    is_hidden = environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return machine.may_have_gpus and not is_hidden and not tf.config.get_visible_devices("GPU")


def own_gpu() -> str | None:
    """Return the UUID of this process's GPU or MIG part (CUDA Driver API, cuDeviceGetUuid_v2). Needs TensorFlow."""
    import tensorflow as tf

    visible = tf.config.get_visible_devices("GPU")
    if not visible:
        return None
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:  # other vendors' GPUs
        return None
    device, uuid = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    index = int(visible[0].name.rpartition(":")[2])  # "/physical_device:GPU:1"
    failed = (
        driver.cuInit(0)
        or driver.cuDeviceGet(ctypes.byref(device), index)
        or driver.cuDeviceGetUuid_v2(ctypes.byref(uuid), device)
    )
    return None if failed else bytes(uuid).hex()


def can_share_gpus(environ: Mapping[str, str]) -> bool:
    """Some NCCL releases (2.32) can, on the user's request."""
    return is_on(environ.get(SHARED_GPUS, ""))


def choose_gpu(world: World, visible_gpus: int, *, can_share: bool = False) -> int:
    if visible_gpus == 1 or can_share:
        return world.local_rank % visible_gpus  # with Slurm's --gpus-per-task=1 each rank sees its own GPU as number 0
    if world.local_rank >= visible_gpus:
        raise UsageError(
            f"{world.node} shows {visible_gpus} GPUs to {world.local_size} ranks, and each rank needs its own. Start "
            f"at most {visible_gpus} ranks on a node, or set CUDA_VISIBLE_DEVICES= to compute on the cores.",
            reach="rank",
        )
    return world.local_rank


def describe_cores(plan: DevicePlan) -> str:
    cores = f"core{'s' if len(plan.cores) > 1 else ''} {format_cores(plan.cores)}"
    if plan.cores_source == "launcher":
        return f"{cores} (bound by the launcher)"
    return f"{cores} (not pinned: {plan.why_unpinned})" if plan.why_unpinned else cores
