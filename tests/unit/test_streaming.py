"""What a rank is fed: each array as it was when it was given, and refused where it is not like the first."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf

from ringtrain.collectives.base import Solo
from ringtrain.data import indexed
from ringtrain.data.indexed import BATCHES_IN_THREADS, IndexedSource, from_grain
from ringtrain.data.order import StreamingOrder
from ringtrain.data.sources import Feed, from_generator
from ringtrain.data.streaming import streaming_batches
from ringtrain.data.tf_data import Current, from_dataset, without_tuner
from ringtrain.errors import DataError
from ringtrain.messages.log import show_log
from ringtrain.runtime.world import World

STEPS, SAMPLES = 6, 4
WORLD = World(rank=0, size=1, local_rank=0, local_size=1, node="node", launcher="no launcher")


def read(feed: Feed) -> tuple[Iterator[Any], Callable[[Exception, int], Exception]]:
    """All batches of a feed, and what explains an error of theirs."""
    order = StreamingOrder(num_samples=STEPS * SAMPLES, global_batch_size=SAMPLES, is_single_pass=True)
    dataset, explain, _ = streaming_batches(feed, order, Solo(WORLD), first_step=0, end_step=STEPS, num_threads=1)
    return iter(dataset), explain


def aligned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Zeros where TensorFlow takes an array's memory as it is, without a copy."""
    num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.zeros(num_bytes + 64, np.uint8)
    begin = -memory.ctypes.data % 64
    return memory[begin : begin + num_bytes].view(dtype).reshape(shape)


def test_batches_in_reused_memory_are_copied() -> None:
    def generate(rank: int, size: int) -> Iterator[Any]:
        x, y = aligned((SAMPLES, 100), np.float32), aligned((SAMPLES,), np.int64)
        for step in range(STEPS):
            x[:], y[:] = step, step
            yield {"x": x}, y

    batches, _ = read(from_generator(generate))
    for step, batch in enumerate(batches):
        assert (batch.x["x"] == step).numpy().all()
        assert (batch.y == step).numpy().all()
    assert step == STEPS - 1


@pytest.mark.parametrize("cores", [{0}, {0, 1}])
def test_autotuning_is_off_on_one_core_unless_requested(cores: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: cores)
    plain, options = tf.data.Dataset.range(3), tf.data.Options()
    assert without_tuner(plain).options().autotune.enabled is (None if len(cores) > 1 else False)
    options.autotune.enabled = True
    assert without_tuner(plain.with_options(options)).options().autotune.enabled is True
    assert without_tuner([1, 2]) == [1, 2]
    files = plain.interleave(tf.data.Dataset.range, cycle_length=2, num_parallel_calls=tf.data.AUTOTUNE).batch(2)
    assert without_tuner(files) is files


FINE, IN_A_DICT = np.zeros((2, 3), np.float32), {"a": np.zeros(2), "b": np.zeros(2)}
OTHERS: dict[str, tuple[Any, Any, int]] = {  # the first x, another, and its number of labels
    "another shape": (FINE, np.zeros((2, 4), np.float32), 2),
    "another type": (FINE, np.zeros((2, 3)), 2),
    "another structure": (FINE, (FINE,), 2),
    "other numbers": (FINE, FINE, 3),
    "a number": (FINE, np.float32(1), 2),
    "another key": (IN_A_DICT, {"a": np.zeros(2), "c": np.zeros(2)}, 2),
    "a tuple for a dict": (IN_A_DICT, (np.zeros(2), np.zeros(2)), 2),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_batch_that_is_not_like_the_first_is_refused(other: str) -> None:
    fine, x, count = OTHERS[other]
    pairs = [*[(fine, np.zeros(2, np.int64))] * 2, (x, np.zeros(count, np.int64))]
    batches, explain = read(from_generator(lambda rank, size: iter(pairs)))
    assert [len(next(batches).y) for _ in range(2)] == [2, 2]
    with pytest.raises(tf.errors.OpError) as caught:
        next(batches)
    error = explain(caught.value, 2)
    assert isinstance(error, DataError)
    assert "in step 3; each batch must have the first one's structure" in str(error)
    first = "{a: float64 [n], b: float64 [n]}" if isinstance(fine, dict) else "float32 [n, 3]"
    assert f"({first}, int64 [n])" in str(error)


def test_other_byte_orders_and_unicode_text_are_read() -> None:
    pair = (np.array([1.5, -2], ">f4"), np.array(["gr\u00f6\u00dfe", "\u91cf"]))
    (batch,) = read(from_generator(lambda rank, size: iter([pair])))[0]
    assert batch.x.numpy().tolist() == [1.5, -2]
    assert [text.decode() for text in batch.y.numpy()] == ["gr\u00f6\u00dfe", "\u91cf"]
    samples = IndexedSource([(x, y) for x, y in zip(*pair, strict=True)])
    x, y = samples.gather(tf.constant([1, 0], tf.int64))
    assert x.numpy().tolist() == [-2, 1.5]
    assert [text.decode() for text in y.numpy()] == ["\u91cf", "gr\u00f6\u00dfe"]


class Timed:
    """Samples each of which takes its seconds, in threads that are noted."""

    def __init__(self, count: int, seconds: Callable[[int], float]) -> None:
        self._count, self._seconds = count, seconds
        self.threads: set[str] = set()

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> tuple[Any, Any]:
        self.threads.add(threading.current_thread().name)
        time.sleep(self._seconds(number))
        return np.zeros(2), np.int64(number)

    def are_read_in_threads(self) -> bool:
        """Whether any has been since it was last asked."""
        found = any(name.startswith("samples") for name in self.threads)
        self.threads.clear()
        return found


def test_samples_that_take_long_are_read_at_once() -> None:
    slow = Timed(16, lambda number: 0.01)
    samples = IndexedSource(slow)
    for _ in range(2):
        slow.threads.clear()
        assert samples.gather(tf.range(16, dtype=tf.int64))[1].numpy().tolist() == list(range(16))
    assert len(slow.threads) > 1
    assert all(name.startswith("samples") for name in slow.threads)


def test_a_sample_that_takes_long_alone_wakes_no_other_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexed, "QUICK_SECONDS", 0.05)
    interrupted = Timed(32, lambda number: 0.06 * (number == 7))
    samples = IndexedSource(interrupted)
    for _ in range(2):
        assert samples.gather(tf.range(32, dtype=tf.int64))[1].numpy().tolist() == list(range(32))
    assert not interrupted.are_read_in_threads()


