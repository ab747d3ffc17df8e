"""Reduction of the gradients of an optimizer or a tape, with the arguments of Horovod's interface."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from ringtrain.collectives.differentiable import prevent_constant_folding, unique_name
from ringtrain.collectives.gradients import (
    Compression,
    GradientReduction,
    gradient_spec,
    merge_repeated_rows,
    scaled,
)
from ringtrain.errors import UsageError
from ringtrain.keras.collective import ProcessSetCollective, all_ranks, is_elastic, log, require_init
from ringtrain.keras.step_sums import Gradients, StepSums, Sum, Votes, outermost_graph, zeros_like_gradient
from ringtrain.run.variables import require_gradients_that_add
from ringtrain.step.train_step import python_operations
from ringtrain.training.creation import describe_python

COMPRESSIONS: dict[Any, Compression] = {hvd.Compression.none: "none", hvd.Compression.fp16: "fp16"}


@dataclass(frozen=True, kw_only=True)
class Settings:
    name: str
    device_dense: str = ""
    device_sparse: str = ""
    compression: Any = hvd.Compression.none
    sparse_as_dense: bool = False
    op: Any = hvd.Average
    gradient_predivide_factor: float = 1.0
    num_groups: int = 0
    groups: int | Sequence[Sequence[Any]] | None = None
    process_set: Any = hvd.global_process_set
    scale_local_gradients: bool = True

    @classmethod
    def among(cls, arguments: Mapping[str, Any]) -> Settings:
        return cls(**{field.name: arguments[field.name] for field in fields(cls) if field.name in arguments})

    def __post_init__(self) -> None:
        require_init(self.name)
        if self.num_groups:
            warnings.warn("num_groups has been replaced by groups", DeprecationWarning, stacklevel=5)
            if self.groups is None:
                object.__setattr__(self, "groups", self.num_groups)
        if self.op not in (hvd.Average, hvd.Sum, hvd.Adasum):
            raise UsageError(f"op={self.op!r} must be hvd.Average, hvd.Sum or hvd.Adasum.")
        if self.gradient_predivide_factor <= 0 or (self.gradient_predivide_factor != 1 and self.op != hvd.Average):
            raise UsageError(
                f"gradient_predivide_factor={self.gradient_predivide_factor} must be positive, and splits the division "
                "of op=hvd.Average; other operations divide by nothing. Leave it out, or use op=hvd.Average."
            )
        if self.op == hvd.Adasum:
            size = hvd.size()
            if self.process_set != hvd.global_process_set or size & (size - 1) or not hvd.mpi_enabled():
                raise UsageError(
                    f"op=hvd.Adasum adds among all ranks, whose number must be a power of two, over MPI; this run has "
                    f"{size} ranks{'' if hvd.mpi_enabled() else ' over Gloo'}. Use op=hvd.Average."
                )
        is_number = type(self.groups) is int and self.groups > 0
        if not (self.groups is None or isinstance(self.groups, (list, tuple)) or is_number):
            raise UsageError(
                f"groups={self.groups!r} must be a whole number of groups, at least 1, a list of lists of variables, "
                "or None to let ringtrain group them."
            )
        if self.compression not in COMPRESSIONS:
            raise UsageError(
                f"compression={self.compression!r} is not known. Pass hvd.Compression.none or hvd.Compression.fp16."
            )

    @property
    def why_horovod(self) -> str:
        if self.op == hvd.Adasum:
            return "the optimizer has op=hvd.Adasum"
        if self.process_set != hvd.global_process_set:
            return "the optimizer has a process_set"
        if self.groups is not None or self.compression != hvd.Compression.none:
            return "the optimizer has groups, or compresses"
        return "the optimizer has its own device" if self.device_dense or self.device_sparse else ""


class Exchange:
    _fit: ClassVar[StepSums | None] = None
    spans_world: ClassVar[bool] = True  # true of all instances
    _local_somewhere: ClassVar[set[Hashable]] = set()
    votes: ClassVar[Votes | None] = None

    def __init__(self, settings: Settings, accumulation: Accumulation | None = None) -> None:
        Exchange.spans_world &= settings.process_set == hvd.global_process_set
        self.settings, self.accumulation = settings, accumulation
        self._local: set[Hashable] = set()
        self._last: Gradients = []
        # All ranks are in a fit with equal numbers of steps, so that a rank that ends early can join.
        self.may_sum_natively = False
        self._step = StepSums()  # of fits of this optimizer's model
        self._traced_natively: bool | None = None

    def register_local(self, variable: Any) -> None:
        self._local.add(variable_key(variable))
        self._local_somewhere.add(variable_key(variable))

    @classmethod
    def is_local_somewhere(cls, variable: Any) -> bool:
        return variable_key(variable) in cls._local_somewhere

    def is_local(self, variable: Any) -> bool:
        return variable_key(variable) in self._local

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> Gradients:
        """Accumulation returns local sums until its last pass. Gradients given to ``remember`` are skipped."""
        gradients = list(gradients)
        if self._last and list(map(id, gradients)) == list(map(id, self._last)):
            return gradients
        present = [index for index, gradient in enumerate(gradients) if gradient is not None]
        given = [gradients[index] for index in present]
        if self.settings.sparse_as_dense:
            given = [tf.convert_to_tensor(gradient) for gradient in given]
        chosen = [variables[index] for index in present]
        if self.accumulation is None:
            reduced = self._reduce_now(given, chosen)
        else:
            reduced = self.accumulation.reduce(given, chosen, lambda sums: self._reduce_now(sums, chosen))
        for index, gradient in zip(present, reduced, strict=True):
            gradients[index] = gradient
        return gradients

    def remember(self, gradients: Gradients) -> None:
        self._last = gradients

    def _reduce_now(self, gradients: Gradients, variables: Sequence[Any]) -> Gradients:
        """Return the gradients over all ranks; sparse ones have each row once, on one rank too.

        Optimizers that square a gradient, and clipping, would give other values for repeated rows.
        """
        settings = self.settings
        # Elastic: the number of ranks when the step runs, not when it is traced.
        size = settings.process_set.size()
        if is_elastic():
            size = tf.cast(hvd.size_op(settings.process_set.process_set_id), tf.float64)
        is_reduced = (is_elastic() or size > 1) and settings.process_set.included()
        shared = [index for index, variable in enumerate(variables) if not self.is_local(variable)]
        local = sorted(set(range(len(variables))) - set(shared))
        reduced = list(gradients)
        for index in local if is_reduced else range(len(variables)):
            reduced[index] = merge_repeated_rows(gradients[index])
        if settings.scale_local_gradients:
            for index in local:
                reduced[index] = scaled(reduced[index], 1 / size)
        if shared and is_reduced:
            require_gradients_that_add([variables[index] for index in shared])
            part = settings.gradient_predivide_factor
            before, after = (1 / part, part / size) if settings.op == hvd.Average else (1.0, 1.0)
            sums = self._sum(
                [scaled(gradients[index], before) for index in shared],
                [variables[index] for index in shared],
                scale=after,
            )
            for index, total in zip(shared, sums, strict=True):
                reduced[index] = total
        return reduced

    def _sum(self, gradients: Gradients, variables: Sequence[Any], *, scale: float | tf.Tensor) -> Gradients:
        graph, fit = outermost_graph(), Exchange._fit
        if graph is not None:
            self._traced_natively = self.may_sum_natively
            inner = tf.compat.v1.get_default_graph()
            if hvd.rank() == 0 and (why := describe_python(lambda: python_operations(inner))):
                log.warning("warning: %s", why)
        is_of_all = self.settings.process_set == hvd.global_process_set and self.settings.op != hvd.Adasum
        votes = Exchange.votes if is_of_all else None
        given = [*gradients, *([] if votes is None else [votes.mine(gradients)]), tf.ones([], gradients[0].dtype)]
        reduction = self._reduction(given, variables, natively=self.may_sum_natively and graph is not None)
        of_variables = zip(given, [*(variable.shape for variable in variables), None, None], strict=False)
        nothing = [zeros_like_gradient(tensor, shape) for tensor, shape in of_variables]
        one = Sum(reduction, nothing, len(gradients), scale, reduction.can_use_single_all_reduce(given))
        if fit is not None:
            # A tensor of the graph would keep it alive; a joined rank reads no scale.
            fit.add(
                replace(one, scale=1.0) if graph is not None and not one.is_native else one,
                graph,
                is_owner=fit is self._step,
            )
        may_travel_alone = fit is not None and graph is not None and not one.is_native
        if may_travel_alone:
            given[-1] = prevent_constant_folding(given[-1])
        sums = one.act(given)
        if votes is not None:
            votes.note(sums[len(gradients)])
        if may_travel_alone:
            # Joined ranks take part in the last message. TensorFlow would prune it if separate and unused.
            tf.debugging.assert_positive(sums[-1])
        totals = sums[: len(gradients)]
        return totals if one.is_native else [scaled(total, scale) for total in totals]

    def begin_batch(self) -> None:
        self._step.is_new = True

    def join(self, *, had_batch: bool) -> None:
        """Contribute zeros to the other ranks' sums until all ranks have joined.

        Horovod's join fails from its second call on (seen with 0.28.1): a rank may leave it while others wait.

        Raises:
            UsageError: this rank had no batch, and does not know the others' sums.
        """
        sums, is_of_graph = self._step.read(), self._step.is_of_graph
        if not had_batch and not sums:
            raise UsageError(
                f"rank {hvd.rank()} had no batch in this epoch, of which all ranks were to have as many. Give each "
                "as many, such as by shards of one size and batch(..., drop_remainder=True).",
                reach="rank",
            )
        # Horovod sees names in graphs only. The zeros come from outside: TensorFlow would fold the sum of constants.
        joining = [(one.traced if is_of_graph else one.act, one.nothing) for one in sums]
        is_anyone_training = bool(joining)
        while is_anyone_training:
            for act, nothing in joining:
                is_anyone_training = bool(act([make() for make in nothing])[-1])
                if not is_anyone_training:
                    break

    @property
    def knows_sums(self) -> bool:
        """True if this rank has computed or traced a step, whose sums it can join with zeros."""
        return bool(self._step.read())

    @property
    def sums_natively(self) -> bool:
        return any(one.is_native for one in self._step.read())

    def begin_fit(self, *, may_sum_natively: bool) -> bool:
        """Return True if the traced step contradicts ``may_sum_natively``."""
        Exchange._fit, self.may_sum_natively = self._step, may_sum_natively
        return self._traced_natively is not None and self._traced_natively != may_sum_natively

    def end_fit(self) -> None:
        """Forbid native sums in later traces, of custom loops: their length may differ between ranks."""
        Exchange._fit, self.may_sum_natively = None, False

    def _reduction(self, gradients: Gradients, variables: Sequence[Any], *, natively: bool) -> GradientReduction:
        settings = self.settings
        is_adasum = settings.op == hvd.Adasum
        if is_adasum and any(isinstance(gradient, tf.IndexedSlices) for gradient in gradients):
            raise UsageError("op=hvd.Adasum cannot add sparse gradients. Pass sparse_as_dense=True.")
        of_horovod = ProcessSetCollective(
            process_set=settings.process_set,
            op=hvd.Adasum if is_adasum else hvd.Sum,
            device_dense=settings.device_dense,
            device_sparse=settings.device_sparse,
        )
        return GradientReduction(
            collective=all_ranks() if natively and not settings.why_horovod else of_horovod,
            compression=COMPRESSIONS[settings.compression],
            name=unique_name(settings.name),
            # Adasum needs each gradient as a whole.
            groups=[[index] for index in range(len(gradients))] if is_adasum else self._groups(gradients, variables),
        )

    def _groups(self, gradients: Gradients, variables: Sequence[Any]) -> list[list[int]] | None:
        wanted = self.settings.groups
        if wanted is None:
            return None
        everything = range(len(variables))
        if isinstance(wanted, int):
            length = -(-len(variables) // wanted)
            groups = [list(everything[start : start + length]) for start in everything[::length]]
        else:
            position = {variable_key(variable): index for index, variable in enumerate(variables)}
            groups = [[position.pop(key) for key in map(variable_key, group) if key in position] for group in wanted]
            groups += [[index] for index in position.values()]
        groups += [[index] for index in range(len(variables), len(gradients))]  # votes and count
        return [part for group in groups for part in _split_by_type(group, gradients)]


class Accumulation:
    def __init__(self, passes: int, *, averages: bool) -> None:
        self.passes, self.averages = passes, averages
        with tf.init_scope():  # passes since the last reduction; equal on all ranks
            self.counter = tf.Variable(0, trainable=False, dtype=tf.int32)
        self._sums: dict[Hashable, tf.Variable] = {}

    def clear(self) -> None:
        self.counter.assign(0)
        for total in self._sums.values():
            total.assign(tf.zeros_like(total))

    def is_complete(self) -> tf.Tensor:
        """True if the last pass was reduced, bool []."""
        return tf.equal(self.counter, 0)

    def reduce(
        self, gradients: Gradients, variables: Sequence[Any], reduce_now: Callable[[Gradients], Gradients]
    ) -> Gradients:
        buffers = [self._buffer(gradient, variable) for gradient, variable in zip(gradients, variables, strict=True)]
        sums = [tf.identity(buffer.assign_add(g)) for buffer, g in zip(buffers, gradients, strict=True)]
        count = self.counter.assign_add(1)

        def complete() -> Gradients:
            factor = 1 / self.passes if self.averages else 1.0
            reduced = [scaled(gradient, factor) for gradient in reduce_now(sums)]
            self.clear()
            return [tf.identity(gradient) for gradient in reduced]

        return list(tf.cond(tf.equal(count, self.passes), complete, lambda: [tf.identity(total) for total in sums]))

    def _buffer(self, gradient: Any, variable: Any) -> tf.Variable:
        if isinstance(gradient, tf.IndexedSlices):
            raise UsageError(
                f"the gradient of {variable.name!r} is sparse, and backward_passes_per_step={self.passes} adds "
                "gradients up in full. Pass sparse_as_dense=True."
            )
        key = variable_key(variable)
        if key not in self._sums:
            with tf.init_scope():
                self._sums[key] = tf.Variable(tf.zeros(variable.shape, gradient.dtype), trainable=False)
        return self._sums[key]


def variable_key(variable: Any) -> Hashable:
    """Return the same key for a Keras variable and its TensorFlow variable."""
    return (variable.value if isinstance(variable, keras.Variable) else variable).ref()


def find_local_variables(local_layers: Any) -> list[Any]:
    layers = [local_layers] if isinstance(local_layers, keras.layers.Layer) else list(local_layers or ())
    for layer in layers:
        if not isinstance(layer, keras.layers.Layer):
            raise UsageError(
                f"local_layers holds {layer!r}, which is no Keras layer. Pass a layer or a list of layers, such as "
                "model.layers[:1]."
            )
    return [variable for layer in layers for variable in layer.trainable_weights]


def _split_by_type(group: list[int], gradients: Gradients) -> list[list[int]]:
    by_type: dict[Hashable, list[int]] = {}
    for index in group:
        spec = gradient_spec(gradients[index])
        by_type.setdefault((index if spec.is_sparse else None, spec.dtype), []).append(index)
    return list(by_type.values())
