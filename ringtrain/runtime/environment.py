"""Checks of environment variables with which Horovod or TensorFlow would abort in C++."""

from __future__ import annotations

import contextlib
import inspect
import logging
import math
import os
import resource
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

from ringtrain.errors import UsageError
from ringtrain.messages.hiding import describe_hiding
from ringtrain.runtime.world import World

# Minimum of any run: 1.6 GiB on cores, 2.6 GiB with TensorFlow 2.21 for GPUs.
MIN_ADDRESS_BYTES = 1.5 * 2**30
# Horovod and TensorFlow read other text as 0, or abort.
FROM_0 = (
    "HOROVOD_ADASUM_MPI_CHUNK_SIZE", "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES", "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE",
    "HOROVOD_AUTOTUNE_WARMUP_SAMPLES", "HOROVOD_CACHE_CAPACITY", "HOROVOD_FUSION_THRESHOLD",
    "HOROVOD_STALL_CHECK_TIME_SECONDS", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "TF_NUM_INTEROP_THREADS",
    "TF_NUM_INTRAOP_THREADS",
)  # fmt: skip
FROM_1 = ("HOROVOD_GLOO_RENDEZVOUS_PORT", "HOROVOD_GLOO_TIMEOUT_SECONDS", "HOROVOD_NUM_NCCL_STREAMS")
NUMBERS = ("HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE", "HOROVOD_CYCLE_TIME")
FLAGS = ("TF_XLA_FLAGS", "XLA_FLAGS")
LARGEST = 2**31 - 1


def check_environment(environ: Mapping[str, str]) -> None:
    interfaces = [name for _, name in socket.if_nameindex()]
    rules: list[tuple[Sequence[str], Callable[[str], bool], str]] = [
        (FROM_0, lambda value: _is_whole(value, 0), f"a whole number from 0 to {LARGEST}"),
        (FROM_1, lambda value: _is_whole(value, 1), f"a whole number from 1 to {LARGEST}"),
        (NUMBERS, _is_number, "a number of at least 0"),
        (["HOROVOD_CONTROLLER"], lambda value: value.lower() in ("mpi", "gloo"), "one of mpi, gloo"),
        (["HOROVOD_CPU_OPERATIONS"], lambda value: value.lower() in ("mpi", "gloo", "ccl"), "one of mpi, gloo, ccl"),
        (FLAGS, _are_flags, "flags that begin with --, or a file of such"),
        (["HOROVOD_GLOO_IFACE"], interfaces.__contains__, f"a network interface of this node: {', '.join(interfaces)}"),
    ]
    for names, is_right, rule in rules:
        for name in names:
            value = environ.get(name, "")
            if value and not is_right(value):
                text = f"{name}={value!r} in the environment; it must be {rule}. Unset it, or set it right."
                raise UsageError(text, reach="rank")


def _is_whole(value: str, least: int) -> bool:
    return value.isascii() and value.isdigit() and len(value) < 11 and least <= int(value) <= LARGEST


def _is_number(value: str) -> bool:
    try:
        return 0 <= float(value) < math.inf
    except ValueError:
        return False


def _are_flags(value: str) -> bool:
    return value.lstrip().startswith("-") or not value.strip() or os.path.isfile(value.strip())


def check_address_space(limit: int) -> None:
    """With too little TensorFlow fails anywhere, or hangs."""
    if limit != resource.RLIM_INFINITY and limit < MIN_ADDRESS_BYTES:
        raise UsageError(
            f"this process may have {limit / 2**30:.1f} GiB of address space (ulimit -v {limit // 1024}), and "
            f"TensorFlow alone needs {MIN_ADDRESS_BYTES / 2**30:.1f} GiB. Raise the limit: ulimit -v unlimited.",
            reach="node",
        )


@contextlib.contextmanager
def explaining_tensorflow() -> Iterator[None]:
    try:
        yield
    except (Exception, SystemExit) as error:  # broken packages raise anything
        stripped = " Python runs without docstrings (-OO, PYTHONOPTIMIZE=2), which TensorFlow may need: unset that."
        why = describe_hiding(error) or f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise UsageError(
            f"TensorFlow cannot be loaded: {why}."
            f"{stripped if sys.flags.optimize >= 2 else ''} See python -m ringtrain doctor.",
            reach="node",
        ) from error


class AutoGraphFilter(logging.Filter):
    """Shortens TensorFlow's warning about functions that AutoGraph cannot convert to one line, on rank 0."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._is_rank0 = world.is_rank0

    def filter(self, record: logging.LogRecord) -> bool:
        if not str(record.msg).startswith("AutoGraph could not transform") or not isinstance(record.args, tuple):
            return True
        function, *_, cause = record.args
        code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
        where = f"{code.co_name} ({os.path.basename(code.co_filename)}:{code.co_firstlineno})" if code else function
        record.msg = (
            f"AutoGraph cannot convert {where}: {' '.join(str(cause).split())}. It runs as plain Python while it is "
            "traced, so an if or while on a tensor in it fails. Use tf.cond and tf.while_loop, or avoid syntax that "
            "AutoGraph does not know, such as match."
        )
        record.args = ()
        return self._is_rank0
