"""One audited step: run unchanged, then by each rank as one process with the samples of all ranks."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ringtrain.collectives import Collective, all_gather_object
from ringtrain.guard.layers import draws
from ringtrain.guard.replicas import hash_bits
from ringtrain.keras.auditing.recording import Recording, recording, replaced
from ringtrain.keras.collective import ProcessSetCollective
from ringtrain.keras.exchange import COMPRESSIONS, variable_key
from ringtrain.keras.guards import read_rate
from ringtrain.run.variables import is_seed_state

Step = Callable[..., Any]
LARGE_BYTES = 64 * 2**20  # of samples, whose number is shown before they are gathered
MIN_SHARE = 1e-4  # of the largest gradient; smaller ones are compared as parts of it


class NotAuditedError(Exception):
    """Reason why a step cannot be compared. It has not run."""


def why_not_audited(record: Recording) -> str:
    if record.is_in_graph:
        return "the step runs in a graph although functions run eagerly, such as in a map or a while_loop"
    if record.num_updates > 1:
        return f"its optimizer updates {record.num_updates} times in one call of the step"
    if record.passes > 1:
        return (
            f"backward_passes_per_step is {record.passes}; gradients are reduced in every {record.passes}th step alone"
        )
    return ""


@dataclass(frozen=True)
class Batch:
    """Arguments of a step; leaves with this rank's samples [count, ...] are replaced by those of all ranks."""

    structure: Any
    leaves: Sequence[Any]
    places: Sequence[int]  # of the leaves with samples
    count: int

    @classmethod
    def of(cls, arguments: Any) -> Batch:
        leaves = tf.nest.flatten(arguments)
        if strange := [each for each in leaves if isinstance(each, (tf.RaggedTensor, tf.SparseTensor))]:
            raise NotAuditedError(f"its inputs are a {type(strange[0]).__name__}, which cannot be gathered")
        tensors = [i for i, each in enumerate(leaves) if isinstance(each, (tf.Tensor, np.ndarray)) and len(each.shape)]
        if not tensors:
            raise NotAuditedError("its arguments have no tensor of samples")
        count = int(leaves[tensors[0]].shape[0])
        return cls(arguments, leaves, [place for place in tensors if leaves[place].shape[0] == count], count)

    @property
    def samples(self) -> list[tf.Tensor]:
        return [tf.convert_to_tensor(self.leaves[place]) for place in self.places]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.dtype.size * int(np.prod(tensor.shape)) for tensor in self.samples)

    def hashes(self) -> list[str]:
        """One of each sample."""
        rows = [np.asarray(tensor).reshape(self.count, -1) for tensor in self.samples]
        return [
            hashlib.blake2b(b"".join(row[number].tobytes() for row in rows), digest_size=8).hexdigest()
            for number in range(self.count)
        ]

    def gathered(self, collective: Collective) -> list[tf.Tensor]:
        return [
            collective.all_gather(tensor, name=f"audit/samples/{number}") for number, tensor in enumerate(self.samples)
        ]

    def arguments_with(self, samples: Sequence[tf.Tensor]) -> Any:
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, samples, strict=True):
            leaves[place] = tensor
        return tf.nest.pack_sequence_as(self.structure, leaves)


class State:
    """Values of all variables that a step may change."""

    def __init__(self, variables: Sequence[Any]) -> None:
        self._variables = {variable_key(variable): variable for variable in variables}

    def read(self) -> dict[Any, np.ndarray]:
        return {key: np.array(variable.numpy()) for key, variable in self._variables.items()}

    def write(self, values: Mapping[Any, np.ndarray]) -> None:
        for key, value in values.items():
            self._variables[key].assign(value)


@dataclass(frozen=True)
class Trial:
    """A step that was run, with the values of the variables after it."""

    record: Recording
    after: Mapping[Any, np.ndarray]
    loss: float | None

    def gradient(self, key: Any) -> np.ndarray:
        """Applied; zeros if none was."""
        given = self.record.applied.get(key)
        return np.zeros_like(self.after[key]) if given is None else np.asarray(tf.convert_to_tensor(given))


def audit_step(step: Step, arguments: Any, known: Recording, *, max_bytes: int) -> tuple[Any, list[dict[str, Any]]]:
    """Run a step of the script, and compare it. Collective.

    Args:
        step: called with ``arguments``, a tuple and a mapping.
        known: a recording of an earlier call.

    Returns:
        What the step returned, and facts of all ranks for ``find_causes``.
    """
    collective = ProcessSetCollective()
    state, batch = State(known.all_variables()), Batch.of(arguments)
    counts = all_gather_object(collective, [batch.count, batch.num_bytes], name="audit/counts")
    if (num_bytes := sum(its for _, its in counts)) > max_bytes:
        raise NotAuditedError(
            f"the batch of all ranks has {num_bytes / 2**20:,.0f} MiB, above --max_mebibytes {max_bytes / 2**20:,.0f}"
        )
    if num_bytes > LARGE_BYTES and collective.world.is_rank0:
        print(f"audit: each rank gathers the samples of all ranks, {num_bytes / 2**20:,.0f} MiB", flush=True)
    before = state.read()

    def run(samples: Sequence[tf.Tensor] | None = None, start: Mapping[Any, np.ndarray] = before) -> Trial:
        state.write(start)
        return run_trial(step, batch.structure if samples is None else batch.arguments_with(samples), state, samples)[1]

    returned, real = run_trial(step, batch.structure, state, None)
    layers = known.layers()
    drawing = [layer for layer in layers if draws(layer)]
    norms = [layer for layer in layers if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable]
    local_norms = [layer for layer in norms if not hasattr(layer, "needs_every_rank")]
    whole = batch.gathered(collective)
    with without_training(drawing):
        ranks = run() if drawing else real
        one, again = run(whole), run(whole)
        reverse = run([tensor[::-1] for tensor in whole])
        mine = describe(collective, ranks, one, reverse, before, [count for count, _ in counts], names_of(known))
        mine["repeated"] = max(difference(again.gradient(key), one.gradient(key)) for key in known.variables)
        if local_norms:
            statistics = [v for layer in local_norms for v in layer.non_trainable_variables]
            of_rank0 = collective.broadcast(
                [tf.convert_to_tensor(v.value) for v in statistics], name="audit/statistics"
            )
            same = before | {variable_key(v): np.asarray(value) for v, value in zip(statistics, of_rank0, strict=True)}
            with without_training(local_norms):
                frozen = [run(start=same), run(whole, start=same)]
            pairs = [[trial.gradient(key) for trial in frozen] for key in known.variables]
            mine["without_norms"] = max(difference(of_ranks, right) for of_ranks, right in pairs)
    state.write(real.after)
    mine |= {
        "count": batch.count,
        "samples": batch.hashes(),
        "drawing": [layer.name for layer in drawing],
        "norms": [layer.name for layer in local_norms],
        "begin": [hash_bits(before[key]) for key in known.variables if key not in known.kept_local],
    }
    return returned, all_gather_object(collective, mine, name="audit/facts")


