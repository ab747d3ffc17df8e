"""What the probes of one process found. Plain values, which travel between ranks as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ringtrain.runtime.machine import Machine
from ringtrain.runtime.world import World


@dataclass(frozen=True, kw_only=True)
class Stack:
    """The packages, as a process of its own loaded them.

    Attributes:
        python: the interpreter's version, such as ``3.11.2``.
        executable: the interpreter's path.
        optimize: how often ``-O`` was given, or ``PYTHONOPTIMIZE``.
        versions: of the packages that are installed.
        failures: why a package could not be loaded, for those that could not.
        keras_backend: ``KERAS_BACKEND`` where the user set it.
        legacy_keras: whether ``TF_USE_LEGACY_KERAS`` asks for Keras 2.
        cuda: the version of CUDA that TensorFlow was built for; None in a build for cores alone.
        visible_gpus: the GPUs that TensorFlow sees.
        horovod_built_for: the version of TensorFlow that Horovod was compiled against.
        horovod_parts: what was compiled into Horovod: of ``mpi``, ``gloo``, ``nccl``, ``ccl``, ``cuda``, ``rocm``.
        nccl: the version of NCCL in Horovod.
        horovod_mpi: the MPI library files that Horovod loads.
        mpi4py_mpi: those that mpi4py loads.
        mpi_library: what the MPI library says that it is, such as ``Open MPI 4.1.4``.
    """

    python: str
    executable: str
    optimize: int = 0
    versions: dict[str, str] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    keras_backend: str | None = None
    legacy_keras: bool = False
    cuda: str | None = None
    visible_gpus: int = 0
    horovod_built_for: str | None = None
    horovod_parts: tuple[str, ...] = ()
    nccl: str | None = None
    horovod_mpi: tuple[str, ...] = ()
    mpi4py_mpi: tuple[str, ...] = ()
    mpi_library: str | None = None


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU, as the driver's own tool describes it."""

    uuid: str
    name: str
    driver: str
    mig: bool


@dataclass(frozen=True, kw_only=True)
class Hardware(Machine):
    """The node, and what this process may use of it.

    Attributes:
        total_cores: those of the node.
        memory_bytes, available_bytes: of the node; 0 where unknown.
        memory_limit: what the cgroup grants, in bytes; None: no limit.
        shm_free_bytes: what is free of ``/dev/shm``.
        gpus: those that the driver lists; None where there is no driver.
        gpu_failure: why the driver's tool could not be asked.
        cuda_visible_devices: the variable, where it is set.
    """

    total_cores: int
    memory_bytes: int = 0
    available_bytes: int = 0
    memory_limit: int | None = None
    shm_free_bytes: int = 0
    gpus: tuple[Gpu, ...] | None = None
    gpu_failure: str | None = None
    cuda_visible_devices: str | None = None


@dataclass(frozen=True, kw_only=True)
class Launchers:
    """The programs that start ranks.

    Attributes:
        horovodrun, mpirun, srun: paths of those that are in ``PATH``.
        mpirun_version: what mpirun says that it is, such as ``Open MPI 4.1.4``.
        mpirun_failure: why it does not even say that.
        srun_mpi: the best kind of MPI that this srun can start, ``horovodrun`` where it knows none that fits; None
            where it does not answer.
        refuses_root: whether this mpirun would refuse to start anything, as this is root.
    """

    horovodrun: str | None = None
    mpirun: str | None = None
    mpirun_version: str | None = None
    mpirun_failure: str | None = None
    srun: str | None = None
    srun_mpi: str | None = None
    refuses_root: bool = False


@dataclass(frozen=True, kw_only=True)
class Facts:
    """All that one process found.

    Attributes:
        world: its place.
        device: what it computes on, such as ``GPU 1`` or ``core 0``.
        gpu: what the driver calls its GPU; None on cores.
        device_failure: why it has no device.
        unknown: why a probe itself failed, by its name.
    """

    world: World
    stack: Stack
    hardware: Hardware
    launchers: Launchers
    device: str = ""
    gpu: str | None = None
    device_failure: str | None = None
    unknown: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class AllReduce:
    """One timed all-reduce among all ranks.

    Attributes:
        description: who carried it, such as ``Horovod over MPI``.
        payload_bytes: the size of the tensor of each rank.
        seconds: the time that it took.
        is_right: whether every element of the sum was what it must be.
    """

    description: str
    payload_bytes: int
    seconds: float
    is_right: bool


def facts_from_plain(values: Mapping[str, Any]) -> Facts:
    """Facts that travelled as JSON, which knows neither tuples nor dataclasses."""
    parts = {"world": World, "stack": Stack, "hardware": Hardware, "launchers": Launchers}
    made = {name: kind(**as_tuples(values[name])) for name, kind in parts.items()}
    gpus = made["hardware"].gpus
    if gpus is not None:
        made["hardware"] = dataclasses.replace(made["hardware"], gpus=tuple(Gpu(**gpu) for gpu in gpus))
    return Facts(**{**values, **made})


def as_tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values with a tuple for each list, which JSON has made of it."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
