"""Detection and explanation of out-of-memory errors of TensorFlow and Python."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from ringtrain.config import DEFAULT_BATCH_SIZE, Config
from ringtrain.errors import RingtrainError
from ringtrain.runtime import activity

# Of TensorFlow's allocators, XLA, CUDA's driver, Python and NumPy.
SIGNS = re.compile(
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
    if isinstance(error, RingtrainError) or not (isinstance(error, MemoryError) or SIGNS.search(text)):
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
    on_host = ["fewer ranks on a node", "--cache none or node instead of memory"]
    remedies = "; ".join([smaller, *(["--precision mixed_bfloat16"] if is_gpu else on_host)])
    return (
        f"out of memory {'on the GPU' if is_gpu else 'on the host'} while it {activity.current()[0].words_of_one}, "
        f"with {size}{f' ({request[0]})' if request else ''}. What helps: {remedies}. `ringtrain doctor --workload "
        f"{config.workload} --batch_size auto` finds the largest batch that fits."
    )
