"""Fused updates of Keras' most used optimizers, and optimizers for large batches, and moving averages of weights.

Keras' updates pass over memory several times: slow for layers larger than a cache.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from ringtrain.runtime.private import decays_weight, index_of_weight, momentums_of, velocities_of, weights_of_optimizer


class FusedUpdate:
    """One operation per dense weight; the learning rate is read once, and not for each weight."""

    has_operation = True

    def _backend_update_step(self: Any, gradients: Any, variables: Any, learning_rate: Any) -> None:
        if tf.distribute.has_strategy():
            super()._backend_update_step(gradients, variables, learning_rate)  # type: ignore[misc]
            return
        rate, step = tf.convert_to_tensor(learning_rate), tf.convert_to_tensor(self.iterations) + 1
        for gradient, given in zip(gradients, variables, strict=True):
            variable = given.value if isinstance(given, keras.Variable) else given
            if isinstance(gradient, tf.IndexedSlices) or not self.has_operation:
                self.update_step(gradient, variable, rate)
            else:
                self.update(variable, *(tf.cast(value, variable.dtype) for value in (gradient, rate, step)))

    @abc.abstractmethod
    def update(self: Any, variable: tf.Variable, gradient: tf.Tensor, rate: tf.Tensor, step: tf.Tensor) -> None:
        """Update a weight in ``step``, from 1; all are of one dtype."""


class FusedSGDUpdate(FusedUpdate):
    def update(self: Any, variable: tf.Variable, gradient: tf.Tensor, rate: tf.Tensor, step: tf.Tensor) -> None:
        if not self.momentum:
            tf.raw_ops.ResourceApplyGradientDescent(var=variable.handle, alpha=rate, delta=gradient)
            return
        tf.raw_ops.ResourceApplyKerasMomentum(
            var=variable.handle,
            accum=self.momentums[index_of_weight(self, variable)].value.handle,
            lr=rate,
            grad=gradient,
            momentum=tf.cast(self.momentum, variable.dtype),
            use_nesterov=self.nesterov,
        )


class FusedAdamUpdate(FusedUpdate):
    """Update of Adam and AdamW, whose weight decay is separate."""

    @property
    def has_operation(self: Any) -> bool:  # type: ignore[override]
        return not self.amsgrad

    def update(self: Any, variable: tf.Variable, gradient: tf.Tensor, rate: tf.Tensor, step: tf.Tensor) -> None:
        dtype, index = variable.dtype, index_of_weight(self, variable)
        tf.raw_ops.ResourceApplyAdam(
            var=variable.handle,
            m=momentums_of(self)[index].value.handle,
            v=velocities_of(self)[index].value.handle,
            beta1_power=tf.cast(self.beta_1, dtype) ** step,
            beta2_power=tf.cast(self.beta_2, dtype) ** step,
            lr=rate,
            beta1=tf.constant(self.beta_1, dtype),  # tf.cast would convert a Python number to float32 first
            beta2=tf.constant(self.beta_2, dtype),
            epsilon=tf.constant(self.epsilon, dtype),
            grad=gradient,
        )


class FusedRMSpropUpdate(FusedUpdate):
    """RMSprop with momentum, not centered: the operation needs a momentum slot."""

    @property
    def has_operation(self: Any) -> bool:  # type: ignore[override]
        return self.momentum and not self.centered

    def update(self: Any, variable: tf.Variable, gradient: tf.Tensor, rate: tf.Tensor, step: tf.Tensor) -> None:
        dtype, index = variable.dtype, index_of_weight(self, variable)
        tf.raw_ops.ResourceApplyRMSProp(
            var=variable.handle,
            ms=velocities_of(self)[index].value.handle,
            mom=momentums_of(self)[index].value.handle,
            lr=rate,
            rho=tf.constant(self.rho, dtype),
            momentum=tf.constant(self.momentum, dtype),
            epsilon=tf.constant(self.epsilon, dtype),
            grad=gradient,
        )


class LayerwiseUpdate:
    """``sum_over_ranks`` completes norms of sharded weights."""

    sum_over_ranks: Callable[[tf.Tensor], tf.Tensor] = staticmethod(lambda vector: vector)

    @abc.abstractmethod
    def direction(self: Any, gradient: tf.Tensor, variable: tf.Variable) -> tf.Tensor:
        """Unscaled change of a weight."""

    @abc.abstractmethod
    def ratio(self: Any, variable: tf.Variable, weight_norm: tf.Tensor, norm: tf.Tensor) -> tf.Tensor:
        """Factor of a weight's rate; ``norm``: of its direction."""

    def change(self: Any, variable: tf.Variable, direction: tf.Tensor, rate: tf.Tensor) -> None:
        variable.assign_sub(rate * direction)

    def _backend_update_step(self: Any, gradients: Any, variables: Any, learning_rate: Any) -> None:
        values = [v.value if isinstance(v, keras.Variable) else v for v in variables]
        dense = [tf.cast(tf.convert_to_tensor(g), v.dtype) for g, v in zip(gradients, values, strict=True)]
        directions = [self.direction(g, v) for g, v in zip(dense, values, strict=True)]
        # Of all weights: ranks have different pieces.
        dtype = tf.float64 if any(v.dtype == "float64" for v in weights_of_optimizer(self)) else tf.float32
        mine = [
            [tf.cast(2 * tf.nn.l2_loss(tf.cast(each, dtype)), dtype) for each in (v.read_value(), direction)]
            for v, direction in zip(values, directions, strict=True)
        ]
        places = [index_of_weight(self, v) for v in values]
        count = len(weights_of_optimizer(self))
        squares = tf.scatter_nd([[place] for place in places], tf.stack(mine), [count, 2])
        norms = tf.sqrt(tf.reshape(self.sum_over_ranks(tf.reshape(squares, [-1])), [count, 2]))
        for place, variable, direction in zip(places, values, directions, strict=True):
            ratio = self.ratio(variable, norms[place, 0], norms[place, 1])
            rate = tf.cast(ratio, variable.dtype) * tf.cast(learning_rate, variable.dtype)
            self.change(variable, direction, rate)


