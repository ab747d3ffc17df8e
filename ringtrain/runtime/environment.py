"""What in the surroundings of a process would end Horovod or TensorFlow within C++, told before they start."""

from __future__ import annotations

import contextlib
import math
import os
import resource
import socket
import sys
from collections.abc import Iterator, Mapping

from ringtrain.errors import UsageError

# Less than any run maps: small ones on cores 1.6 GiB and more, with TensorFlow 2.21 as built for GPUs 2.6 GiB.
MIN_ADDRESS_BYTES = 1.5 * 2**30
# Horovod and TensorFlow take what is no number for 0, or end; the least that each may be.
WHOLE_NUMBERS = {
    "HOROVOD_ADASUM_MPI_CHUNK_SIZE": 0, "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": 0,
    "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": 0, "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": 0, "HOROVOD_CACHE_CAPACITY": 0,
    "HOROVOD_FUSION_THRESHOLD": 0, "HOROVOD_GLOO_RENDEZVOUS_PORT": 1, "HOROVOD_GLOO_TIMEOUT_SECONDS": 1,
    "HOROVOD_NUM_NCCL_STREAMS": 1, "HOROVOD_STALL_CHECK_TIME_SECONDS": 0, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": 0,
    "TF_NUM_INTEROP_THREADS": 0, "TF_NUM_INTRAOP_THREADS": 0,
}  # fmt: skip
NUMBERS = {"HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE": 0, "HOROVOD_CYCLE_TIME": 0}
CHOICES = {"HOROVOD_CONTROLLER": ("mpi", "gloo"), "HOROVOD_CPU_OPERATIONS": ("mpi", "gloo", "ccl")}
FLAGS = ("TF_XLA_FLAGS", "XLA_FLAGS")  # flags, or a file of them
LARGEST = 2**31 - 1


def check_environment(environ: Mapping[str, str]) -> None:
    """See that the variables of Horovod and TensorFlow that are set have values that these can read.

    Raises:
        UsageError: one has not.
    """
    for name, least in WHOLE_NUMBERS.items():
        value = environ.get(name, "")
        if value and not (value.isascii() and value.isdigit() and len(value) < 11 and least <= int(value) <= LARGEST):
            raise _wrong(name, value, f"a whole number from {least} to {LARGEST}")
    for name, least in NUMBERS.items():
        value = environ.get(name, "")
        if value and not _is_number(value, least):
            raise _wrong(name, value, f"a number of at least {least}")
    for name, choices in CHOICES.items():
        value = environ.get(name, "")
        if value and value.lower() not in choices:
            raise _wrong(name, value, f"one of {', '.join(choices)}")
    for name in FLAGS:
        value = environ.get(name, "").strip()
        if value and not value.startswith("-") and not os.path.isfile(value):
            raise _wrong(name, value, "flags that begin with --, or a file of such")
    interface = environ.get("HOROVOD_GLOO_IFACE", "")
    interfaces = [name for _, name in socket.if_nameindex()]
    if interface and interface not in interfaces:
        raise _wrong("HOROVOD_GLOO_IFACE", interface, f"a network interface of this node: {', '.join(interfaces)}")


def _wrong(name: str, value: str, rule: str) -> UsageError:
    text = f"{name}={value!r} in the environment; it must be {rule}. Unset it, or set it right."
    return UsageError(text, reach="rank")


def _is_number(value: str, least: float) -> bool:
    try:
        return least <= float(value) < math.inf
    except ValueError:
        return False


def check_address_space(limit: int) -> None:
    """See that this process may map what TensorFlow needs. With less it fails anywhere, or computes for ever.

    Args:
        limit: of the address space, in bytes (``RLIMIT_AS``); ``resource.RLIM_INFINITY``: none.

    Raises:
        UsageError: it may not.
    """
    if limit != resource.RLIM_INFINITY and limit < MIN_ADDRESS_BYTES:
        raise UsageError(
            f"this process may have {limit / 2**30:.1f} GiB of address space (ulimit -v {limit // 1024}), and "
            f"TensorFlow alone needs {MIN_ADDRESS_BYTES / 2**30:.1f} GiB. Raise the limit: ulimit -v unlimited.",
            reach="node",
        )


@contextlib.contextmanager
def explaining_import() -> Iterator[None]:
    """Say in one line that TensorFlow cannot be loaded, and what helps.

    Raises:
        UsageError: it cannot.
    """
    try:
        yield
    except (ImportError, MemoryError, AttributeError, TypeError) as error:
        stripped = " Python runs without docstrings (-OO, PYTHONOPTIMIZE=2), which TensorFlow may need: unset that."
        raise UsageError(
            f"TensorFlow cannot be loaded: {type(error).__name__}: {' '.join(str(error).split())}."
            f"{stripped if sys.flags.optimize >= 2 else ''} See python -m ringtrain doctor.",
            reach="node",
        ) from error
