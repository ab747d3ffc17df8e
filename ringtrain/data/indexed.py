"""Indexable data: Grain, Keras' PyDataset, and similar objects."""

from __future__ import annotations

import collections
import hashlib
import itertools
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from importlib.machinery import PathFinder
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

import numpy as np

from ringtrain.data.sources import Feed, Pass, UnreadableSample, bytes_of
from ringtrain.data.tf_data import feed_of
from ringtrain.errors import DataError
from ringtrain.messages.defects import describe_defect

if TYPE_CHECKING:
    import tensorflow as tf

READERS = 8  # threads for reading and decoding
QUICK_SECONDS, MAX_SLOW = 1e-4, 3  # a single slow sample may be an interruption
BATCHES_IN_THREADS = 100  # then measured again: files may be cached by now
MAX_SAMPLES = 2**53  # Grain reports infinite datasets as the largest integer


def from_grain(samples: Any, *, steps_per_epoch: int | None = None) -> IndexedSource | Feed:
    """Train on Grain datasets, or objects with the same interface.

    **Map-style**: a ``grain.MapDataset``, a data source such as ``grain.sources.ArrayRecordDataSource``, or any object
    with ``len(samples)`` and ``samples[number]``, a pair (x, y). As for arrays, ringtrain chooses the order, N ranks
    train exactly what one trains, and runs resume on any number of ranks. Samples that raise end the
    run, and are named. ``samples[number]`` must be deterministic, thread-safe, and not reuse memory. Leave out
    ``shuffle``, ``repeat`` and ``batch``.

    **A function of the pass** that returns this rank's batches: a ``grain.IterDataset``, a ``grain.DataLoader``, or
    another iterable, sharded by ``of.rank`` and ``of.size`` (``grain.sharding.ShardOptions``), following ``of.seed``
    and ``of.epoch``, with batches of ``of.local_batch_size``. Exact as ``from_dataset``'s second form. A resumed run
    uses the iterator's ``get_state``, or rereads the pass.

    Args:
        samples: the object, or the function.
        steps_per_epoch: for a function; default: ``len()`` of its result, or one pass of at most ``--steps``.

    Raises:
        DataError: no ``__getitem__`` or ``__len__``, an infinite dataset, or a first sample that is no pair (x, y) of
            arrays.
    """
    if not hasattr(samples, "__getitem__") and callable(samples):
        return feed_of(samples, lambda made: read_length(made) if hasattr(made, "__len__") else None, steps_per_epoch)
    return IndexedSource(samples)


def from_pydataset(make: Callable[[Pass], Any]) -> Feed:
    """Stream each rank's own ``keras.utils.PyDataset``, for training.

    ``workers``, ``use_multiprocessing`` and ``max_queue_size`` apply. Batch sizes and numbers of steps may differ
    between ranks: each step is the exact mean over all its samples. A resumed run rereads nothing and needs as many
    ranks. ``on_epoch_begin`` and ``on_epoch_end`` are not called: shuffle by ``of.seed`` and ``of.epoch``.

    Args:
        make: (pass) -> this rank's PyDataset, with batches (x, y) of arrays [n, ...], or tuples or dicts of arrays.
    """

    if not callable(make):
        name = type(make).__name__
        raise DataError(
            f"from_pydataset got a {name}; it must be a function of the pass that returns one, so that each rank has "
            f"its own. Write from_pydataset(lambda of: {name}(...)), sharded by of.rank and of.size."
        )

    def open_pass(of: Pass, skip: int) -> Iterator[Any]:
        return _read_ahead(_require_batches(make(of)), skip)

    return Feed(open_pass, None, lambda of: read_length(_require_batches(make(of))), replays=False)


def read_length(samples: Any) -> int:
    """Raise DataError without a valid length."""
    try:
        return len(samples)
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(
            f"len() of the {type(samples).__name__} is no number of samples or batches: {describe_defect(error)}. "
            "Return a whole number, at least 0, from its __len__."
        ) from error


