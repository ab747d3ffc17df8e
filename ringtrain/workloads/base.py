"""Interface of a workload: a class with a model, its data and its loss.

Run your own by ``python -m ringtrain --workload path/to/file.py:YourClass``.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from ringtrain.data.sources import Feed, Source

if TYPE_CHECKING:
    import keras
    import tensorflow as tf


class Sources(NamedTuple):
    """Training data (samples or a stream of them), and optional evaluation samples."""

    train: Source | Feed
    evaluation: Source | None = None


class Images(NamedTuple):
    """Images for TensorBoard: floats [n, h, w, c] in [0, 1], with 1 or 3 channels."""

    values: Any


class Histogram(NamedTuple):
    """Numbers of any shape, for a histogram in TensorBoard."""

    values: Any


class Workload(abc.ABC):
    """A model with its data, loss, metrics and default settings.

    Import TensorFlow inside the methods for fast ``--help`` and error messages; imports at the top of the file work
    too.
    """

    defaults: ClassVar[Mapping[str, Any]] = {}
    """The workload's values for the fields of ``ringtrain.config.Config``, such as
    ``{"epochs": 10, "batch_size": 32, "optimizer": {"name": "adam", "lr": 1e-3}}``. ``optimizer.lr`` belongs to
    ``batch_size``, per rank, or to ``global_batch_size`` for the same batch under any number of ranks."""

    options: ClassVar[Mapping[str, Any]] = {}
    """The workload's own settings with their defaults, such as ``{"width": 64}``. ``--options.width 32`` changes one; a
    method reads ``self.options["width"]``. A value must have the type of its default, unless that is None."""

    needs_every_rank: ClassVar[bool] = False
    """True if ``loss`` or ``metrics`` call ``ringtrain.all_gather``. Every rank then computes them in every step, also
    without samples, x and y being [0, ...]."""

    @abc.abstractmethod
    def create_model(self) -> keras.Model:
        """Return a built Keras model. Every rank builds one; rank 0's initial weights are used."""

    @abc.abstractmethod
    def create_sources(self, data_dir: Path | None, *, synthetic: bool) -> Sources:
        """Return the data, the same on every rank.

        Args:
            data_dir: ``--data_dir``; None if not given.
            synthetic: return synthetic data of the same shape, for benchmarks.

        Raises:
            DataError: data are missing or damaged; name the file, the rule and the remedy.
        """

    @abc.abstractmethod
    def loss(self, y: Any, outputs: Any) -> tf.Tensor:
        """Return the loss of each sample.

        Args:
            y: the source's y for n samples.
            outputs: the model's outputs, at least float32.

        Returns:
            [n]: its mean over the global batch, plus the model's regularisation losses, is minimised.
        """

    def metrics(self, y: Any, outputs: Any) -> dict[str, tf.Tensor]:
        """Return further values per sample, [n] each, logged as means over all samples.

        Names of ``metrics.jsonl``, such as ``step`` or ``loss``, are reserved.
        """
        return {}

    def create_metrics(self) -> dict[str, keras.metrics.Metric]:
        """Return Keras metrics with a state by name, such as ``{"auc": keras.metrics.AUC()}``.

        They get y and the model's outputs. A value in an evaluation is exactly that of all samples of all ranks, and in
        a line of the training that of the samples since the last line. Each call gives new metrics. The states of
        Keras' own classes, and sums, maxima and minima are merged over the ranks; another class of yours needs
        ``merge_state(metrics)``.
        """
        return {}

    def augment(self, x: Any, y: Any, keys: tf.Tensor) -> tuple[Any, Any]:
        """Augment a batch of training samples at random.

        Args:
            x, y: n samples.
            keys: uint64 [n], for the functions of ``ringtrain.augment``: augmentation then depends on seed, epoch and
                sample only.

        Returns:
            x and y of the same n samples, in the same structure; shapes and types of a sample may change.
        """
        return x, y

    def summaries(self, model: keras.Model, x: Any, y: Any) -> dict[str, Images | Histogram]:
        """Return images and histograms for TensorBoard by name, after each evaluation.

        Args:
            model: the model, for inference only: one rank alone calls this.
            x, y: a few evaluation samples.
        """
        return {}

    def create_optimizer(self, learning_rate: float) -> keras.optimizers.Optimizer | None:
        """Return a custom optimizer; None: by the ``optimizer`` settings.

        Args:
            learning_rate: the schedule's initial value. An optimizer with a plain number follows the schedule; a Keras
                ``LearningRateSchedule`` is kept, also in a ``MultiOptimizer``, whose first part's rate is logged.
        """
        return None


class Classifier(Workload):
    """A workload with integer labels, and logits [n, classes]."""

    def loss(self, y: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
        import keras

        return keras.losses.sparse_categorical_crossentropy(y, outputs, from_logits=True)

    def metrics(self, y: tf.Tensor, outputs: tf.Tensor) -> dict[str, tf.Tensor]:
        import keras

        return {"accuracy": keras.metrics.sparse_categorical_accuracy(y, outputs)}
