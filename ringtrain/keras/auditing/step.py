"""Compare an audited step with that of one process, which every rank computes with the samples of all."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from ringtrain.collectives import Collective, all_gather_object
from ringtrain.guard.preflight import draws
from ringtrain.guard.replicas import hash_bits
from ringtrain.keras.auditing.finite import (
    NotFinite,
    Origin,
    describe_nonfinite_samples,
    find_nonfinite,
    name_nonfinite,
)
from ringtrain.keras.auditing.recording import Recording, recording, replaced
from ringtrain.keras.exchange import COMPRESSIONS, variable_key
from ringtrain.messages.ranks import name_ranks
from ringtrain.run.variables import is_seed_state
from ringtrain.runtime.private import call_parameters_of

Values = Mapping[Any, np.ndarray]  # by key of variable
LARGE_BYTES = 64 * 2**20  # of samples, whose number is shown before they are gathered
MIN_SHARE = 1e-4  # of the largest gradient; smaller ones are compared as parts of it
UNDETERMINED = 1e-2  # of a gradient, if rounding changes so much
RANDOM = 1e-3  # of a gradient, if it changes so much when the step is repeated
HUGE = 1e30  # NaN and infinity


class NotAuditedError(Exception):
    """Reason why a step cannot be compared, the same on all ranks."""


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

    def why_not_finite(self) -> str:
        """Return which of its samples are NaN or infinite, in words; empty if none."""
        return describe_nonfinite_samples(self._arguments)

    def kinds(self) -> list[str]:
        return [f"{tensor.dtype.name} {list(tensor.shape[1:])}" for tensor in self.samples]

    def num_bytes(self) -> int:
        return sum(tensor.dtype.size * int(np.prod(tensor.shape)) for tensor in self.samples)

    def hashes(self) -> list[str]:
        """Return one per sample."""
        columns = [np.asarray(tensor) for tensor in self.samples]
        rows = (b"".join(column[number].tobytes() for column in columns) for number in range(self.count))
        return [hashlib.blake2b(row, digest_size=8).hexdigest() for row in rows]

    def arguments_with(self, samples: Sequence[tf.Tensor]) -> Any:
        leaves = list(self._leaves)
        for index, tensor in zip(self._indices, samples, strict=True):
            leaves[index] = tensor
        return tf.nest.pack_sequence_as(self._arguments, leaves)


class Trial(NamedTuple):
    """A step that was run."""

    record: Recording
    before: Values
    after: Values  # empty if only gradients are compared
    returned: Any

    def gradient(self, key: Any) -> np.ndarray:
        """Applied; zeros if none was."""
        given = self.record.applied.get(key)
        return np.zeros_like(self.before[key]) if given is None else np.asarray(tf.convert_to_tensor(given))

    def raw_gradient(self, key: Any) -> np.ndarray:
        """Return the gradient that a tape computed, without the loss scale; zeros if no tape did."""
        raw = self.record.raw.get(key)
        if raw is None:
            return np.zeros_like(self.before[key])
        return np.asarray(raw, np.float64) / self.record.loss_scale

    def update(self, key: Any) -> np.ndarray:
        return self.after[key] - self.before[key]

    def loss(self) -> float | None:
        """Logged by ``fit`` for this step, or returned by it as a number; None if neither."""
        models = [each for each in self.record.called.values() if isinstance(each, keras.Model)]
        metrics = [each for model in models for each in model.metrics if each.name == "loss"]
        for metric in (each for each in metrics if isinstance(each, keras.metrics.Mean)):
            total, count = variable_key(metric.total), variable_key(metric.count)
            if total in self.before and self.update(count):
                return float(self.update(total) / self.update(count))
        is_number = isinstance(self.returned, tf.Tensor) and self.returned.dtype.is_floating
        return float(self.returned) if is_number and not self.returned.ndim else None


def agree(collective: Collective, known: Recording, batch: Batch, max_bytes: int, why_not: str = "") -> None:
    """Raise NotAuditedError on all ranks if one's batch cannot be compared. Collective."""
    why_not = why_not or known.why_not_audited() or batch.why_not_audited()
    mine = [why_not, known.passes * batch.num_bytes(), batch.kinds()]
    reasons, sizes, kinds = zip(*all_gather_object(collective, mine, name="audit/batches"), strict=True)
    if reason := next(filter(None, reasons), ""):
        raise NotAuditedError(reason)
    if len(set(map(str, kinds))) > 1:
        raise NotAuditedError(f"the ranks' inputs differ in type or shape ({kinds[0]}, {kinds[-1]})")
    if sum(sizes) > max_bytes:
        raise NotAuditedError(f"the samples of all ranks take {sum(sizes):,} bytes, more than max_mebibytes allows")
    if sum(sizes) > LARGE_BYTES and collective.world.is_rank0:
        print(f"audit: each rank gathers {sum(sizes) / 2**20:,.0f} MiB, and computes with it", flush=True)


