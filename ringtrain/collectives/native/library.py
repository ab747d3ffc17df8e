"""The compiled operation: found, loaded, and joined to the other ranks of the node."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LIBRARY = Path(__file__).with_name("libringtrain.so")


@functools.cache
def load_operation() -> Any:
    """TensorFlow's function of the operation; None where it was not compiled, or cannot be loaded here."""
    import tensorflow as tf

    try:
        return tf.load_op_library(str(LIBRARY)).ringtrain_all_reduce
    except (OSError, tf.errors.OpError, AttributeError):
        return None


def join(descriptor: int, rank: int, processes: Sequence[int], spin_seconds: float) -> int:
    """Join the ranks with these process numbers in the memory that all have open; -1 where it cannot be mapped.

    What it returns is the operation's attribute ``group``.
    """
    function = ctypes.CDLL(str(LIBRARY)).ringtrain_join
    numbers = (ctypes.c_int * len(processes))(*processes)
    return int(function(descriptor, rank, len(processes), numbers, ctypes.c_int64(round(spin_seconds * 1e9))))