def run_trial(step: Step, arguments: Any, state: State, samples: Any) -> tuple[Any, Trial]:
    """With ``samples`` of all ranks, gradients are not reduced, and the script sees one rank."""
    args, kwargs = arguments
    with recording(is_alone=samples is not None) as record:
        returned = step(*args, **kwargs)
    scalars = [each for each in record.losses or tf.nest.flatten(returned) if is_scalar(each)]
    return returned, Trial(record, state.read(), float(scalars[0]) if scalars else None)


def describe(
    collective: Collective,
    ranks: Trial,
    one: Trial,
    reverse: Trial,
    before: Mapping[Any, np.ndarray],
    counts: Sequence[int],
    names: Mapping[Any, str],
) -> dict[str, Any]:
    """Return this rank's facts. Collective."""
    keys = list(names)
    record, size = ranks.record, collective.world.size
    share = counts[collective.world.rank] / sum(counts)
    given = [np.asarray(tf.convert_to_tensor(record.local.get(key, one.gradient(key) * 0))) for key in keys]
    means = [
        collective.all_reduce([tf.constant(value * factor) for value in given], name=f"audit/{name}").tensors
        for name, factor in (("mean", 1 / size), ("weighted", share))
    ]
    smallest = MIN_SHARE * max((norm(one.gradient(key)) for key in keys), default=0.0)
    variables = []
    for key, mean, weighted in zip(keys, *means, strict=True):
        right = one.gradient(key)
        found = ranks.gradient(key)
        way = one.after[key] - before[key]
        variables.append(
            {
                "name": names[key],
                "difference": difference(found, right, smallest),
                "rounding": difference(reverse.gradient(key), right, smallest),
                "factor": float(np.vdot(found, right) / max(np.vdot(right, right), 1e-30)),
                "of_mean": difference(found, mean.numpy(), smallest),
                "of_weighted": difference(weighted.numpy(), right, smallest),
                "update": difference(ranks.after[key] - before[key], way, MIN_SHARE * norm(before[key])),
                "is_reduced": key in record.local,
                "is_own": key in record.kept_local,
                "gradient": hash_bits(found),
            }
        )
    seeds = {variable_key(v) for model in record.models.values() for v in model.variables if is_seed_state(v)}
    weights = {variable_key(v): v for model in record.models.values() for v in model.non_trainable_variables}
    state = {v.path: difference(ranks.after[key], one.after[key]) for key, v in weights.items() if key not in seeds}
    return {
        "variables": variables,
        "state": state,
        "losses": [ranks.loss, one.loss],
        "compression": any(COMPRESSIONS[each.compression] != "none" for each in record.settings),
        "half": any(layer.compute_dtype in ("float16", "bfloat16") for layer in record.layers()),
        "alone": record.alone,
        "num_updates": record.num_updates,
        "rates": [read_rate(optimizer) for optimizer in record.optimizers.values()],
    }


@contextlib.contextmanager
def without_training(layers: Sequence[keras.layers.Layer]) -> Iterator[None]:
    """Let layers compute as in inference."""
    chosen = {id(layer) for layer in layers}

    def call(plain: Callable[..., Any], layer: keras.layers.Layer, *args: Any, **kwargs: Any) -> Any:
        if id(layer) in chosen and "training" in layer._call_signature.parameters:
            kwargs["training"] = False
        return plain(layer, *args, **kwargs)

    with replaced(keras.layers.Layer, "__call__", call):
        yield


def names_of(record: Recording) -> dict[Any, str]:
    return {key: getattr(variable, "path", variable.name) for key, variable in record.variables.items()}


def norm(value: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(value, np.float64)))


def difference(value: np.ndarray, right: np.ndarray, least: float = 0.0) -> float:
    """Euclidean distance relative to ``right``'s length, which counts as ``least`` or more."""
    distance = norm(np.asarray(value, np.float64) - np.asarray(right, np.float64))
    return distance / max(norm(right), least, 1e-30) if distance else 0.0


def is_scalar(value: Any) -> bool:
    return isinstance(value, (tf.Tensor, float)) and np.ndim(value) == 0 and np.asarray(value).dtype.kind == "f"
