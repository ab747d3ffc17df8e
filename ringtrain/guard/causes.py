"""Causes of errors from libraries: another rank is gone, or memory is exhausted."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator

from ringtrain.config import DEFAULT_BATCH_SIZE, Config
from ringtrain.errors import LOST_RANK_SIGN, RingtrainError
from ringtrain.runtime import activity

# Horovod 0.28's error once its background thread has ended (common.h: SHUT_DOWN_ERROR), and Gloo's file before that.
LOST_SIGNS = ("Horovod has been shut down", "gloo/transport/tcp/pair.cc", LOST_RANK_SIGN)
NAMED_SECONDS = 1.5  # the watchdog checks each second


class LostRanksError(RingtrainError):
    has_lost_rank0 = False  # which writes the ``end`` record


_first_lost = ""  # the first lost rank; others follow it
_is_known = threading.Event()


def note_lost(who: str) -> None:
    """``who``: such as ``rank 1 on node7``."""
    global _first_lost
    _first_lost = _first_lost or who
    _is_known.set()


@contextlib.contextmanager
def explaining_lost_ranks() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if isinstance(error, RingtrainError) or not any(sign in str(error) for sign in LOST_SIGNS):
            raise
        place = activity.current()[0].words_of_one
        _is_known.wait(NAMED_SECONDS)
        why = (
            "one of them has ended, or the network between them has failed. Look for the first error, which is another "
            "rank's."
        )
        if _first_lost:
            why = (
                "it has ended, or the network to it has failed. Look for its own error; if it wrote none, it was "
                "killed, or its code left by sys.exit or os._exit."
            )
        lost = LostRanksError(f"lost {_first_lost or 'the other ranks'} while this one {place}: {why}")
        lost.has_lost_rank0 = _first_lost.startswith("rank 0 ")
        raise lost from error


# Of TensorFlow's allocators, XLA, CUDA's driver, Python and NumPy.
MEMORY_SIGNS = re.compile(
    r"OOM when allocating|[Oo]ut of memory|CUDA_ERROR_OUT_OF_MEMORY|[Ff]ailed to allocate (?:memory|request)"
    r"|MemoryError|Unable to allocate"
)
ON_GPU = re.compile(r"device:GPU:|allocator GPU_|CUDA_ERROR|CUDNN_STATUS|[Ff]ailed to allocate request")
REQUEST = re.compile(
    r"OOM when allocating tensor with shape\[[\d,]*\] and type \S+|[Oo]ut of memory[^\n.]{0,80}"
    r"|Unable to allocate [^\n]*"
)


class OutOfMemoryError(RingtrainError):
    pass


@contextlib.contextmanager
def explaining_memory(config: Config) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        message = explain(error, config)
        if message is None:
            raise
        raise OutOfMemoryError(message) from error


def explain(error: Exception, config: Config) -> str | None:
    text = str(error)
    if isinstance(error, RingtrainError) or not (isinstance(error, MemoryError) or MEMORY_SIGNS.search(text)):
        return None
    is_gpu = bool(ON_GPU.search(text))
    request = REQUEST.search(text)
    batch_size, halved = config.batch_size or DEFAULT_BATCH_SIZE, f"--accumulate {2 * config.accumulate}"
    size = f"{batch_size} samples a rank and micro-batch"
    if config.global_batch_size:
        size = f"{config.global_batch_size} samples in the global batch"
    else:
        halved = f"--batch_size {batch_size // 2} {halved}"
    smaller = f"{halved}, which trains the same global batch in smaller pieces (as a new run: --resume never)"
    if batch_size == 1 and not config.global_batch_size:
        smaller = "a smaller model, or smaller samples: the batch is one sample already"
    other_remedy = "--precision mixed_bfloat16" if is_gpu else "fewer ranks on a node"
    return (
        f"out of memory {'on the GPU' if is_gpu else 'on the host'} while it {activity.current()[0].words_of_one}, "
        f"with {size}{f' ({request[0]})' if request else ''}. What helps: {smaller}; {other_remedy}. "
        f"`ringtrain doctor --workload {config.workload} --batch_size auto` finds the largest batch that fits."
    )
