"""Facts about one process, sent between ranks as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ringtrain.runtime.machine import Machine
from ringtrain.runtime.world import World

PAYLOAD_BYTES, SHORT_BYTES = 16 * 2**20, 4 * 2**10


@dataclass(frozen=True, kw_only=True)
class Stack:
    python: str  # such as ``3.11.2``
    executable: str
    optimize: int = 0  # ``-O`` level
    versions: dict[str, str] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)  # reasons why packages do not load
    keras_backend: str | None = None  # ``KERAS_BACKEND``
    legacy_keras: bool = False  # ``TF_USE_LEGACY_KERAS``
    cuda: str | None = None  # of TensorFlow's build; None: CPU only
    visible_gpus: int = 0  # to TensorFlow
    horovod_built_for: str | None = None  # version of TensorFlow
    horovod_parts: tuple[str, ...] = ()  # of ``mpi``, ``gloo``, ``nccl``, ``ccl``, ``cuda``, ``rocm``
    nccl: str | None = None  # Horovod's version of it
    horovod_mpi: tuple[str, ...] = ()  # loaded library files
    mpi4py_mpi: tuple[str, ...] = ()
    mpi_library: str | None = None  # such as ``Open MPI 4.1.4``


@dataclass(frozen=True, kw_only=True)
class Gpu:
    uuid: str
    name: str
    driver: str
    mig: bool


@dataclass(frozen=True, kw_only=True)
class Hardware(Machine):
    total_cores: int
    memory_bytes: int = 0  # 0: unknown
    available_bytes: int = 0
    memory_limit: int | None = None  # of the cgroup, in bytes
    gpus: tuple[Gpu, ...] | None = None  # None: no driver
    gpu_failure: str | None = None
    cuda_visible_devices: str | None = None


@dataclass(frozen=True, kw_only=True)
class Launchers:
    horovodrun: str | None = None
    mpirun: str | None = None
    mpirun_version: str | None = None  # such as ``Open MPI 4.1.4``
    mpirun_failure: str | None = None
    srun: str | None = None
    srun_mpi: str | None = None  # preferred type; ``horovodrun``: none; None: no answer
    refuses_root: bool = False  # mpirun does not start as root


@dataclass(frozen=True, kw_only=True)
class Facts:
    world: World
    stack: Stack
    hardware: Hardware
    launchers: Launchers
    device: str = ""  # such as ``GPU 1`` or ``core 0``
    gpu: str | None = None  # driver's name; None on cores
    device_failure: str | None = None
    unknown: dict[str, str] = field(default_factory=dict)  # failures of probes, by name
    refusals: list[str] = field(default_factory=list)  # errors that would prevent training


@dataclass(frozen=True)
class AllReduce:
    description: str  # backend
    seconds: float  # of PAYLOAD_BYTES per rank
    short_seconds: float  # of SHORT_BYTES
    is_right: bool  # all sums were exact


def facts_from_plain(values: Mapping[str, Any]) -> Facts:
    parts = {"world": World, "stack": Stack, "hardware": Hardware, "launchers": Launchers}
    made = {name: kind(**as_tuples(values[name])) for name, kind in parts.items()}
    gpus = made["hardware"].gpus
    if gpus is not None:
        made["hardware"] = dataclasses.replace(made["hardware"], gpus=tuple(Gpu(**gpu) for gpu in gpus))
    return Facts(**{**values, **made})


def as_tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert JSON lists to tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