class LayerwiseLamb(LayerwiseUpdate, keras.optimizers.Lamb):
    """LAMB (You et al. 2020)."""

    def direction(self, gradient: tf.Tensor, variable: tf.Variable) -> tf.Tensor:
        dtype, index = variable.dtype, index_of_weight(self, variable)
        step = tf.cast(self.iterations + 1, dtype)
        powers = tf.cast(self.beta_1, dtype) ** step, tf.cast(self.beta_2, dtype) ** step
        mean, square = momentums_of(self)[index].value, velocities_of(self)[index].value
        mean.assign_add((gradient - mean) * tf.constant(1 - self.beta_1, dtype))
        square.assign_add((tf.square(gradient) - square) * tf.constant(1 - self.beta_2, dtype))
        return (mean / (1 - powers[0])) / (tf.sqrt(square / (1 - powers[1])) + tf.constant(self.epsilon, dtype))

    def ratio(self, variable: tf.Variable, weight_norm: tf.Tensor, norm: tf.Tensor) -> tf.Tensor:
        return tf.where((weight_norm > 0) & (norm > 0), tf.math.divide_no_nan(weight_norm, norm), 1.0)


class LARS(LayerwiseUpdate, keras.optimizers.Optimizer):
    """Layer-wise adaptive rate scaling (You, Gitman, Ginsburg 2017, algorithm 1), as in MLPerf's ResNet reference.

    With weight w, gradient g, decay d, momentum m, learning rate r and trust coefficient e: v becomes
    m v + r e |w| / (|g| + d |w|) (g + d w), and w decreases by v. Weights excluded from decay (biases, norms) use r
    alone.
    """

    def __init__(
        self,
        learning_rate: Any = 0.1,
        momentum: float = 0.0,
        trust_coefficient: float = 0.001,
        weight_decay: float | None = None,
        name: str = "lars",
        **options: Any,
    ) -> None:
        super().__init__(learning_rate=learning_rate, name=name, **options)
        self.momentum, self.trust_coefficient, self.decay = momentum, trust_coefficient, weight_decay or 0.0

    def build(self, variables: Any) -> None:
        if not self.built:
            super().build(variables)
            self.momentums = self.add_optimizer_variables(variables, "momentum")

    def direction(self, gradient: tf.Tensor, variable: tf.Variable) -> tf.Tensor:
        return gradient

    def ratio(self, variable: tf.Variable, weight_norm: tf.Tensor, norm: tf.Tensor) -> tf.Tensor:
        if not decays_weight(self, variable):
            return tf.ones([], norm.dtype)
        scale = tf.math.divide_no_nan(self.trust_coefficient * weight_norm, norm + self.decay * weight_norm)
        return tf.where((weight_norm > 0) & (norm > 0), scale, 1.0)

    def change(self, variable: tf.Variable, direction: tf.Tensor, rate: tf.Tensor) -> None:
        momentum = self.momentums[index_of_weight(self, variable)].value
        if decays_weight(self, variable):
            direction += self.decay * variable
        momentum.assign(self.momentum * momentum + rate * direction)
        variable.assign_sub(momentum)

    def get_config(self) -> dict[str, Any]:
        own = {"momentum": self.momentum, "trust_coefficient": self.trust_coefficient, "weight_decay": self.decay}
        return {**super().get_config(), **own}


# TensorFlow has no operation for the other formulas.
FUSED_UPDATES: dict[type, type] = {
    keras.optimizers.SGD: FusedSGDUpdate,
    keras.optimizers.Adam: FusedAdamUpdate,
    keras.optimizers.AdamW: FusedAdamUpdate,
    keras.optimizers.RMSprop: FusedRMSpropUpdate,
}
OWN: dict[str, Any] = {
    plain.__name__.lower(): type(f"Fused{plain.__name__}", (update, plain), {"__module__": __name__})
    for plain, update in FUSED_UPDATES.items()
} | {"lamb": LayerwiseLamb, "lars": LARS}


def only_reads_gradients(optimizer: keras.optimizers.Optimizer) -> bool:
    """False if an optimizer variable may alias a gradient."""
    return type(optimizer) in OWN.values()


class WeightAverages:
    """Moving average of each trainable variable; none if ``decay`` is 0."""

    def __init__(self, weights: Sequence[keras.Variable], *, decay: float) -> None:
        self._decay = decay
        self._weights = list(weights) if decay else []
        self.variables = [
            keras.Variable(tf.convert_to_tensor(v.value), trainable=False, dtype=v.dtype, name="average")
            for v in self._weights
        ]

    @property
    def pairs(self) -> list[tuple[keras.Variable, keras.Variable]]:
        return list(zip(self._weights, self.variables, strict=True))

    def update(self, num_updates: tf.Tensor) -> None:
        """Use decay min(decay, (1 + t) / (10 + t)), as TensorFlow's ``ExponentialMovingAverage``."""
        for weight, average in self.pairs:
            updates = tf.cast(num_updates, average.dtype)
            decay = tf.minimum(tf.cast(self._decay, average.dtype), (1 + updates) / (10 + updates))
            average.assign(average.value - (1 - decay) * (average.value - weight.value))
