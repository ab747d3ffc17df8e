"""What a workload's methods may not give is known before the first step, and said in the words of the method."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from ringtrain.collectives.base import Solo
from ringtrain.config import Config
from ringtrain.data.indexed import from_grain, from_pydataset
from ringtrain.data.sources import Feed, Pass, from_arrays, from_generator
from ringtrain.data.tf_data import from_dataset
from ringtrain.errors import DataError, UsageError
from ringtrain.messages.log import show_log
from ringtrain.runtime.world import World
from ringtrain.training.evaluation import evaluate, evaluation_batches
from ringtrain.training.job import Job, create_job
from ringtrain.training.session import EventFiles
from ringtrain.workloads.base import Histogram, Images, Sources, Workload
from tests.world.workloads.small import NUM_CLASSES, NUM_FEATURES, Small

ALONE = World(rank=0, size=1, local_rank=0, local_size=1, node="n1", launcher="no launcher")
NUM_SAMPLES = 20
X, Y = np.zeros((NUM_SAMPLES, NUM_FEATURES), np.float32), np.zeros(NUM_SAMPLES, np.int64)


def job_of(config: Config | None = None, **methods: Callable[..., Any]) -> Job:
    """What a run of ``Small`` with some methods of its own consists of, before its first step."""
    own = {name: staticmethod(method) for name, method in methods.items()}
    return create_job(type("Mine", (Small,), own)(), config or Config(steps=1), Solo(ALONE), num_threads=1)


def sources(train: Any, evaluation: Any) -> Callable[..., Sources]:
    return lambda data_dir, synthetic: Sources(train, evaluation)


def dense(num_features: int) -> keras.Model:
    return keras.Sequential([keras.Input((num_features,)), keras.layers.Dense(NUM_CLASSES)])


ARRAYS = from_arrays(X, Y)
REFUSED: dict[str, dict[str, tuple[Callable[..., Any], str]]] = {  # by method: what it gives, and what is said
    "loss": {
        "none": (lambda y, outputs: None, "Mine gives 'loss' as None: is a return missing?"),
        "mean": (lambda y, outputs: tf.reduce_mean(outputs), r"the shape \(\).* Leave out the mean over the samples"),
        "classes": (lambda y, outputs: tf.reduce_mean(outputs, axis=0), r"the shape \(3,\).* The batch has 16 samples"),
        "object": (lambda y, outputs: keras.metrics.Mean(), "Mine gives 'loss' as a Python object of type Mean"),
        "whole numbers": (lambda y, outputs: y, r"Mine.loss gave int64 \[n\], which has no gradient"),
        "no shape": (
            lambda y, outputs: tf.numpy_function(lambda array: array, [outputs[:, 0]], tf.float32),
            r"tf.ensure_shape\(values, \[None\]\)",
        ),
    },
    "metrics": {
        "none": (lambda y, outputs: None, "Mine.metrics gave None: is a return missing?"),
        "list": (lambda y, outputs: [outputs], "must give a dict of names and values"),
        "event": (lambda y, outputs: {"event": outputs[:, 0]}, "Mine.metrics gives 'event', but metrics.jsonl"),
        "epoch": (lambda y, outputs: {"epoch": outputs[:, 0]}, "Mine.metrics gives 'epoch', but metrics.jsonl"),
        "step": (lambda y, outputs: {"step": outputs[:, 0]}, "such as 'my_step'"),
        "no value": (lambda y, outputs: {"share": None}, "Mine gives 'share' as None"),
        "text": (lambda y, outputs: {"share": tf.as_string(y)}, "Mine gives 'share' as string; it must be numbers"),
    },
    "create_sources": {
        "tuple": (lambda data_dir, synthetic: (ARRAYS, ARRAYS), "Mine.create_sources gave a tuple of 2; it must give"),
        "none": (lambda data_dir, synthetic: None, "Mine.create_sources gave None; it must give"),
        "dataset": (
            sources(tf.data.Dataset.from_tensor_slices((X, Y)), ARRAYS),
            r"as train; it must be a source.*from_dataset takes a tf.data.Dataset, from_grain",
        ),
        "arrays": (sources((X, Y), ARRAYS), r"gave a tuple of 2 as train; .*from_arrays\(x, y\)"),
        "PyDataset": (sources(keras.utils.PyDataset(), ARRAYS), "gave a keras PyDataset as train"),
        "fed evaluation": (
            sources(ARRAYS, from_generator(lambda rank, size: iter([(X, Y)]))),
            "gave a feed of batches as evaluation",
        ),
        "other y": (sources(ARRAYS, from_arrays(X, {"label": Y})), "both must be of one structure"),
        "other x": (
            sources(ARRAYS, from_arrays(X[:, :2], Y)),
            r"does not take the x of the evaluation samples, float32 \[n, 2\]: .*incompatible",
        ),
    },
    "create_model": {
        "for fewer features": (
            lambda: dense(NUM_FEATURES - 1),
            r"which takes float32 \[n, 5\], does not take the x of the training samples, float32 \[n, 6\]",
        ),
    },
    "create_optimizer": {
        "text": (lambda learning_rate: "adam", r"Mine\.create_optimizer gave a str; it must give a Keras 3 optimizer"),
    },
}


@pytest.mark.parametrize(("method", "case"), [(method, case) for method, cases in REFUSED.items() for case in cases])
def test_what_a_method_may_not_give_is_named(method: str, case: str) -> None:
    gives, message = REFUSED[method][case]
    with pytest.raises(UsageError, match=message):
        job_of(Config(steps=1, global_batch_size=16), **{method: gives})


def test_a_loss_depends_on_the_weights() -> None:
    def wrong(y: Any, outputs: Any) -> Any:
        return tf.cast(tf.argmax(outputs, axis=1) - y, tf.float32)

    with pytest.raises(UsageError, match=r"Mine.loss gives a loss on which no weight .* tf.argmax"):
        job_of(loss=wrong, create_model=lambda: dense(NUM_FEATURES))


def no_return(x: Any, y: Any, keys: Any) -> None:
    return None


def only_x(x: Any, y: Any, keys: Any) -> Any:
    return x


def no_y(x: Any, y: Any, keys: Any) -> Any:
    return x, None


def other_structure(x: Any, y: Any, keys: Any) -> Any:
    return x, {"label": y}


def one_number(x: Any, y: Any, keys: Any) -> Any:
    return x, tf.reduce_sum(y)


@pytest.mark.filterwarnings("ignore")  # TensorFlow's, of what it cannot look into
@pytest.mark.parametrize("method", [no_return, only_x, no_y, other_structure, one_number])
@pytest.mark.parametrize("is_fed", [False, True])
def test_augment_gives_the_samples_back(method: Callable[..., Any], is_fed: bool) -> None:
    methods: dict[str, Any] = {"augment": method}
    if is_fed:
        methods["create_sources"] = sources(from_generator(lambda rank, size: iter([(X, Y)]), steps_per_epoch=1), None)
    with pytest.raises(UsageError, match=rf"{method.__name__} gave .*\(x, y\) in the structure in which it got them"):
        job_of(**methods)


@pytest.mark.parametrize("steps", [-3, 0, 2.5, True])
def test_the_steps_of_a_pass_are_a_number_of_steps(steps: Any) -> None:
    with pytest.raises(DataError, match=rf"steps_per_epoch is {steps}; it must be a whole number, at least 1"):
        job_of(create_sources=sources(from_generator(lambda rank, size: iter([(X, Y)]), steps_per_epoch=steps), None))


@pytest.mark.parametrize("length", [-1, None, 2.5])
def test_a_length_that_is_no_number_is_named(length: Any) -> None:
    samples = type("Samples", (), {"__len__": lambda self: length, "__getitem__": lambda self, number: (X[0], Y[0])})()
    for source in (lambda: from_grain(samples), lambda: from_pydataset(lambda of: samples)):
        with pytest.raises(DataError, match=r"len\(\) of the Samples is no number of samples or batches: .*__len__"):
            job_of(create_sources=lambda data_dir, synthetic, source=source: Sources(source()))


@pytest.mark.parametrize("read", [lambda d: Path(f"{d}/train.npz").read_bytes(), lambda d: d / "train.npz"])
def test_a_path_from_a_missing_data_dir_is_reported_as_such(read: Callable[[Any], Any]) -> None:
    with pytest.raises(DataError, match=r"create_sources failed: .* No --data_dir was given, .* Give --data_dir DIR"):
        job_of(create_sources=lambda data_dir, synthetic: read(data_dir))


def halves(x: tf.Tensor, y: tf.Tensor, keys: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    del keys
    return x[::2], y[::2]


@pytest.mark.parametrize("train", [ARRAYS, from_generator(lambda rank, size: iter([(X, Y)]), steps_per_epoch=1)])
def test_augment_gives_as_many_samples_as_it_got(train: Any) -> None:
    job = job_of(create_sources=sources(train, None), augment=halves)

    def read_first() -> None:
        job.batches.begin()
        next(iter(job.batches))

    with pytest.raises(UsageError, match=r"^halves gave another number of samples than it got in step 1; it must"):
        read_first()


@pytest.mark.parametrize("value", [Images([["a"]]), Images(np.zeros([2, 4, 4, 7])), Histogram([["a"]])])
def test_a_summary_that_cannot_be_shown_is_named(value: Any, tmp_path: Path) -> None:
    files = EventFiles(tmp_path, first_step=0)
    with pytest.raises(UsageError, match=r"^the summary 'mine' cannot be shown: .*Give images as \[n, h, w, c\]"):
        files.show({"mine": value}, step=1)


@pytest.mark.parametrize("values", [None, [1], {"mine": 3.0}])
def test_summaries_of_another_kind_are_named(values: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="it must give a mapping of names to Images or Histogram"):
        EventFiles(tmp_path, first_step=0).show(values, step=1)


def test_a_warning_says_that_train_step_is_not_used() -> None:
    class Own(keras.Model):
        def train_step(self, data: Any) -> Any:
            return super().train_step(data)

    def create_model() -> keras.Model:
        inputs = keras.Input((NUM_FEATURES,))
        return Own(inputs, keras.layers.Dense(NUM_CLASSES)(inputs))

    said: list[str] = []
    for method in (create_model, lambda: dense(NUM_FEATURES)):
        workload = type("Mine", (Small,), {"create_model": staticmethod(method)})()
        with show_log(said.append):
            create_job(workload, Config(steps=1), Solo(ALONE), num_threads=1)
    [line] = said
    assert line.startswith("warning: Own.train_step is never called")


def test_a_generator_of_more_than_pairs_is_named() -> None:
    triples: Any = [(X, Y, Y)]
    feed = from_generator(lambda rank, size: iter(triples), steps_per_epoch=1)
    with pytest.raises(DataError, match=r"rank 0 was fed 3 values in step 1; each batch must be a pair \(x, y\)"):
        job_of(create_sources=sources(feed, None))


@pytest.mark.parametrize(
    ("x", "remedy"),
    [
        (lambda: tf.ragged.constant([[1.0], [1.0, 2.0]]), r"hold a RaggedTensor; .* array\.to_tensor\(\)"),
        (
            lambda: tf.sparse.from_dense([[0.0, 1.0], [0.0, 0.0]]),
            r"hold a SparseTensor; .* tf\.sparse\.to_dense\(array\)",
        ),
        (lambda: np.zeros([3, 2]), r"have the shapes \(3, 2\), \(2,\)"),
        (lambda: 10 * [[1.0, 2.0]], r"have the shapes 20 times \(\), \(2,\); .* np\.asarray\(the_list\)"),
    ],
)
def test_arrays_are_dense_and_of_one_length(x: Any, remedy: str) -> None:
    with pytest.raises(DataError, match=remedy):
        from_arrays(x(), np.zeros(2))


SENTENCES = [[1, 2], [3]]
PADDED = r"padded_batch\(of\.local_batch_size\).*bucket_by_sequence_length"


@pytest.mark.parametrize(
    "x",
    [
        lambda: SENTENCES,
        lambda: {"words": SENTENCES},
        lambda: [np.zeros(2), np.zeros(3)],
        lambda: np.array(SENTENCES, object),
        lambda: tf.ragged.constant(SENTENCES),
    ],
    ids=["a list", "a dict of lists", "a list of arrays", "an array of lists", "a RaggedTensor"],
)
def test_samples_of_different_lengths_in_memory_are_told_how_to_be_padded(x: Any) -> None:
    with pytest.raises(DataError, match=PADDED) as caught:
        from_arrays(x(), np.zeros(2))
    assert "\n" not in str(caught.value)
    assert "np.asarray(the_list)" not in str(caught.value)  # which fails on rows of different lengths


def test_arrays_of_different_counts_in_a_list_are_shown() -> None:
    with pytest.raises(DataError, match=r"shapes \(2, 3\), \(3, 3\), \(2,\); the first dimension counts the samples"):
        from_arrays([np.zeros([2, 3]), np.zeros([3, 3])], np.zeros(2))


def test_arrays_in_a_list_stay_a_structure_even_of_different_widths() -> None:
    source = from_arrays([np.zeros([2, 3]), np.zeros([2, 5])], np.zeros(2))
    assert source.num_samples == 2


def ragged_samples() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((tf.ragged.constant(SENTENCES), np.zeros(2, np.float32)))


def test_ragged_samples_of_a_dataset_are_told_how_to_be_padded_and_it_works() -> None:
    pattern = rf"map\(lambda x, y: \(tf\.ensure_shape\(x, \[None\]\), y\)\).*{PADDED}"
    with pytest.raises(DataError, match=pattern):
        from_dataset(ragged_samples())
    samples = ragged_samples().map(lambda x, y: (tf.ensure_shape(x, [None]), y))
    feed = from_dataset(lambda of: samples.shard(of.size, of.rank).padded_batch(of.local_batch_size))
    [(x, _)] = feed.open_pass(Pass(0, 1, 0, 0, 2, 2), 0)
    assert x.numpy().tolist() == [[1, 2], [3, 0]]


def test_ragged_batches_of_a_dataset_are_told_how_to_be_padded() -> None:
    feed = from_dataset(lambda of: ragged_samples().batch(2))
    with pytest.raises(DataError, match=rf"to_tensor\(\).*{PADDED}"):
        feed.open_pass(Pass(0, 1, 0, 0, 2, 2), 0)


def test_a_model_must_take_the_structure_of_the_pipeline() -> None:
    images = from_dataset(tf.data.Dataset.from_tensor_slices(({"image": X}, Y)))
    words = r"takes float32 \[n, 6\], does not take the x of the training samples, \{image: float32 \[n, 6\]\}"
    with pytest.raises(UsageError, match=words):
        job_of(
            create_sources=sources(images, None),
            create_model=lambda: dense(NUM_FEATURES),
            augment=lambda x, y, keys: (x, y),
        )


def test_best_metric_must_exist_even_without_evaluation() -> None:
    message = "best_metric is 'nonsense'; an evaluation of '.*' gives loss, data_loss, accuracy"
    with pytest.raises(UsageError, match=message):
        job_of(Config(steps=1, best_metric="nonsense"), create_sources=sources(ARRAYS, None))


def shifted_loss(y: Any, outputs: Any) -> Any:
    return keras.losses.sparse_categorical_crossentropy(y - NUM_CLASSES, outputs, from_logits=True)


LABELS = {
    "training": sources(from_arrays(X, np.arange(NUM_SAMPLES) // 5), None),
    "evaluation": sources(ARRAYS, from_arrays(X, np.arange(NUM_SAMPLES)[:, np.newaxis] // 5)),
}


@pytest.mark.parametrize("part", LABELS)
def test_labels_are_classes_of_the_model(part: str) -> None:
    with pytest.raises(DataError, match=f"sample 15 of the {part} data has the label 3, but the model gives 3 classes"):
        job_of(create_sources=LABELS[part])


CLASSES = np.arange(NUM_SAMPLES) % NUM_CLASSES
WRONG_KINDS: dict[str, tuple[Any, str]] = {
    "texts": (np.array(["a", "b", "c"])[CLASSES], r"are texts \(type string\), such as 'a' of sample 0.*np\.unique"),
    "bytes": (np.array([b"a", b"b", b"c"])[CLASSES], r"are texts \(type string\), such as 'a' of sample 0.*np\.unique"),
    "objects": (np.array(["a", "b", "c"], object)[CLASSES], r"are texts \(type string\), such as 'a' of sample 0"),
    "bytes of no text": (np.array([b"\xff", b"b", b"c"])[CLASSES], r"are texts \(type string\)"),
    "complex": (CLASSES.astype("complex64"), r"are complex numbers \(type complex64\), such as '0j' of sample 0"),
    "fractions": (np.where(CLASSES == 1, 0.5, CLASSES), "sample 1 of .* label 0.5, which is no whole number"),
    "half fractions": (np.where(CLASSES == 1, 0.5, CLASSES).astype("float16"), "sample 1 of .* no whole number"),
    "NaN": (np.where(CLASSES == 1, np.nan, CLASSES), "sample 1 of the .* data has the label nan"),
    "infinite": (np.where(CLASSES == 1, np.inf, CLASSES), "sample 1 of the .* data has the label inf"),
    "one-hot": (np.eye(NUM_CLASSES, dtype="float32")[CLASSES], r"these are one-hot. Use .*argmax"),
    "one-hot integers": (np.eye(NUM_CLASSES, dtype="int64")[CLASSES], r"these are one-hot. Use .*argmax"),
}


def feed_of(y: Any) -> Feed:
    return from_dataset(tf.data.Dataset.from_tensor_slices((X, y)))


@pytest.mark.parametrize("part", ["training", "evaluation", "stream"])
@pytest.mark.parametrize("kind", WRONG_KINDS)
def test_labels_of_another_kind_are_named(part: str, kind: str) -> None:
    y, message = WRONG_KINDS[kind]

    wrong: Any = feed_of(y) if part == "stream" else from_arrays(X, y)
    given = sources(ARRAYS, wrong) if part == "evaluation" else sources(wrong, None)

    def check() -> None:
        job = job_of(create_sources=given)
        [labels] = job.step.labels  # a stream is checked as it is read
        labels.check(tf.convert_to_tensor(y), np.arange(NUM_SAMPLES), of="training")

    with pytest.raises(DataError, match=message):
        check()


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int8", "uint64", "float16", "float32", "float64"])
def test_whole_numbers_of_every_type_are_labels(dtype: str) -> None:
    y = np.minimum(CLASSES, 1).astype(dtype)
    job = job_of(create_sources=sources(from_arrays(X, y), from_arrays(X, y[:, np.newaxis])))
    assert job.step.labels


def categorical_loss(y: Any, outputs: Any) -> Any:
    return keras.losses.categorical_crossentropy(y, outputs, from_logits=True)


def sparse_loss_of_tensorflow(y: Any, outputs: Any) -> Any:
    return tf.nn.sparse_softmax_cross_entropy_with_logits(y, outputs)


def squared_loss(y: Any, outputs: Any) -> Any:
    return keras.losses.mean_squared_error(y, outputs)


@pytest.mark.parametrize(
    ("loss", "y", "message"),
    [
        (categorical_loss, CLASSES, r"takes one-hot labels, and these are numbers.*to_categorical"),
        (categorical_loss, WRONG_KINDS["texts"][0], "these are texts"),
        (categorical_loss, WRONG_KINDS["complex"][0], "these are complex"),
        (sparse_loss_of_tensorflow, WRONG_KINDS["one-hot"][0], "these are one-hot"),
        (sparse_loss_of_tensorflow, WRONG_KINDS["texts"][0], "these are texts"),
        (squared_loss, WRONG_KINDS["texts"][0], "these are texts"),
    ],
)
def test_targets_that_a_loss_does_not_take_are_named(loss: Any, y: Any, message: str) -> None:
    with pytest.raises(DataError, match=rf"Mine\.loss does not take the y of the samples, .*: .*{message}"):
        job_of(create_sources=sources(from_arrays(X, y), None), loss=loss)


def test_errors_of_a_loss_itself_are_left() -> None:
    def loss(y: Any, outputs: Any) -> Any:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        job_of(create_sources=sources(from_arrays(X, WRONG_KINDS["texts"][0]), None), loss=loss)


def test_labels_that_the_loss_changes_are_left_to_it() -> None:
    job = job_of(create_sources=sources(from_arrays(X, Y + NUM_CLASSES), None), loss=shifted_loss)
    assert not job.step.labels


def test_labels_changed_by_augment_are_checked_afterwards() -> None:
    job = job_of(create_sources=sources(from_arrays(X, Y + NUM_CLASSES), None), augment=lambda x, y, keys: (x, y - 3))
    assert job.labels_to_check == job.step.labels != ()


def test_labels_in_memory_are_checked_once() -> None:
    plain = Workload.augment.__get__(object())
    assert job_of(create_sources=sources(from_arrays(X, Y), None), augment=plain).labels_to_check == ()


def test_labels_not_in_memory_are_checked_in_each_batch() -> None:
    job = job_of()
    [labels] = job.step.labels
    labels.check(np.array([0, 2]), np.array([7, 3]), of="training")
    labels.check(np.array([]), np.array([]), of="training")
    with pytest.raises(DataError, match="sample 3 of the training data has the label -1"):
        labels.check(np.array([0, -1]), np.array([7, 3]), of="training")


def test_evaluation_labels_are_checked_in_each_batch() -> None:
    job = job_of(create_sources=sources(ARRAYS, ARRAYS))
    assert job.evaluation is not None
    wrong = from_arrays(X, np.arange(NUM_SAMPLES) // 5)
    batches = evaluation_batches(wrong, ALONE, global_batch_size=4, num_threads=1)
    with pytest.raises(DataError, match="sample 15 of the evaluation data has the label 3"):
        evaluate(job.evaluation.step, batches, Solo(ALONE))


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (
            np.array(["2026-11-24"], "datetime64[D]"),
            r"the types datetime64\[D\], int64, and TensorFlow cannot take them",
        ),
        (np.array([None], object), "the types object, int64, and TensorFlow cannot take them"),
        ([0.5] * 500, r"500 times \(\), \(1,\); the first dimension .*np.asarray"),
    ],
    ids=["dates", "objects", "list"],
)
def test_arrays_that_are_no_tensors_are_refused(x: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        from_arrays(x, np.zeros(1, np.int64))


@pytest.mark.parametrize("package", ["horovod.tensorflow.keras", "ringtrain.keras"])
def test_a_distributed_optimizer_is_refused_on_one_process_too(package: str) -> None:
    def create_optimizer(learning_rate: float) -> Any:
        return importlib.import_module(package).DistributedOptimizer(keras.optimizers.Adam(learning_rate))

    with pytest.raises(UsageError, match=r"Mine.create_optimizer gave a DistributedOptimizer, .* give the plain"):
        job_of(create_optimizer=create_optimizer)