def test_samples_that_become_fast_are_read_without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexed, "QUICK_SECONDS", 0.05)  # also on a busy machine
    is_cold, batch = True, tf.range(8, dtype=tf.int64)
    cold = Timed(8, lambda number: 0.06 * is_cold)
    samples = IndexedSource(cold)
    samples.gather(batch)
    is_cold = False
    for _ in range(BATCHES_IN_THREADS):
        samples.gather(batch)
    assert cold.are_read_in_threads()
    samples.gather(batch)
    assert not cold.are_read_in_threads()


def test_samples_in_reused_memory_and_of_objects_are_copied() -> None:
    class Same:
        def __init__(self) -> None:
            self._x = np.zeros(3)

        def __len__(self) -> int:
            return 5

        def __getitem__(self, number: int) -> tuple[Any, Any]:
            self._x[:] = number
            return self._x, np.array([f"text {number}"], object)

    samples = IndexedSource(Same())
    x, y = samples.gather(tf.constant([3, 1, 4], tf.int64))
    assert x.numpy()[:, 0].tolist() == [3, 1, 4]
    assert y.numpy().tolist() == [[b"text 3"], [b"text 1"], [b"text 4"]]
    assert samples.fingerprint == IndexedSource(Same()).fingerprint


def test_samples_that_are_named_keep_their_names() -> None:
    class Label(NamedTuple):
        value: int
        weight: float

    x, y = IndexedSource([({"image": [1.0]}, Label(3, 0.5))] * 2).gather(tf.constant([1, 0], tf.int64))
    assert x["image"].numpy().tolist() == [[1.0], [1.0]]
    assert (y.value.numpy().tolist(), y.weight.numpy().tolist()) == ([3, 3], [0.5, 0.5])


def test_a_source_without_numbers_is_refused() -> None:
    for given in (iter([1]), object()):
        with pytest.raises(DataError, match=r"samples by number need __getitem__ and __len__\. Give a MapDataset"):
            from_grain(given)


def test_a_ragged_list_is_refused() -> None:
    batches, explain = read(from_generator(lambda rank, size: iter([([1.0, 2.0], [1, 2]), ([1.0, [2.0]], [1, 2])])))
    next(batches)
    with pytest.raises(tf.errors.OpError) as caught:
        next(batches)
    assert "rank 0 was fed a list in step 2 that makes no array" in str(explain(caught.value, 1))


def test_a_state_of_another_pipeline_is_ignored_or_refused() -> None:
    samples = tf.data.Dataset.from_tensor_slices((tf.range(8.0), tf.range(8)))
    current = Current()
    next(current.open(lambda: samples.batch(4), 0, b""))
    state = current.read_state()
    batches = Current().open(lambda: samples.shuffle(8, seed=1).batch(2), 0, b"")
    expected = [batch[1].numpy().tolist() for batch in batches]
    lines: list[str] = []
    with show_log(lines.append):
        batches = Current().open(lambda: samples.shuffle(8, seed=1).batch(2), 2, state)
    assert [batch[1].numpy().tolist() for batch in batches] == expected[2:]
    assert "the pipeline cannot resume from where the checkpoint says that it was" in lines[0]
    with pytest.raises(DataError, match="Give the dataset that the run began with, its files where they were"):
        Current().open(lambda: samples.shuffle(8, seed=1).batch(2), 2, state, begins_anew=False)


@pytest.mark.parametrize("cores", [(1, 2), (2, 1)])
def test_a_state_fits_on_one_core_and_on_several(cores: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where tf.data tunes a pipeline it makes a map at its end parallel, under another name."""
    samples = tf.data.Dataset.from_tensor_slices((tf.range(12.0), tf.range(12))).batch(2).map(lambda x, y: (2 * x, y))
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cores[0])))
    current = Current()
    batches = current.open(lambda: samples, 0, b"")
    for _ in range(2):
        next(batches)
    state = current.read_state()
    assert state
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cores[1])))
    rest = current.open(lambda: samples, 2, state, begins_anew=False)
    assert [batch[1].numpy().tolist() for batch in rest] == [[4, 5], [6, 7], [8, 9], [10, 11]]


def test_texts_and_dicts_come_as_they_are() -> None:
    samples = tf.data.Dataset.from_tensor_slices(({"text": ["a", "bc", "d"], "n": [1, 2, 3]}, [[1.0], [2.0], [3.0]]))
    (batch,) = read(from_dataset(samples))[0]
    assert batch.x["text"].numpy().tolist() == [b"a", b"bc", b"d"]
    assert batch.x["n"].numpy().tolist() == [1, 2, 3]
    assert batch.y.numpy().tolist() == [[1.0], [2.0], [3.0]]
    generated = from_generator(lambda rank, size: iter([(np.array(["a", "bc"]), np.array([b"x", b"y"], object))]))
    (batch,) = read(generated)[0]
    assert (batch.x.numpy().tolist(), batch.y.numpy().tolist()) == ([b"a", b"bc"], [b"x", b"y"])
