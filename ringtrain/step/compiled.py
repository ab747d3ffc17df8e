"""A part of a step that XLA compiles, and XLA's errors about unsupported operations."""

from __future__ import annotations

import concurrent.futures
import re
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from ringtrain.messages.rules import list_first

# TensorFlow's message: EagerPyFunc (No registered ... node {{node model/dense/EagerPyFunc}}).
UNCOMPILED = re.compile(
    r"(\w+) \((?:No registered|Unsupported|.{0,80}?not supported).*?\{\{node ([^}]*)\}\}", re.DOTALL
)
COMPOSITES = (tf.RaggedTensor, tf.SparseTensor)
MAX_NAMED = 3
TRIED_SAMPLES = 2


class CompiledFunction:
    def __init__(self, compute: Callable[..., Any]) -> None:
        self._compute = compute
        self._arguments: Any = None
        self._specs: list[tf.TensorSpec] = []
        self._function = self._create()

    def _create(self) -> Any:
        def compute(*given: tf.Tensor) -> Any:
            tensors = iter(given)
            leaves = [None if leaf is None else next(tensors) for leaf in tf.nest.flatten(self._arguments)]
            return self._compute(*tf.nest.pack_sequence_as(self._arguments, leaves))

        return tf.function(compute, jit_compile=True, autograph=False)

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*self._flatten(arguments))

    def _flatten(self, arguments: Any) -> list[tf.Tensor]:
        self._arguments = arguments
        flat = [tf.convert_to_tensor(leaf) for leaf in tf.nest.flatten(arguments) if leaf is not None]
        self._specs = self._specs or [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in flat]
        return flat

    @property
    def has_unknown_lengths(self) -> bool:
        """True if XLA would compile again for each length."""
        return not all(spec.shape.is_fully_defined() for spec in self._with_samples())

    def _with_samples(self) -> list[tf.TensorSpec]:
        """Replace unknown numbers of samples."""
        return [
            tf.TensorSpec([TRIED_SAMPLES, *spec.shape[1:]], spec.dtype)
            if spec.shape.rank and spec.shape[0] is None
            else spec
            for spec in self._specs
        ]

    def why_not(self, *arguments: Any) -> str:
        """Return operations that XLA lacks, or "", for ``arguments`` or the first call; needs known lengths."""
        if arguments:
            composite = [leaf for leaf in tf.nest.flatten(arguments) if isinstance(leaf, COMPOSITES)]
            if composite:
                return f"a {type(composite[0]).__name__}"
            self._flatten(arguments)
        if self.has_unknown_lengths:
            return ""
        if tf.executing_eagerly():
            return self._ask()
        # A new thread is in no function, and stops no tape as tf.init_scope would. Keras' dtype policy is per thread.
        set_policy, policy = keras.config.set_dtype_policy, keras.config.dtype_policy()
        with concurrent.futures.ThreadPoolExecutor(1, "xla", initializer=set_policy, initargs=(policy,)) as thread:
            return thread.submit(self._ask).result()

    def _ask(self) -> str:
        specs = self._with_samples()
        function = self._function if specs == self._specs else self._create()
        try:
            function.experimental_get_compiler_ir(*specs)(stage="hlo")
        except (tf.errors.OpError, ValueError, NotImplementedError) as error:
            names = [f"{kind} ({node})" for kind, node in dict.fromkeys(UNCOMPILED.findall(str(error)))]
            return list_first(names, MAX_NAMED) or next(iter(str(error).strip().splitlines()), "it")
        return ""
