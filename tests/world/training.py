"""Small models and their training, by ringtrain's step and, as the reference, by a plain Keras loop in one process."""

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ringtrain.collectives import Collective, all_gather_object
from ringtrain.collectives.gradients import GradientReduction
from ringtrain.config import Config, OptimizerConfig
from ringtrain.data.order import SampleOrder
from ringtrain.data.pipeline import Batch, local_batches
from ringtrain.data.sources import ArraySource, from_arrays
from ringtrain.step.optimizers import LARS, LayerwiseLamb, only_reads_gradients
from ringtrain.step.report import StepReport, shortest
from ringtrain.step.train_step import TrainStep, set_precision
from ringtrain.workloads.base import Sources, Workload

NUM_FEATURES = 5
NUM_CLASSES = 3
NUM_WORDS = 40
KERNEL_DECAY, BIAS_DECAY = 2**-5, 2**-6  # Keras from 3.14 on rounds such a factor to a float32, also in float64

Create = Callable[[], Any]


class Classification(Workload):
    """Any model of ``NUM_CLASSES`` logits, on samples whose labels are whole numbers."""

    def __init__(self, create: Create) -> None:
        self._create = create

    def create_model(self) -> keras.Model:
        return self._create()

    def create_sources(self, data_dir: Any, *, synthetic: bool) -> Sources:
        return Sources(dense_samples(50), None)

    def loss(self, y: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
        return keras.losses.sparse_categorical_crossentropy(y, outputs, from_logits=True)

    def metrics(self, y: tf.Tensor, outputs: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"accuracy": keras.metrics.sparse_categorical_accuracy(y, outputs)}


def dense_samples(count: int, dtype: str = "float64") -> ArraySource:
    generator = np.random.default_rng(1)
    x = generator.normal(size=(count, NUM_FEATURES)).astype(dtype)
    return from_arrays(x, generator.integers(0, NUM_CLASSES, count))


def word_samples(count: int) -> ArraySource:
    """Sentences of four words, a word often twice in one."""
    generator = np.random.default_rng(2)
    words = np.minimum(generator.geometric(0.15, (count, 4)), NUM_WORDS - 1)
    return from_arrays(words, generator.integers(0, NUM_CLASSES, count))


def regularised_model() -> keras.Model:
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((NUM_FEATURES,)),
            layers.Dense(6, activation="tanh", kernel_regularizer=keras.regularizers.L2(KERNEL_DECAY)),
            layers.Dense(NUM_CLASSES, bias_regularizer=keras.regularizers.L2(BIAS_DECAY)),
        ]
    )


def embedding_model() -> keras.Model:
    layers = keras.layers
    return keras.Sequential(
        [keras.Input((4,), dtype="int64"), layers.Embedding(NUM_WORDS, 3), layers.Flatten(), layers.Dense(NUM_CLASSES)]
    )


def twin_embeddings_model() -> keras.Model:
    """Two embeddings of one shape: a rank without samples has the same zeros for both."""
    layers = keras.layers
    words = keras.Input((4,), dtype="int64")
    left, right = layers.Embedding(NUM_WORDS, 2)(words), layers.Embedding(NUM_WORDS, 2)(words)
    return keras.Model(words, layers.Dense(NUM_CLASSES)(layers.Flatten()(layers.Multiply()([left, right]))))


def batchnorm_model() -> keras.Model:
    layers = keras.layers
    return keras.Sequential(
        [keras.Input((NUM_FEATURES,)), layers.BatchNormalization(momentum=0.75), layers.Dense(NUM_CLASSES)]
    )


