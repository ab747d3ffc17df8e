"""What an optimizer's, or a tape's, gradients go through between this rank and the others.

``Exchange`` is built on ``ringtrain.collectives.gradients``, which the training step uses as well. What is added here
are the arguments of Horovod's interface: which variables stay local, factors, groups, and passes that are added up
first.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from ringtrain.collectives.differentiable import unique_name
from ringtrain.collectives.gradients import Compression, GradientReduction, gradient_spec, scaled
from ringtrain.errors import UsageError
from ringtrain.keras.collective import ProcessSetCollective, all_ranks, require_init
from ringtrain.keras.votes import Votes
from ringtrain.run.variables import require_gradients_that_add

Gradients = list[Any]  # tf.Tensor, tf.IndexedSlices or None, one for each variable
# Horovod's in the words of ``ringtrain.collectives.gradients``.
COMPRESSIONS: dict[Any, Compression] = {hvd.Compression.none: "none", hvd.Compression.fp16: "fp16"}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Arguments that ``DistributedOptimizer`` and ``DistributedGradientTape`` have in common."""

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
        """Those of a function's arguments that are fields here."""
        return cls(**{field.name: arguments[field.name] for field in fields(cls) if field.name in arguments})

    def __post_init__(self) -> None:
        require_init(self.name)
        if self.num_groups:
            warnings.warn("num_groups has been replaced by groups", DeprecationWarning, stacklevel=5)
            if self.groups is None:
                object.__setattr__(self, "groups", self.num_groups)
        self._check_op()
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

    def _check_op(self) -> None:
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