def compare(
    collective: Collective,
    step: Callable[..., Any],
    batches: Sequence[Batch],
    known: Recording,
    real: Trial,
    first_samples: str = "",
) -> list[dict[str, Any]]:
    """Return facts of all ranks for ``find_causes``; none if no rank updated weights. Collective.

    Args:
        step: called with the arguments of each of the batches, after the last of which gradients are reduced.
        known: a recording of earlier calls.
        real: the calls as the script made them.
        first_samples: which samples of earlier calls were not finite, in words.

    Raises:
        NotAuditedError: on all ranks.
    """
    variables = known.all_variables()
    more = [variable.name for key, variable in real.record.all_variables().items() if key not in real.before]
    mine = [
        f"it changes variables that its first call did not ({more[0]})" if more else "",
        real.record.num_updates,
        nonfinite_in_step(batches, known, real, first_samples),
    ]
    reasons, updates, nonfinite = zip(*all_gather_object(collective, mine, name="audit/updates"), strict=True)
    if reason := next(filter(None, reasons), ""):
        raise NotAuditedError(reason)
    require_finite(nonfinite, is_updated=max(updates) > 0)
    if not max(updates):
        return []
    try:
        facts = all_gather_object(
            collective, find_facts(collective, step, batches, known, real, variables), name="audit/facts"
        )
    finally:
        write_values(variables, real.after)
    if names := facts[0]["nonfinite_in_one"]:
        raise NotAuditedError(
            f"the gradient of {names} is not finite (NaN or infinite) in one process with the samples of all ranks, "
            "and finite on each rank: the model or the loss overflows or divides by zero for the whole batch"
        )
    if (changed := max(its["repeated"] for its in facts)) > RANDOM:
        raise NotAuditedError(
            f"the same step gives other gradients (by {changed:.0e}) when one process repeats it: it draws random "
            "numbers outside of Keras' seed generators or in a layer without a training argument, it depends on "
            "Python values that its calls change, such as a counter, or an operation is not deterministic "
            "(tf.config.experimental.enable_op_determinism)"
        )
    return facts


def nonfinite_in_step(batches: Sequence[Batch], known: Recording, real: Trial, first_samples: str) -> NotFinite | None:
    """Return the first cause of values of this rank's step that are not finite; None if all are finite."""
    trained = {key: real.before[key] for key in known.variables}
    slots = {variable_key(v) for optimizer in known.optimizers for v in optimizer.variables}
    of_optimizers = {key: value for key, value in real.before.items() if key in slots}
    own_gradients = {**real.record.raw, **real.record.local}
    reduced = {key: real.record.applied[key] for key in known.variables if key in real.record.applied}
    return find_nonfinite(
        samples=[batch.why_not_finite() for batch in batches],
        first_samples=first_samples,
        weights=name_nonfinite({**trained, **of_optimizers}, known.all_variables()),
        gradients=name_nonfinite(own_gradients, known.variables),
        reduced=name_nonfinite(reduced, known.variables),
        scale=real.record.loss_scale,
    )


def require_finite(nonfinite_of_ranks: Sequence[Any], *, is_updated: bool) -> None:
    """Raise NotAuditedError if values on a rank are not finite; it names the rank where they come up first.

    ``is_updated``: an optimizer updated weights. Without, a dynamic loss scale has skipped the step.
    """
    found = [(*of_rank, rank) for rank, of_rank in enumerate(nonfinite_of_ranks) if of_rank]
    if not found:
        return
    origin, words, rank = min(found, key=lambda each: each[0])
    if is_updated or origin < Origin.GRADIENTS:
        raise NotAuditedError(f"on {name_ranks([rank])} {words}")


