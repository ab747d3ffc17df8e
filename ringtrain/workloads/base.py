"""The interface of a workload: read this before you bring your own model.

A workload is a class with a model, its data and its loss. Derive from ``Workload``, say ``create_model``,
``create_sources`` and ``loss``, and run ``python -m ringtrain --workload path/to/file.py:YourClass``.
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
    """The data of a workload: samples to train on, or a feed of them, and perhaps samples to evaluate on."""

    train: Source | Feed
    evaluation: Source | None = None


class Images(NamedTuple):
    """Images for TensorBoard: floats [n, h, w, c] in [0, 1], with 1 or 3 channels."""

    values: Any


class Histogram(NamedTuple):
    """The distribution of numbers for TensorBoard: a tensor of any shape."""

    values: Any


class Workload(abc.ABC):
    """A model with its data, loss, metrics and default settings.

    Everything that touches TensorFlow belongs into the methods, and into the imports at their top: then ``--help`` and
    error messages come at once. In a file of your own, imports at the top of the file work as well.
    """

    defaults: ClassVar[Mapping[str, Any]] = {}
    """The workload's values for the fields of ``ringtrain.config.Config``, such as
    ``{"epochs": 10, "batch_size": 32, "optimizer": {"name": "adam", "lr": 1e-3}}``. ``batch_size``, per rank, is the
    size that ``optimizer.lr`` belongs to; where a recipe needs the same batch under any number of ranks, it is
    ``global_batch_size``."""

    options: ClassVar[Mapping[str, Any]] = {}
    """Settings of the workload's own with their default values, such as ``{"width": 64}``. The user changes one by
    ``--options.width 32``; a method reads ``self.options["width"]``. A value must be of its default's type; where the
    default is None it may be any."""

    needs_every_rank: ClassVar[bool] = False
    """True if ``loss`` or ``metrics`` call ``ringtrain.all_gather``. Every rank then computes them in every step, also
    without samples, x and y being [0, ...]."""

    @abc.abstractmethod
    def create_model(self) -> keras.Model:
        """A built Keras model. Every rank builds one; rank 0's first weights are the ones that count."""

    @abc.abstractmethod
    def create_sources(self, data_dir: Path | None, *, synthetic: bool) -> Sources:
        """The data, the same on every rank.

        Args:
            data_dir: ``--data_dir``; None if it was not given.
            synthetic: True for synthetic data of the same shape, for measuring.

        Raises:
            DataError: the data are missing or damaged; the message names the file, the rule and the remedy.
        """

    @abc.abstractmethod
    def loss(self, y: Any, outputs: Any) -> tf.Tensor:
        """The loss of each sample.

        Args:
            y: the source's y for n samples.
            outputs: what the model gave for their x, at least float32.

        Returns:
            [n]: one value per sample; its mean over the global batch is trained (regularisation losses of the model
            are added to it).
        """

    def metrics(self, y: Any, outputs: Any) -> dict[str, tf.Tensor]:
        """Further values of each sample, [n] each, logged as means over all samples. Called like ``loss``.

        A name must not be one that ``metrics.jsonl`` has already, such as ``step`` or ``loss``.
        """
        return {}

    def augment(self, x: Any, y: Any, keys: tf.Tensor) -> tuple[Any, Any]:
        """Change a batch of training samples at random.

        Args:
            x, y: n samples.
            keys: a key for each sample, uint64 [n]; give them to the functions of ``ringtrain.augment``, so that
                what a sample gets depends on the seed, the epoch and the sample alone.

        Returns:
            x and y of the same n samples, in the same structure; shapes and types of a sample may be others.
        """
        return x, y

    def summaries(self, model: keras.Model, x: Any, y: Any) -> dict[str, Images | Histogram]:
        """Images and histograms for TensorBoard after each evaluation, by name.

        Args:
            model: the model; call it for inference only, since one rank alone is here.
            x, y: a few evaluation samples.
        """
        return {}

    def create_optimizer(self, learning_rate: float) -> keras.optimizers.Optimizer | None:
        """An optimizer of your own, or None for the one of the ``optimizer`` settings.

        Args:
            learning_rate: where the schedule of the settings starts. An optimizer made with a plain number follows that
                schedule; one made with a Keras ``LearningRateSchedule`` keeps its own, and so does each part of a
                ``MultiOptimizer``, of which the log shows the first part's.
        """
        return None