MODELS: dict[str, tuple[Create, Callable[[int], ArraySource]]] = {
    "regularised": (regularised_model, dense_samples),
    "embedding": (embedding_model, word_samples),
    "twin embeddings": (twin_embeddings_model, word_samples),
}
OPTIMIZERS: dict[str, Create] = {
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "clipped": lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.05),
    "each clipped": lambda: keras.optimizers.Adam(0.1, clipnorm=0.02),
    "values clipped": lambda: keras.optimizers.Adam(0.1, clipvalue=0.01),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.01, momentum=0.9, centered=True),
    "nadam": lambda: keras.optimizers.Nadam(0.01),
    "lion": lambda: keras.optimizers.Lion(0.01),
    "lamb": lambda: LayerwiseLamb(0.01, weight_decay=0.1),
    "lars": lambda: without_biases(LARS(5.0, weight_decay=0.01)),
    "averaging": lambda: keras.optimizers.Adam(0.01, use_ema=True, ema_overwrite_frequency=3),
    "adding up": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2),
}
if hasattr(keras.optimizers, "MultiOptimizer"):  # from Keras 3.15 on
    OPTIMIZERS["muon"] = lambda: keras.optimizers.Muon(0.01)
    OPTIMIZERS["multi"] = lambda: multi_optimizer(keras.optimizers)