def find_facts(
    collective: Collective,
    step: Callable[..., Any],
    batches: Sequence[Batch],
    known: Recording,
    real: Trial,
    variables: Mapping[Any, Any],
) -> dict[str, Any]:
    """Return this rank's facts. Collective; leaves other values in the variables."""
    whole = [
        [collective.all_gather(tensor, name=f"audit/samples/{i}/{j}") for j, tensor in enumerate(batch.samples)]
        for i, batch in enumerate(batches)
    ]

    def run(
        change: Callable[[tf.Tensor], tf.Tensor] | None, *, others: Values | None = None, off: Sequence[Any] = ()
    ) -> Trial:
        """Run with changed samples of all ranks (None: this rank's), and layers ``off`` as in inference.

        ``others``: values at the begin that differ from the script's; then only gradients are kept.
        """
        start = {**real.before, **(others or {})}
        write_values(variables, start)
        record, without = Recording(), _call_without(off)
        with recording(record, is_one_process=change is not None), replaced(keras.layers.Layer, "__call__", without):
            for batch, samples in zip(batches, whole, strict=True):
                args, kwargs = batch.arguments_with([change(each) for each in samples] if change else batch.samples)
                returned = step(*args, **kwargs)
        return Trial(record, start, read_values(variables) if others is None else {}, returned)

    drawing = [layer for layer in known.layers() if draws(layer) and has_training(layer)]
    seeds = {key: real.before[key] + 1 for key, variable in variables.items() if "seed_generator" in variable.name}
    ranks = run(None, off=drawing) if drawing else real
    one, again = run(tf.identity, off=drawing), run(tf.identity, others=seeds, off=drawing)
    count = sum(batch.count for batch in batches)
    facts = describe(collective, ranks, one, run(lambda samples: samples[::-1], off=drawing), known, count)
    norms = [layer for layer in known.layers() if is_local_norm(layer)]
    if norms:
        statistics = [v for layer in norms for v in layer.non_trainable_variables]
        of_rank0 = collective.broadcast([tf.convert_to_tensor(v.value) for v in statistics], name="audit/statistics")
        same = {variable_key(v): np.asarray(value) for v, value in zip(statistics, of_rank0, strict=True)}
        frozen, right = (run(change, others=same, off=[*drawing, *norms]) for change in (None, tf.identity))
        facts["without_norms"] = compare_gradients(frozen, right, known)
    return facts | {
        "repeated": compare_gradients(again, one, known),
        "nonfinite_in_one": name_nonfinite({key: one.gradient(key) for key in known.variables}, known.variables),
        "count": count,
        "samples": [sample for batch in batches for sample in batch.hashes()],
        "drawing": [layer.name for layer in drawing],
        "norms": [layer.name for layer in norms],
        "begin": [hash_bits(real.before[key]) for key in known.variables],
    }


