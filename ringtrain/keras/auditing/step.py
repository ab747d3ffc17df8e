"""One audited step: run unchanged, then by each rank as one process with the samples of all ranks."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from ringtrain.collectives import Collective, all_gather_object
from ringtrain.guard.layers import draws
from ringtrain.guard.replicas import hash_bits
from ringtrain.keras.auditing.recording import Recording, recording, replaced
from ringtrain.keras.collective import ProcessSetCollective
from ringtrain.keras.exchange import COMPRESSIONS, variable_key
from ringtrain.run.variables import is_seed_state

Values = Mapping[Any, np.ndarray]  # by key of variable
LARGE_BYTES = 64 * 2**20  # of samples, whose number is shown before they are gathered
MIN_SHARE = 1e-4  # of the largest gradient; smaller ones are compared as parts of it
UNDETERMINED = 1e-2  # of a gradient, if rounding changes so much
RANDOM = 1e-3  # of a gradient, if it changes so much when the step is repeated
HUGE = 1e30  # NaN and infinity


class NotAuditedError(Exception):
    """Reason why a step cannot be compared, the same on all ranks.

    Attributes:
        returned: by the step; None if it has not run.
    """

    def __init__(self, reason: str, returned: tuple[Any] | None = None) -> None:
        super().__init__(reason)
        self.returned = returned


class Batch:
    """Arguments of a step. Leaves that hold this rank's samples, [count, ...], are replaced by those of all ranks."""

    def __init__(self, arguments: Any) -> None:
        self._arguments, self._leaves = arguments, tf.nest.flatten(arguments)
        tensors = [i for i, each in enumerate(self._leaves) if isinstance(each, tf.Tensor | np.ndarray) and each.ndim]
        self.count = int(self._leaves[tensors[0]].shape[0]) if tensors else 0
        self._indices = [index for index in tensors if self._leaves[index].shape[0] == self.count]
        self.samples = [tf.convert_to_tensor(self._leaves[index]) for index in self._indices]

    def why_not_audited(self) -> str:
        kinds = [type(each).__name__ for each in self._leaves if isinstance(each, tf.RaggedTensor | tf.SparseTensor)]
        if kinds or any(tensor.dtype == tf.string for tensor in self.samples):
            return f"its inputs are of the kind {kinds[0] if kinds else 'string'}, which cannot be gathered"
        return "" if self.count else "the step has no batch among its arguments; pass the batch as an argument"

    def kinds(self) -> list[str]:
        return [f"{tensor.dtype.name} {list(tensor.shape[1:])}" for tensor in self.samples]

    def num_bytes(self) -> int:
        return sum(tensor.dtype.size * int(np.prod(tensor.shape)) for tensor in self.samples)

    def hashes(self) -> list[str]:
        """Return one per sample."""
        rows = [np.asarray(tensor) for tensor in self.samples]
        return [
            hashlib.blake2b(b"".join(row[number].tobytes() for row in rows), digest_size=8).hexdigest()
            for number in range(self.count)
        ]

    def arguments_with(self, samples: Sequence[tf.Tensor]) -> Any:
        leaves = list(self._leaves)
        for index, tensor in zip(self._indices, samples, strict=True):
            leaves[index] = tensor
        return tf.nest.pack_sequence_as(self._arguments, leaves)


class Trial(NamedTuple):
    """A step that was run, with the values of the variables after it."""

    record: Recording
    after: Values

    def gradient(self, key: Any) -> np.ndarray:
        """Applied; zeros if none was."""
        given = self.record.applied.get(key)
        return np.zeros_like(self.after[key]) if given is None else np.asarray(tf.convert_to_tensor(given))


