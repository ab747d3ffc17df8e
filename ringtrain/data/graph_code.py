"""AutoGraph conversion of user-defined functions only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

Function = TypeVar("Function", bound=Callable[..., Any])

# AutoGraph's context outside of our functions, which disable it.
_OUTSIDE = tf.__internal__.autograph.control_status_ctx()


def graph_code(function: Function) -> Function:
    """Convert user-defined functions only: converting ours would slow the start by a tenth."""
    if getattr(function, "__module__", "").partition(".")[0] == __name__.partition(".")[0]:
        return tf.autograph.experimental.do_not_convert(function)
    return tf.__internal__.autograph.tf_convert(function, _OUTSIDE)