def _require_batches(dataset: Any) -> Any:
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise DataError(
            f"from_pydataset got a function that returns a {type(dataset).__name__}; it must return this rank's "
            "keras.utils.PyDataset, with __getitem__ and __len__. Return one, of the pass that the function is given."
        )
    return dataset


_dataset: Any = None  # in a worker process


def _begin_worker(dataset: Any) -> None:
    global _dataset
    _dataset = dataset


def _read_in_worker(number: int) -> Any:
    return _dataset[number]


def _read_ahead(dataset: Any, first: int) -> Iterator[Any]:
    workers = max(1, int(getattr(dataset, "workers", 1) or 1))
    ahead = max(workers, int(getattr(dataset, "max_queue_size", 10) or 1))
    pool: Executor
    read: Callable[[int], Any]
    if getattr(dataset, "use_multiprocessing", False):
        try:
            ForkingPickler.dumps(dataset)
            module = type(dataset).__module__
            if module != "__main__" and PathFinder.find_spec(module.partition(".")[0]) is None:
                raise ModuleNotFoundError(f"its class is in {sys.modules[module].__file__}, which no process imports")
        except Exception as error:
            raise DataError(
                f"the {type(dataset).__name__} cannot be sent to processes, as its use_multiprocessing asks: "
                f"{describe_defect(error)} Define its class in a module that can be imported, or let threads read: "
                "use_multiprocessing=False."
            ) from error
        # Not forked: locks of TensorFlow's and MPI's threads would never be released.
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_begin_worker, initargs=(dataset,))
        read = _read_in_worker
    else:
        pool, read = ThreadPoolExecutor(workers, thread_name_prefix="pydataset"), dataset.__getitem__
    under_way: collections.deque[tuple[int, Future[Any]]] = collections.deque()
    try:
        numbers = iter(range(first, len(dataset)))
        while True:
            for number in itertools.islice(numbers, ahead - len(under_way)):
                under_way.append((number, pool.submit(read, number)))
            if not under_way:
                return
            number, future = under_way.popleft()
            try:
                batch = future.result()
            except Exception as error:
                raise DataError(
                    f"batch {number} of the {type(dataset).__name__} cannot be read: {describe_defect(error)} Mend "
                    "its __getitem__, or the data that it reads."
                ) from error
            yield batch
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


