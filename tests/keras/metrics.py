"""Metrics of user-defined classes, whose states are merged in several ways."""

from typing import Any

import keras


class LargestError(keras.metrics.Metric):
    """Its state is a maximum."""

    def __init__(self, name: str = "largest_error", **options: Any) -> None:
        super().__init__(name=name, **options)
        self.largest = self.add_variable((), "zeros", name="largest")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        errors = keras.ops.abs(y_true - keras.ops.cast(y_pred, y_true.dtype))
        self.largest.assign(keras.ops.maximum(self.largest, keras.ops.max(errors)))

    def result(self) -> Any:
        return self.largest + 0.0


class SmallestError(LargestError):
    """Its state is a minimum, which does not begin at 0."""

    def __init__(self, name: str = "smallest_error", **options: Any) -> None:
        super().__init__(name=name, **options)
        self.reset_state()

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        errors = keras.ops.abs(y_true - keras.ops.cast(y_pred, y_true.dtype))
        self.largest.assign(keras.ops.minimum(self.largest, keras.ops.min(errors)))

    def reset_state(self) -> None:
        self.largest.assign(1e9)


class MergedLargestError(LargestError):
    """No trace shows that its state is a maximum, but it merges the states of other metrics itself."""

    def __init__(self, name: str = "merged_error", **options: Any) -> None:
        super().__init__(name=name, **options)

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        errors = keras.ops.abs(y_true - keras.ops.cast(y_pred, y_true.dtype))
        candidates = keras.ops.append(keras.ops.reshape(errors, [-1]), self.largest.value)
        self.largest.assign(keras.ops.max(candidates))

    def result(self) -> Any:
        return self.largest  # plain Keras logs its value after the validation

    def merge_state(self, metrics: list["MergedLargestError"]) -> None:
        for metric in metrics:
            self.largest.assign(keras.ops.maximum(self.largest, metric.largest))


class MeanOfOwn(keras.metrics.Mean):
    """Its class updates a mean of Keras': its state is a sum."""

    def __init__(self, name: str = "mean_of_own", **options: Any) -> None:
        super().__init__(name=name, **options)

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        super().update_state(keras.ops.abs(y_true - keras.ops.cast(y_pred, y_true.dtype)) ** 3)


class LastError(LargestError):
    """Its state is the value of the last batch, which several ranks do not have in common."""

    def __init__(self, name: str = "last_error", **options: Any) -> None:
        super().__init__(name=name, **options)

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.largest.assign(keras.ops.max(keras.ops.abs(y_true - keras.ops.cast(y_pred, y_true.dtype))))


class SumThatBeginsAtOne(LargestError):  # noqa: N818
    """A sum that begins at 1: added over ranks, the 1 would count once for each rank."""

    def __init__(self, name: str = "sum_from_one", **options: Any) -> None:
        super().__init__(name=name, **options)

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.largest.assign_add(keras.ops.sum(y_true))

    def reset_state(self) -> None:
        self.largest.assign(1.0)