def audit_step(
    step: Callable[..., Any], arguments: Any, known: Recording, *, max_bytes: int
) -> tuple[Any, list[dict[str, Any]]]:
    """Run a step of the script, and compare it. Collective.

    Args:
        step: called with ``arguments``, a tuple and a mapping.
        known: a recording of its first call.

    Returns:
        What the step returned, and facts of all ranks for ``find_causes``; no facts if it updated nothing.

    Raises:
        NotAuditedError: on all ranks.
    """
    collective, batch = ProcessSetCollective(), Batch(arguments)
    why_not = known.why_not_audited() or batch.why_not_audited()
    mine = [why_not, batch.count, batch.num_bytes(), batch.kinds()]
    reasons, counts, sizes, kinds = zip(*all_gather_object(collective, mine, name="audit/batches"), strict=True)
    if reason := next(filter(None, reasons), ""):
        raise NotAuditedError(reason)
    if len(set(map(str, kinds))) > 1:
        raise NotAuditedError(f"the ranks' inputs differ in type or shape ({kinds[0]}, {kinds[-1]})")
    if sum(sizes) > max_bytes:
        raise NotAuditedError(f"the samples of all ranks take {sum(sizes):,} bytes, and {max_bytes:,} are allowed")
    if sum(sizes) > LARGE_BYTES and collective.world.is_rank0:
        print(f"audit: each rank gathers {sum(sizes) / 2**20:,.0f} MiB, and computes with it", flush=True)

    variables = known.all_variables()
    before = read_values(variables)
    returned, real = run_trial(step, arguments, variables)
    more = [variable.name for key, variable in real.record.all_variables().items() if key not in before]
    mine = [f"it changes variables that its first call did not ({more[0]})" if more else "", real.record.num_updates]
    reasons, updates = zip(*all_gather_object(collective, mine, name="audit/updates"), strict=True)
    if reason := next(filter(None, reasons), ""):
        raise NotAuditedError(reason, (returned,))
    if not max(updates):
        return returned, []
    try:
        facts = compare(step, arguments, batch, known, before, real, collective, counts)
    finally:
        write_values(variables, real.after)
    of_ranks = all_gather_object(collective, facts, name="audit/facts")
    if (changed := max(its["repeated"] for its in of_ranks)) > RANDOM:
        raise NotAuditedError(
            f"the same step gives other gradients (by {changed:.0e}) when one process repeats it: it draws random "
            "numbers outside of Keras' seed generators or in a layer without a training argument, or an operation is "
            "not deterministic (tf.config.experimental.enable_op_determinism)",
            (returned,),
        )
    return returned, of_ranks


def compare(
    step: Callable[..., Any],
    arguments: Any,
    batch: Batch,
    known: Recording,
    before: Values,
    real: Trial,
    collective: Collective,
    counts: Sequence[int],
) -> dict[str, Any]:
    """Return this rank's facts. Collective; leaves other values in the variables."""
    variables, layers = known.all_variables(), known.layers()
    whole = [collective.all_gather(each, name=f"audit/samples/{i}") for i, each in enumerate(batch.samples)]

    def run(samples: Sequence[tf.Tensor] | None = None, start: Values = before) -> Trial:
        write_values(variables, start)
        changed = arguments if samples is None else batch.arguments_with(samples)
        return run_trial(step, changed, variables, is_one_process=samples is not None)[1]

    drawing = [layer for layer in layers if draws(layer)]
    norms = [layer for layer in layers if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable]
    local_norms = [layer for layer in norms if not hasattr(layer, "needs_every_rank")]
    with without_training(drawing):
        ranks = run() if drawing else real
        one, reverse = run(whole), run([tensor[::-1] for tensor in whole])
        facts = describe(collective, ranks, one, reverse, before, counts, known)
        facts["repeated"] = compare_gradients(run(whole), one, known)
        if local_norms:
            statistics = [v for layer in local_norms for v in layer.non_trainable_variables]
            tensors = [tf.convert_to_tensor(v.value) for v in statistics]
            of_rank0 = collective.broadcast(tensors, name="audit/statistics")
            same = {variable_key(v): np.asarray(value) for v, value in zip(statistics, of_rank0, strict=True)}
            with without_training(local_norms):
                frozen, right = run(start=dict(before) | same), run(whole, start=dict(before) | same)
            facts["without_norms"] = compare_gradients(frozen, right, known)
    return facts | {
        "count": batch.count,
        "samples": batch.hashes(),
        "drawing": [layer.name for layer in drawing],
        "norms": [layer.name for layer in local_norms],
        "begin": [hash_bits(before[key]) for key in known.variables],
    }