class IndexedSource:
    def __init__(self, samples: Any) -> None:
        if not (hasattr(samples, "__getitem__") and hasattr(samples, "__len__")):
            raise DataError(
                f"from_grain got a {type(samples).__name__}; samples by number need __getitem__ and __len__. Give a "
                "MapDataset or a data source of random access, or a function of the pass that returns batches."
            )
        self.num_samples = read_length(samples)
        if self.num_samples >= MAX_SAMPLES:
            raise DataError("the samples of from_grain have no end. Leave repeat() out: --epochs says how often.")
        self._samples = samples
        self._structure: Any = ((), ())  # of a sample, after the first
        self._plain: tuple[Any, ...] | None = None  # types, dtypes and shapes, if a pair of arrays
        self._kinds: list[tuple[tf.DType, tuple[int, ...]]] = []  # of its flat arrays
        self._pool = ThreadPoolExecutor(READERS, thread_name_prefix="samples")
        self._slow_in_a_row, self._in_threads = 0, 0

        first = self._read(0) if self.num_samples else []
        if isinstance(first, Exception):
            raise DataError(
                f"the first sample of the {type(samples).__name__} cannot be read: {describe_defect(first)}"
            ) from first
        self._kinds = list(map(_kind_of, first))

    @property
    def fingerprint(self) -> str:
        digest = hashlib.sha256(f"{self.num_samples} {self._kinds}".encode())
        for number in sorted({0, self.num_samples // 2, self.num_samples - 1} - {-1}):
            sample = self._read(number)
            if isinstance(sample, Exception):  # messages may contain addresses
                sample = [np.asarray(type(sample).__name__)]
            digest.update(b"".join(map(bytes_of, sample)))
        return digest.hexdigest()

    def gather(self, indices: tf.Tensor) -> tuple[Any, Any]:
        """Read samples (x, y), tensors [n, ...] or structures of them; runs in a graph."""
        import tensorflow as tf

        dtypes = [dtype for dtype, _ in self._kinds]
        columns = tf.numpy_function(self._read_columns, [indices], dtypes)
        for column, (_, shape) in zip(columns, self._kinds, strict=True):
            column.set_shape([*indices.shape[:1], *shape])
        x, y = tf.nest.pack_sequence_as(self._structure, columns)
        return x, y

    def why_unreadable(self, number: int) -> UnreadableSample | None:
        """Read one sample; return None if that succeeds."""
        sample = self._read(number)
        if not isinstance(sample, Exception):
            return None
        reason = describe_defect(sample).rstrip(".")
        return UnreadableSample(number, f"of the {type(self._samples).__name__}", reason)

    def _read_columns(self, numbers: np.ndarray) -> list[np.ndarray]:
        """Return flat arrays [n, ...] of samples; raise the error of an unreadable one."""
        columns = [np.empty((len(numbers), *shape), dtype.as_numpy_dtype) for dtype, shape in self._kinds]

        def take(place: int) -> None:
            """Copy at once, as memory may be reused."""
            sample = self._read(int(numbers[place]))
            if isinstance(sample, Exception):
                raise sample
            for column, array in zip(columns, sample, strict=True):
                column[place, ...] = array

        self._for_each(take, len(numbers))
        return columns

    def _for_each(self, take: Callable[[int], None], number: int) -> None:
        """Call it with 0 to ``number`` - 1: in sequence; in threads after several slow calls in a row."""
        num_taken = 0
        while num_taken < number and self._slow_in_a_row < MAX_SLOW:
            begin = time.perf_counter()
            take(num_taken)
            num_taken += 1
            is_slow = time.perf_counter() - begin > QUICK_SECONDS
            self._slow_in_a_row = self._slow_in_a_row + 1 if is_slow else 0
        if num_taken < number:
            list(self._pool.map(take, range(num_taken, number)))  # raises their errors
            self._in_threads += 1
            if self._in_threads >= BATCHES_IN_THREADS:
                self._slow_in_a_row = 0
                self._in_threads = 0

    def _read(self, number: int) -> Any:
        """Return flat arrays, or the exception."""
        import tensorflow as tf

        from ringtrain.data.streaming import as_arrays

        try:
            sample = self._samples[number]
            if self._is_plainly_like_first(sample):
                return sample
            if not (isinstance(sample, (tuple, list)) and len(sample) == 2):
                what = "None, as where a filter has left it out" if sample is None else f"a {type(sample).__name__}"
                raise DataError(f"it is {what}; each sample must be a pair (x, y). Map it so, and filter beforehand.")
            sample = (as_arrays(sample[0], with_names=True), as_arrays(sample[1], with_names=True))
            arrays = tf.nest.flatten(sample)
            if self._kinds:
                tf.nest.assert_same_structure(self._structure, sample)
                for array, (dtype, shape) in zip(arrays, self._kinds, strict=True):
                    if _kind_of(array) != (dtype, shape):
                        raise DataError(
                            f"it has {array.dtype} {list(array.shape)} where the first has {dtype.name} {list(shape)}; "
                            "all samples must have the same shape. Resize or pad them"
                        )
            else:
                self._structure = sample
                if all(type(part) is np.ndarray or isinstance(part, np.generic) for part in sample):
                    self._plain = tuple((type(part), part.dtype, part.shape) for part in sample)
            return arrays
        except Exception as error:
            return error

    def _is_plainly_like_first(self, sample: Any) -> bool:
        """Fast check, a microsecond."""
        if self._plain is None or type(sample) is not tuple or len(sample) != 2:
            return False
        (x, y), (x_kind, y_kind) = sample, self._plain
        return (
            type(x) is x_kind[0]
            and type(y) is y_kind[0]
            and (x.dtype, x.shape) == x_kind[1:]
            and (y.dtype, y.shape) == y_kind[1:]
        )


def _kind_of(array: Any) -> tuple[tf.DType, tuple[int, ...]]:
    import tensorflow as tf

    return tf.as_dtype(array.dtype), array.shape