def describe(
    collective: Collective, ranks: Trial, one: Trial, reverse: Trial, known: Recording, count: int
) -> dict[str, Any]:
    """Return this rank's facts about gradients, updates, state and loss. Collective."""
    record = ranks.record
    means, weighted_means = mean_over_ranks(collective, record.local, ranks, known, count)
    _, raw_means = mean_over_ranks(collective, record.raw, ranks, known, count)
    smallest = MIN_SHARE * max(length(one.gradient(key)) for key in known.variables)
    variables = []
    for key, variable in known.variables.items():
        found = ranks.gradient(key)
        right = one.gradient(key)
        reversed_ = reverse.gradient(key)
        of_weights = MIN_SHARE * length(ranks.before[key])
        is_determined = difference(reversed_, right) < UNDETERMINED
        update = difference(ranks.update(key), one.update(key), of_weights)
        variables.append(
            {
                "name": getattr(variable, "path", variable.name),
                "gradient": difference(found, right, smallest),
                "gradient_rounding": difference(reversed_, right, smallest),
                "factor": ratio(found, right),
                "of_mean": difference(found, means[key], smallest),
                "of_weighted": difference(weighted_means[key], right, smallest),
                "of_raw": difference(raw_means[key], one.raw_gradient(key), smallest),
                "update": update if is_determined else 0.0,
                "update_rounding": difference(reverse.update(key), one.update(key), of_weights),
                "is_reduced": key in record.local,
                "bits": hash_bits(found),
            }
        )
    state = [v for layer in record.called.values() for v in layer.non_trainable_variables if not is_seed_state(v)]
    keys = {variable_key(v): v.path for v in state if variable_key(v) in ranks.before}
    settings = [exchange.settings for exchange in record.exchanges]
    return {
        "variables": variables,
        "state": [
            {
                "name": path,
                "state": difference(ranks.after[key], one.after[key]),
                "state_rounding": difference(reverse.after[key], one.after[key]),
            }
            for key, path in keys.items()
        ],
        "losses": [ranks.loss(), one.loss()],
        "local_norm": norm_of(record.local.values()),
        "right_norm": norm_of(one.record.local.values()),
        "compression": any(COMPRESSIONS[each.compression] != "none" for each in settings),
        "half": any(layer.compute_dtype in ("float16", "bfloat16") for layer in record.layers()),
        "not_distributed": record.not_distributed,
        "num_updates": record.num_updates,
        "rates": record.rates,
    }


def mean_over_ranks(
    collective: Collective, local: Values, trial: Trial, known: Recording, count: int
) -> tuple[Values, Values]:
    """Return the means of the ranks' gradients, and those weighted by samples. Collective.

    Args:
        local: this rank's gradients, times the loss scale; zeros are taken for others.
        count: this rank's samples.
    """
    gradients = {}
    for key in known.variables:
        if key in local:
            gradients[key] = np.asarray(local[key], np.float64) / trial.record.loss_scale
        else:
            gradients[key] = np.zeros(trial.before[key].shape)
    weighted = [gradient * count for gradient in gradients.values()]
    message = [*gradients.values(), *weighted, np.float64(count)]
    sums = collective.all_reduce(list(map(tf.constant, message)), name="audit/gradients")
    *totals, samples = [total.numpy() for total in sums]
    means = [total / collective.world.size for total in totals[: len(gradients)]]
    weighted_means = [total / samples for total in totals[len(gradients) :]]
    return (
        dict(zip(gradients, means, strict=True)),
        dict(zip(gradients, weighted_means, strict=True)),
    )


def ratio(value: np.ndarray, right: np.ndarray) -> float:
    """Return the factor of ``right`` that is nearest to ``value``; 0 if there is none."""
    factor = np.vdot(value, right) / max(float(np.vdot(right, right)), 1e-30)
    return float(np.nan_to_num(factor))


def norm_of(tensors: Iterable[Any]) -> float:
    """Return the Euclidean length of all tensors together."""
    return float(np.hypot.reduce([0.0, *(length(np.asarray(tensor)) for tensor in tensors)]))


def _call_without(layers: Sequence[keras.layers.Layer]) -> Callable[..., Any]:
    chosen = set(map(id, layers))

    def call(plain: Callable[..., Any], layer: keras.layers.Layer, *args: Any, **kwargs: Any) -> Any:
        is_off = id(layer) in chosen and has_training(layer)
        return plain(layer, *args, **(kwargs | {"training": False} if is_off else kwargs))

    return call


def has_training(layer: keras.layers.Layer) -> bool:
    return "training" in call_parameters_of(layer)


def is_local_norm(layer: keras.layers.Layer) -> bool:
    return (
        isinstance(layer, keras.layers.BatchNormalization)
        and layer.trainable
        and not hasattr(layer, "needs_every_rank")
    )


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
    """Euclidean distance relative to ``right``'s length, which counts as ``least`` or more; HUGE if not finite.

    Infinite values that are equal, such as those of a mask, count as zeros.
    """
    value, right = np.asarray(value, np.float64), np.asarray(right, np.float64)
    are_equal = np.isinf(value) & (value == right)
    value, right = np.where(are_equal, 0.0, value), np.where(are_equal, 0.0, right)
    if not (np.isfinite(value).all() and np.isfinite(right).all()):
        return HUGE
    distance = length(value - right)
    return distance / max(length(right), least, 1e-30) if distance else 0.0
