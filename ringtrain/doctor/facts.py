"""The findings of the probes of one process: plain values, which are sent between ranks as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ringtrain.runtime.machine import Machine
from ringtrain.runtime.world import World


@dataclass(frozen=True, kw_only=True)
class Stack:
    """The packages, as a child process loaded them."""

    python: str  # its version, such as ``3.11.2``
    executable: str  # the interpreter's path
    optimize: int = 0  # how often ``-O`` was given, or ``PYTHONOPTIMIZE``
    versions: dict[str, str] = field(default_factory=dict)  # of the packages that are installed
    failures: dict[str, str] = field(default_factory=dict)  # why a package could not be loaded
    keras_backend: str | None = None  # ``KERAS_BACKEND`` where the user set it
    legacy_keras: bool = False  # ``TF_USE_LEGACY_KERAS`` asks for Keras 2
    cuda: str | None = None  # that TensorFlow was built for; None in a build for cores alone
    visible_gpus: int = 0  # to TensorFlow
    horovod_built_for: str | None = None  # the version of TensorFlow that it was compiled against
    horovod_parts: tuple[str, ...] = ()  # compiled into it: of ``mpi``, ``gloo``, ``nccl``, ``ccl``, ``cuda``, ``rocm``
    nccl: str | None = None  # the version in Horovod
    horovod_mpi: tuple[str, ...] = ()  # the MPI library files that it loads
    mpi4py_mpi: tuple[str, ...] = ()  # those that mpi4py loads
    mpi_library: str | None = None  # what the MPI library says that it is, such as ``Open MPI 4.1.4``


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU, as the driver's own tool describes it."""

    uuid: str
    name: str
    driver: str
    mig: bool


@dataclass(frozen=True, kw_only=True)
class Hardware(Machine):
    """The node, and what this process may use of it."""

    total_cores: int
    memory_bytes: int = 0  # 0 if unknown
    available_bytes: int = 0
    memory_limit: int | None = None  # what the cgroup grants, in bytes; None: no limit
    gpus: tuple[Gpu, ...] | None = None  # those that the driver lists; None if there is no driver
    gpu_failure: str | None = None  # why the driver's tool could not be asked
    cuda_visible_devices: str | None = None  # the variable, if it is set


@dataclass(frozen=True, kw_only=True)
class Launchers:
    """The programs that start ranks: the paths of those that are in ``PATH``, and what they are."""

    horovodrun: str | None = None
    mpirun: str | None = None
    mpirun_version: str | None = None  # such as ``Open MPI 4.1.4``
    mpirun_failure: str | None = None  # why it does not even say that
    srun: str | None = None
    srun_mpi: str | None = None  # the best kind of MPI that it starts, ``horovodrun`` if none; None: no answer
    refuses_root: bool = False  # this mpirun would start nothing, as this is root


@dataclass(frozen=True, kw_only=True)
class Facts:
    """All that one process found."""

    world: World
    stack: Stack
    hardware: Hardware
    launchers: Launchers
    device: str = ""  # what it computes on, such as ``GPU 1`` or ``core 0``
    gpu: str | None = None  # what the driver calls its GPU; None on cores
    device_failure: str | None = None  # why it has no device
    unknown: dict[str, str] = field(default_factory=dict)  # why a probe itself failed, by its name
    refusals: list[str] = field(default_factory=list)  # why a training would end before it begins, and what helps


@dataclass(frozen=True, kw_only=True)
class AllReduce:
    """Timed all-reduces among all ranks: a long and a short one."""

    description: str  # who carried it, such as ``Horovod over MPI``
    payload_bytes: int  # of the tensor of each rank
    seconds: float
    short_bytes: int
    short_seconds: float
    is_right: bool  # every element of the sums was what it must be


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