def describe(
    collective: Collective,
    ranks: Trial,
    one: Trial,
    reverse: Trial,
    before: Values,
    counts: Sequence[int],
    known: Recording,
) -> dict[str, Any]:
    """Return this rank's facts about gradients and updates. Collective."""
    record, size = ranks.record, collective.world.size
    local = {key: np.asarray(tf.convert_to_tensor(value), np.float64) for key, value in record.local.items()}
    given = [local.get(key, np.zeros(before[key].shape)) / record.loss_scale for key in known.variables]
    share = counts[collective.world.rank] / sum(counts)
    means = [
        collective.all_reduce([tf.constant(value * factor) for value in given], name=f"audit/{name}").tensors
        for name, factor in (("mean", 1 / size), ("weighted", share))
    ]
    smallest = MIN_SHARE * max(length(one.gradient(key)) for key in known.variables)
    variables = []
    for (key, variable), mean, weighted in zip(known.variables.items(), *means, strict=True):
        found, right, reversed_ = ranks.gradient(key), one.gradient(key), reverse.gradient(key)
        update, least = one.after[key] - before[key], MIN_SHARE * length(before[key])
        is_determined = difference(reversed_, right) < UNDETERMINED
        variables.append(
            {
                "name": getattr(variable, "path", variable.name),
                "difference": difference(found, right, smallest),
                "rounding": difference(reversed_, right, smallest),
                "factor": float(np.nan_to_num(np.vdot(found, right) / max(float(np.vdot(right, right)), 1e-30))),
                "of_mean": difference(found, mean.numpy(), smallest),
                "of_weighted": difference(weighted.numpy(), right, smallest),
                "update": difference(ranks.after[key] - before[key], update, least) if is_determined else 0.0,
                "update_rounding": difference(reverse.after[key] - before[key], update, least),
                "is_reduced": key in record.local,
                "gradient": hash_bits(found),
            }
        )
    state = [v for model in record.models.values() for v in model.non_trainable_variables if not is_seed_state(v)]
    keys = {variable_key(v): v.path for v in state if variable_key(v) in before}
    return {
        "variables": variables,
        "state": {path: difference(ranks.after[key], one.after[key]) for key, path in keys.items()},
        "state_rounding": {path: difference(reverse.after[key], one.after[key]) for key, path in keys.items()},
        "compression": any(COMPRESSIONS[each.compression] != "none" for each in record.settings),
        "half": any(layer.compute_dtype in ("float16", "bfloat16") for layer in record.layers()),
        "not_distributed": record.not_distributed,
        "num_updates": record.num_updates,
        "rates": record.rates,
    }


def run_trial(
    step: Callable[..., Any], arguments: Any, variables: Mapping[Any, Any], *, is_one_process: bool = False
) -> tuple[Any, Trial]:
    args, kwargs = arguments
    with recording(is_one_process=is_one_process) as record:
        returned = step(*args, **kwargs)
    return returned, Trial(record, read_values(variables))


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


def read_values(variables: Mapping[Any, Any]) -> Values:
    return {key: np.array(variable.numpy()) for key, variable in variables.items()}


def write_values(variables: Mapping[Any, Any], values: Values) -> None:
    for key, variable in variables.items():
        variable.assign(values[key])


def compare_gradients(trial: Trial, other: Trial, known: Recording) -> float:
    return max(difference(trial.gradient(key), other.gradient(key)) for key in known.variables)


def length(value: np.ndarray) -> float:
    return float(np.nan_to_num(np.linalg.norm(np.asarray(value, np.float64)), nan=HUGE, posinf=HUGE))


def difference(value: np.ndarray, right: np.ndarray, least: float = 0.0) -> float:
    """Euclidean distance relative to ``right``'s length, which counts as ``least`` or more; HUGE if not finite."""
    value, right = np.asarray(value, np.float64), np.asarray(right, np.float64)
    if not (np.isfinite(value).all() and np.isfinite(right).all()):
        return HUGE
    distance = length(value - right)
    return distance / max(length(right), least, 1e-30) if distance else 0.0
