"""XLA: which steps it compiles, which part of a step, and operations that it lacks."""

from __future__ import annotations

import concurrent.futures
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from ringtrain.messages.rules import list_first

# How TensorFlow's errors, those of XLA included, name an operation in a graph.
NODE = re.compile(r"\{\{node ([^}]*)\}\}")
MAX_NAMED = 3
TRIED_SAMPLES = 2


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """Facts that decide if XLA compiles a step: known before the trace, and equal on all ranks."""

    has_gpu: bool
    is_deterministic: bool
    asks_other_ranks: bool  # a layer or the loss does
    has_unknown_lengths: bool
    unsupported_layers: Sequence[str]  # names of layers that Keras does not compile either


class XlaDecision(NamedTuple):
    compiles: bool
    why_not: str = ""  # empty also if XLA was not requested


def decide_on_xla(jit_compile: str, facts: StepFacts) -> XlaDecision:
    """Return if XLA compiles a step; ``jit_compile`` is ``"auto"``, ``"true"`` or ``"false"``.

    ``auto`` is ``true`` on GPUs only, and then avoids what XLA is known to lack.
    """
    if jit_compile == "false" or (jit_compile == "auto" and not facts.has_gpu):
        return XlaDecision(False)
    if facts.asks_other_ranks:
        return XlaDecision(False, "a layer asks the other ranks within its forward pass")
    if jit_compile == "true":
        return XlaDecision(True)
    if facts.has_unknown_lengths:
        return XlaDecision(False, "the samples vary in length, and XLA would compile each length")
    if facts.is_deterministic:
        return XlaDecision(False, "with --deterministic true XLA lacks more operations")
    if facts.unsupported_layers:
        layers = list_first(facts.unsupported_layers)
        return XlaDecision(False, f"Keras does not compile the layer {layers}")
    return XlaDecision(True)


def find_unsupported_layers(layers: Sequence[Any]) -> list[str]:
    """Return the names of layers that Keras' own ``jit_compile="auto"`` does not compile."""
    return [layer.name for layer in layers if not layer.supports_jit]


def has_unknown_lengths(specs: Sequence[Any]) -> bool:
    """Return True if dimensions beside the number of samples are unknown, as of ragged tensors."""
    for spec in specs:
        is_dense = isinstance(spec, tf.TensorSpec)
        if not is_dense or not spec.shape[1:].is_fully_defined():
            return True
    return False


class CompiledFunction:
    """A function of nested tensors that XLA compiles, once for each shape of them."""

    def __init__(self, compute: Callable[..., Any]) -> None:
        self._compute = compute
        self._arguments: Any = None
        # Of the first call: one spec for each tensor.
        self._specs: list[tf.TensorSpec] = []
        self._has_composites = False
        self._function = self._create()

    def _create(self) -> Any:
        def compute(*flat_arguments: tf.Tensor) -> Any:
            tensors = iter(flat_arguments)
            leaves = tf.nest.flatten(self._arguments, expand_composites=True)
            leaves = [None if leaf is None else next(tensors) for leaf in leaves]
            arguments = tf.nest.pack_sequence_as(self._arguments, leaves, expand_composites=True)
            return self._compute(*arguments)

        return tf.function(compute, jit_compile=True, autograph=False)

    def __call__(self, *arguments: Any) -> Any:
        self._arguments = arguments
        leaves = tf.nest.flatten(arguments, expand_composites=True)
        tensors = [tf.convert_to_tensor(leaf) for leaf in leaves if leaf is not None]
        if not self._specs:
            self._specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors]
            self._has_composites = len(leaves) > len(tf.nest.flatten(arguments))
        return self._function(*tensors)

    @property
    def has_unknown_lengths(self) -> bool:
        """True if XLA compiles again for each length of a sample."""
        return self._has_composites or has_unknown_lengths(self._specs)

    def find_unsupported(self) -> str:
        """Return the operations of the first call that XLA cannot compile, or ``""``.

        It computes nothing. Samples of unknown length are not checked: XLA's check needs all shapes.
        """
        if self.has_unknown_lengths:
            return ""
        if tf.executing_eagerly():
            return self._check()
        # A new thread is in no function, and stops no tape as tf.init_scope would. Keras' dtype policy is per thread.
        set_policy = keras.config.set_dtype_policy
        policy = keras.config.dtype_policy()
        with concurrent.futures.ThreadPoolExecutor(1, "xla", initializer=set_policy, initargs=(policy,)) as thread:
            return thread.submit(self._check).result()

    def _check(self) -> str:
        specs = [with_known_size(spec) for spec in self._specs]
        function = self._function if specs == self._specs else self._create()
        graph = function.get_concrete_function(*specs).graph
        try:
            function.experimental_get_compiler_ir(*specs)(stage="hlo")
        except (tf.errors.OpError, ValueError, NotImplementedError) as error:
            return describe_unsupported(str(error), graph)
        return ""


def with_known_size(spec: tf.TensorSpec) -> tf.TensorSpec:
    """Replace an unknown number of samples."""
    if spec.shape.rank and spec.shape[0] is None:
        return tf.TensorSpec([TRIED_SAMPLES, *spec.shape[1:]], spec.dtype)
    return spec


def describe_unsupported(error_text: str, graph: Any) -> str:
    """Describe the operations of ``graph`` that an error of XLA names, or quote its first line."""
    types = {node.name: node.op for node in nodes_of(graph)}
    names = dict.fromkeys(NODE.findall(error_text))
    operations = [f"{types.get(name, 'the operation')} (node {name})" for name in names]
    if operations:
        return list_first(operations, MAX_NAMED)
    lines = error_text.strip().splitlines() or ["no cause is given"]
    return f"the step ({lines[0].rstrip('.')})"


def nodes_of(graph: Any) -> list[Any]:
    """Return all nodes of a graph and of its functions."""
    definition = graph.as_graph_def()
    nodes = list(definition.node)
    for function in definition.library.function:
        nodes += function.node_def
    return nodes