class Exchange:
    """Reduces the gradients of one optimizer or tape."""

    spans_world: ClassVar[bool] = True  # all that were made
    _local_somewhere: ClassVar[set[Hashable]] = set()
    votes: ClassVar[Votes | None] = None  # what each step of a fit with callbacks.Run sums as well

    def __init__(self, settings: Settings, accumulation: Accumulation | None = None) -> None:
        Exchange.spans_world &= settings.process_set == hvd.global_process_set
        self.settings, self.accumulation = settings, accumulation
        self._local: set[Hashable] = set()
        self._last: Gradients = []
        # Where all ranks are in a fit, about to take as many steps: there a rank that ends early can join.
        self.may_sum_natively, self._has_traced = False, False
        # The last native sum that was set up, and its tensors.
        self._native_sum: tuple[GradientReduction, list[tf.TensorSpec]] | None = None

    def register_local(self, variable: Any) -> None:
        """Keep the gradients of a variable on this rank."""
        self._local.add(variable_key(variable))
        self._local_somewhere.add(variable_key(variable))

    @classmethod
    def is_local_somewhere(cls, variable: Any) -> bool:
        """Whether any optimizer or tape keeps a variable's gradients on this rank."""
        return variable_key(variable) in cls._local_somewhere

    def is_local(self, variable: Any) -> bool:
        return variable_key(variable) in self._local

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> Gradients:
        """The gradients over all ranks; with accumulation, on the passes before the last, what this rank added up.

        Gradients that this exchange gave out last are given back as they are.
        """
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
        """Gradients that need no reduction when they come back."""
        self._last = gradients

    def _reduce_now(self, gradients: Gradients, variables: Sequence[Any]) -> Gradients:
        settings = self.settings
        size = settings.process_set.size()
        shared = [index for index, variable in enumerate(variables) if not self.is_local(variable)]
        reduced = list(gradients)
        if settings.scale_local_gradients:
            for index in set(range(len(variables))) - set(shared):
                reduced[index] = scaled(gradients[index], 1 / size)
        if shared and size > 1 and settings.process_set.included():
            require_gradients_that_add([variables[index] for index in shared])
            part = settings.gradient_predivide_factor
            before, after = (1 / part, part / size) if settings.op == hvd.Average else (1.0, 1.0)
            sums = self._sum(
                [scaled(gradients[index], before) for index in shared], [variables[index] for index in shared]
            )
            for index, total in zip(shared, sums, strict=True):
                reduced[index] = scaled(total, after)
        return reduced

    def _sum(self, gradients: Gradients, variables: Sequence[Any]) -> Gradients:
        self._has_traced = True
        is_of_all = self.settings.process_set == hvd.global_process_set and self.settings.op != hvd.Adasum
        votes = Exchange.votes if is_of_all else None
        given = gradients if votes is None else [*gradients, votes.mine()]
        reduction = self._reduction(given, variables)
        and_one = [*given, tf.ones([])]  # of a rank that trains: see ``join``
        if reduction.may_sum_at_once(and_one):
            shapes = [*(variable.shape for variable in variables), *(t.shape for t in and_one[len(variables) :])]
            self._native_sum = reduction, [tf.TensorSpec(s, t.dtype) for s, t in zip(shapes, and_one, strict=True)]
            sums = reduction.sum_at_once(and_one)[:-1]
        else:
            sums = reduction.all_reduce(given)
        if votes is not None:
            votes.note(sums[-1])
        return sums[: len(gradients)]

    def join(self) -> None:
        """Add nothing to the other ranks' native sums until all have come here; as Horovod's join does to its own.

        Raises:
            UsageError: this rank had no batch at all, and does not know what the others sum.
        """
        if self._native_sum is None and self.may_sum_natively and not self._has_traced:
            raise UsageError(
                "this rank had no batch in an epoch of which all ranks were to have the same number. Give every rank "
                "as many, such as by shards of one size and batch(..., drop_remainder=True)."
            )
        if self._native_sum is None:
            return
        reduction, specs = self._native_sum
        nothing = [tf.zeros(spec.shape, spec.dtype) for spec in specs]
        while float(reduction.sum_at_once(nothing)[-1]):
            pass

    def _reduction(self, gradients: Gradients, variables: Sequence[Any]) -> GradientReduction:
        settings = self.settings
        is_adasum = settings.op == hvd.Adasum
        if is_adasum and any(isinstance(gradient, tf.IndexedSlices) for gradient in gradients):
            raise UsageError("op=hvd.Adasum cannot add sparse gradients. Pass sparse_as_dense=True.")
        is_horovods = is_adasum or settings.process_set != hvd.global_process_set or not self.may_sum_natively
        of_horovod = ProcessSetCollective(
            process_set=settings.process_set,
            op=hvd.Adasum if is_adasum else hvd.Sum,
            device_dense=settings.device_dense,
            device_sparse=settings.device_sparse,
        )
        return GradientReduction(
            collective=of_horovod if is_horovods or settings.device_dense or settings.device_sparse else all_ranks(),
            compression=COMPRESSIONS[settings.compression],
            name=unique_name(settings.name),
            # Adasum looks at each gradient as a whole, so each travels alone.
            groups=[[index] for index in range(len(gradients))] if is_adasum else self._groups(gradients, variables),
        )

    def _groups(self, gradients: Gradients, variables: Sequence[Any]) -> list[list[int]] | None:
        """The user's groups as positions; each split where types differ, since a group is of one type."""
        wanted = self.settings.groups
        if wanted is None:
            return None
        everything = range(len(gradients))
        if isinstance(wanted, int):
            length = -(-len(gradients) // wanted)
            groups = [list(everything[start : start + length]) for start in everything[::length]]
        else:
            position = {variable_key(variable): index for index, variable in enumerate(variables)}
            groups = [[position.pop(key) for key in map(variable_key, group) if key in position] for group in wanted]
            groups += [[index] for index in [*position.values(), *everything[len(variables) :]]]
        return [part for group in groups for part in _split_by_type(group, gradients)]


class Accumulation:
    """Adds up the gradients of several backward passes on this rank, so that they travel once."""

    def __init__(self, passes: int, *, averages: bool) -> None:
        """Begin with nothing; ``averages`` says whether to divide the sum of ``passes`` by their number."""
        self.passes, self.averages = passes, averages
        with tf.init_scope():  # passes added up since the last reduction; the same on every rank
            self.counter = tf.Variable(0, trainable=False, dtype=tf.int32)
        self._sums: dict[Hashable, tf.Variable] = {}

    def is_complete(self) -> tf.Tensor:
        """bool []: whether the last gradients given out are reduced ones."""
        return tf.equal(self.counter, 0)

    def reduce(
        self, gradients: Gradients, variables: Sequence[Any], reduce_now: Callable[[Gradients], Gradients]
    ) -> Gradients:
        """Add gradients, and on the last pass reduce the sums and begin anew."""
        buffers = [self._buffer(gradient, variable) for gradient, variable in zip(gradients, variables, strict=True)]
        sums = [tf.identity(buffer.assign_add(g)) for buffer, g in zip(buffers, gradients, strict=True)]
        count = self.counter.assign_add(1)

        def complete() -> Gradients:
            factor = 1 / self.passes if self.averages else 1.0
            reduced = [scaled(gradient, factor) for gradient in reduce_now(sums)]
            for buffer in buffers:
                buffer.assign(tf.zeros_like(buffer))
            self.counter.assign(0)
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
    """The same for a Keras variable and the TensorFlow variable in it."""
    return (variable.value if isinstance(variable, keras.Variable) else variable).ref()


def find_local_variables(local_layers: Any) -> list[Any]:
    """The trainable variables of the layers that are to stay local."""
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
