"""The position of a ``fit`` in its data, for a resume with the next batch.

An iterator, for an epoch or (with ``steps_per_epoch``) all epochs, restores its state if it can. Otherwise earlier
iterators are started, to repeat their reshuffling, and the trained batches are skipped. Python's and NumPy's generators
are restored too.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from ringtrain.data.tf_data import buffered_bytes, count_ahead, read_iterator_state, set_iterator_state
from ringtrain.errors import DataError
from ringtrain.keras.rank_state import Arrays, generator_states, set_generator_states
from ringtrain.messages.log import LOG
from ringtrain.runtime import activity
from ringtrain.runtime.private import count_steps, current_iterator_of, dataset_of_iterator, skip_epochs_of_shuffle

MAX_STATE_BYTES = 16 * 2**20  # each save sends it to rank 0; larger ones (a buffer of shuffled images) are read again
GENERATORS = "generators/"
_NOTHING = object()


class Position(NamedTuple):
    epochs: int = 0
    batches: int = 0  # of the epoch after these
    all_batches: int = 0


def count_past_ends(start: Position, data: Any) -> int:
    """Return how many batches the training function has read past the ends of epochs of ``steps_per_epoch``.

    With ``steps_per_execution``, its last call of an epoch trains as many batches as the others. An iterator without
    an end has them.
    """
    epochs = (start.all_batches - start.batches) // data.steps_per_epoch
    return epochs * (-data.steps_per_epoch % data.steps_per_execution)


class Batches:
    def __init__(self) -> None:
        self._start, self._state = Position(), b""
        self._generators: Arrays = {}  # when the current iterator was created
        self._saved_generators: Arrays = {}
        self._data: Any = None
        self._iterator: Any = None
        self._is_one_for_all = self._is_awaited = False
        self._epoch = 0  # from 1
        self.last = -1  # batch of this call of the training function

    def wait(self) -> None:
        """Expect the next iterator to be the training's; validation has its own."""
        self._is_awaited = True

    def are_of(self, data: Any) -> bool:
        if self._is_awaited:
            self._data, self._is_awaited = data, False
        return self._data is data

    def begin_at(self, start: Position, saved: Arrays) -> None:
        self._start, self._state = start, saved["data"].tobytes() if "data" in saved else b""
        self._saved_generators = {
            name.removeprefix(GENERATORS): value for name, value in saved.items() if name.startswith(GENERATORS)
        }

    def read_state(self, batches: int) -> Arrays:
        position = self._read_position(batches)
        is_read_again = self._is_within(batches) and not position
        generators = self._generators if is_read_again else generator_states()
        named = {f"{GENERATORS}{name}": value for name, value in generators.items()}
        return {"data": np.frombuffer(position, np.uint8), **named}

    def _is_within(self, batches: int) -> bool:
        return bool(batches) or (self._is_one_for_all and current_iterator_of(self._data) is self._iterator)

    def _read_position(self, batches: int) -> bytes:
        if self._iterator is None or not self._is_within(batches):
            return b""
        dataset = dataset_of_iterator(self._iterator)
        if dataset is None or buffered_bytes(dataset) > MAX_STATE_BYTES:  # serializing it may use all memory
            return b""
        # A shuffle that has read to its end saves no seeds for the next passes: see _draw_earlier_seeds.
        if self._epoch == 1 and (num := self._data._num_batches) and num - batches <= count_ahead(dataset):
            return b""
        data = read_iterator_state(self._iterator)
        return data if len(data) <= MAX_STATE_BYTES else b""

    def state_for(self, data: Any) -> bytes:
        return self._state if data is self._data else b""

    def enumerate(self, plain: Callable[[], Iterator[tuple[Any, ...]]], data: Any) -> Iterator[tuple[Any, ...]]:
        """Yield Keras' steps of an epoch; of the first one, only the remaining steps.

        Raises:
            DataError: the data are too short, or of another pipeline.
        """
        start, self._start = self._start, Position()
        state = self._state
        self._is_one_for_all = data.steps_per_epoch is not None
        began = time.perf_counter()
        before, num = 0, data._num_batches
        if self._is_one_for_all:
            all_batches = start.all_batches % num if num else start.all_batches + count_past_ends(start, data)
            before = max(0, all_batches - start.batches)
        self._epoch += 1 + start.epochs
        if state:
            self._draw_earlier_seeds(start, data)
        else:
            self._begin_earlier(start, data)
        set_generator_states(self._saved_generators)
        self._saved_generators = {}
        if not (self._iterator is not None and self._is_within(0)):
            self._generators = generator_states()
        for numbers in plain():  # (step, iterator); since Keras 3.11 (first, last, iterator)
            first, iterator = numbers[0], numbers[-1]
            if iterator is not self._iterator:
                self._iterator, self._state = iterator, b""
                count_steps(data, before)
                if state:
                    self._restore(iterator, state)
                else:
                    self._read(iterator, before, start)
            if first < start.batches:
                if not state:
                    self._read(iterator, data.steps_per_execution, start, may_end=True)
                continue
            if first == start.batches and start.all_batches:
                seconds = time.perf_counter() - began
                if seconds >= 1.0:
                    LOG.info(f"came to batch {start.batches + 1} of its epoch in the data after {seconds:.0f} s")
            # Since Keras 3.11 it gives the number of a call's last batch.
            self.last = numbers[1] if len(numbers) == 3 else first + data.steps_per_execution - 1
            yield numbers
        self._state = b""

    def _draw_earlier_seeds(self, start: Position, data: Any) -> None:
        """Each iterator draws the seeds of a shuffle. So does a restored one, once more."""
        num = data._num_batches
        # Keras creates one more iterator after each epoch of known length.
        drawn = start.all_batches // (num or sys.maxsize) if self._is_one_for_all else 2 * start.epochs - (not num)
        for _ in range(drawn - 1):
            iter(data._get_iterator())
            activity.move()

    def _begin_earlier(self, start: Position, data: Any) -> None:
        num, adapter = data._num_batches, data.data_adapter
        if hasattr(adapter, "py_dataset"):  # indexed, prefetched by Keras' threads
            for _ in range(start.epochs):
                getattr(adapter.py_dataset, "on_epoch_begin", lambda: None)()
                if adapter.shuffle and num:  # user-defined methods may draw from the same generator
                    skip_epochs_of_shuffle(adapter, epochs=1, num_batches=num)
                adapter.py_dataset.on_epoch_end()
        elif self._is_one_for_all:
            for _ in range(start.all_batches // num if num else 0):
                next(iter(data._get_iterator()), None)
                activity.move()
        else:
            for epoch in range(start.epochs):
                adapter.on_epoch_begin()
                next(iter(data._get_iterator()), None)
                if num or epoch:  # known since the first
                    iter(data._get_iterator())
                adapter.on_epoch_end()
                activity.move()

    def _read(self, iterator: Any, number: int, start: Position, *, may_end: bool = False) -> None:
        """If ``may_end``, fewer suffice: the training function's last call may have had fewer."""
        for place in range(number):
            activity.move()
            if next(iterator, _NOTHING) is _NOTHING:
                if may_end and place:
                    return
                raise DataError(
                    f"the data end before batch {start.batches} of epoch {start.epochs + 1}, which the checkpoint has "
                    "trained already. Give the data that the run began with, or start a new run: "
                    "Run(..., resume='never')."
                )

    def _restore(self, iterator: Any, state: bytes) -> None:
        try:
            set_iterator_state(iterator, state)
        except (AttributeError, tf.errors.OpError) as error:
            raise DataError(
                f"the data cannot resume from where the checkpoint says that they were: {error}. Give the pipeline and "
                "the files with which the run began, or start a new run: Run(..., resume='never')."
            ) from error