def without_biases(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """The optimizer, without weight decay of biases."""
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


def multi_optimizer(optimizers: Any) -> keras.optimizers.Optimizer:
    """Adam for the biases, SGD for all else, each with a learning rate of its own."""
    of_biases = {".*/bias": optimizers.Adam(0.01)}
    return optimizers.MultiOptimizer(optimizers.OptimizerMap(optimizers.SGD(0.1, momentum=0.9), of_biases))


def learning_rate_of(step: int) -> float:
    return 0.2 / (step + 2)


def create_step(
    collective: Collective,
    create: Create,
    create_optimizer: Create,
    spec: Batch,
    *,
    workload: Workload | None = None,
    precision: str = "float64",
    accumulate: int = 1,
    ema: float = 0.0,
    seed: int = 0,
    local_batch_size: int | None = None,
    shard_optimizer: bool = False,
    jit_compile: bool = False,
) -> TrainStep:
    """A training step on a model with the first values of rank 0."""
    set_precision(precision)  # type: ignore[arg-type]
    keras.utils.set_random_seed(100 + collective.world.rank)
    optimizer = create_optimizer()
    step = TrainStep(
        workload=workload or Classification(create),
        config=Config(
            precision=precision,  # type: ignore[arg-type]
            accumulate=accumulate,
            seed=seed,
            shard_optimizer=shard_optimizer,
            optimizer=OptimizerConfig(ema=ema),
        ),
        model=create(),
        optimizer=optimizer,
        reduction=GradientReduction(collective=collective, read_only=only_reads_gradients(optimizer)),
        batch_spec=spec,
        local_batch_size=local_batch_size,
        jit_compile=jit_compile,
    )
    step.share_values(collective)
    return step


def batches_of(source: ArraySource, collective: Collective, *, global_batch_size: int, steps: int) -> tf.data.Dataset:
    """This rank's batches of a shuffled order."""
    order = order_of(source, global_batch_size)
    return local_batches(source, order, collective.world, first_step=0, end_step=steps, num_threads=1)


def order_of(source: ArraySource, global_batch_size: int) -> SampleOrder:
    return SampleOrder(num_samples=source.num_samples, global_batch_size=global_batch_size, seed=3)


def train(step: TrainStep, batches: tf.data.Dataset) -> list[StepReport]:
    return [step.read(step(batch, learning_rate_of(number))) for number, batch in enumerate(batches)]


def train_plainly(
    model: keras.Model,
    optimizer: keras.optimizers.Optimizer,
    source: ArraySource,
    *,
    global_batch_size: int,
    steps: int,
) -> Iterator[tuple[float, float, float]]:
    """Train on whole global batches with Keras alone, yielding each step's loss, accuracy and gradient norm."""
    order = order_of(source, global_batch_size)
    optimizer.build(model.trainable_variables)
    for number in range(steps):
        indices = order.local_batch(number, rank=0, size=1).indices
        x, y = source.x.numpy()[indices], source.y.numpy()[indices]
        with tf.GradientTape() as tape:
            outputs = model(x, training=True)
            losses = keras.losses.sparse_categorical_crossentropy(y, outputs, from_logits=True)
            objective = tf.add_n([tf.reduce_mean(losses), *model.losses])
        # Dense: Keras squares a sparse gradient row by row, which is wrong where a row comes twice.
        sparse_or_dense = tape.gradient(objective, [variable.value for variable in model.trainable_variables])
        gradients = [tf.convert_to_tensor(gradient) for gradient in sparse_or_dense]
        if not hasattr(optimizer, "optimizers"):
            optimizer.learning_rate = learning_rate_of(number)
        optimizer.apply(gradients, model.trainable_variables)
        accuracy = np.mean(np.argmax(outputs, axis=-1) == y)
        yield float(objective), float(accuracy), float(tf.linalg.global_norm(gradients))


def make_batch(x: np.ndarray, y: np.ndarray, *, step: int, global_count: int) -> Batch:
    """A rank's batch of given samples."""
    number, count = tf.constant(step, tf.int64), tf.constant(global_count, tf.int64)
    return Batch(tf.constant(x), tf.constant(y), tf.range(len(x), dtype=tf.int64), number, count)


def spec_of(batch: Batch) -> Batch:
    """What any number of samples like these looks like."""

    def spec(tensor: tf.Tensor) -> tf.TensorSpec:
        return tf.TensorSpec([None, *tensor.shape[1:]] if tensor.shape.rank else [], tensor.dtype)

    return tf.nest.map_structure(spec, batch)


def check_trains_as_plainly(
    step: TrainStep,
    batches: tf.data.Dataset,
    create: Create,
    create_optimizer: Create,
    source: ArraySource,
    collective: Collective,
    *,
    global_batch_size: int,
    steps: int,
) -> tuple[list[StepReport], keras.optimizers.Optimizer]:
    """Train; check that all ranks hold the same bits, and that a plain loop on rank 0 trains the same.

    Returns:
        The step's reports, and the optimizer of the plain loop, which has taken its steps on rank 0 only.
    """
    optimizer = create_optimizer()
    if collective.world.is_rank0:  # the others need no reference, and creating it takes time
        reference = create()
        reference.set_weights(step.model.get_weights())
    reports = train(step, batches)
    assert len(reports) == steps
    assert_same_bits_on_all_ranks(step.variables, collective)
    seen = [[report.loss, report.metrics["accuracy"], shortest(report.gradient_norm)] for report in reports]
    others = all_gather_object(collective, seen, name="reports")
    assert all(other == seen for other in others), "the ranks' reports differ"
    if collective.world.is_rank0:
        plain = train_plainly(reference, optimizer, source, global_batch_size=global_batch_size, steps=steps)
        expected = zip(*plain, strict=True)
        for mine, right, what in zip(
            zip(*seen, strict=True), expected, ("loss", "accuracy", "gradient norm"), strict=True
        ):
            assert_close(mine, right, what)
        for variable, right in zip(step.model.variables, reference.variables, strict=True):
            assert_close(variable.numpy(), right.numpy(), variable.path)
    return reports, optimizer


def bits_of(variables: Any) -> list[str]:
    """Variables as digests of their bits."""
    return [hashlib.sha256(np.asarray(variable.numpy()).tobytes()).hexdigest() for variable in variables]


def assert_same_bits_on_all_ranks(variables: Any, collective: Collective) -> None:
    mine = bits_of(variables)
    for rank, other in enumerate(all_gather_object(collective, mine, name="bits")):
        differing = [variables[i].path for i, (a, b) in enumerate(zip(mine, other, strict=True)) if a != b]
        assert not differing, f"rank {collective.world.rank} and rank {rank} differ in {differing}"


def assert_close(actual: Any, expected: Any, what: str, tolerance: float = 1e-12) -> None:
    """Equal up to ``tolerance`` of the largest value."""
    expected = np.asarray(expected)
    largest = float(np.max(np.abs(expected), initial=0.0)) or 1.0
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * largest, err_msg=what)
