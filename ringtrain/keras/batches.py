"""The position of a ``fit`` in its data, so that a resumed ``fit`` continues with the next batch.

Keras makes an iterator of the data for each epoch, or one for all epochs where ``steps_per_epoch`` is given. A rank's
iterator says where it is, if it can (tf.data's own state, which knows of earlier shuffles). Else what was trained is
read again and left out, and each earlier iterator is started again: a pipeline that shuffles again for each of them
then goes on with the order that would have come. Python's and NumPy's global generators, by which Keras and users
shuffle, then get the states that they had when the iterator was created; those of the checkpoint if nothing is read
again.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from ringtrain.data.tf_data import buffered_bytes, read_iterator_state, set_iterator_state
from ringtrain.errors import DataError
from ringtrain.keras.rank_state import Arrays, generator_states, set_generator_states
from ringtrain.runtime import activity

MAX_STATE_BYTES = 16 * 2**20  # it travels to rank 0 with each save; a long buffer of shuffled images is read again
GENERATORS = "generators/"
_NOTHING = object()


class Place(NamedTuple):
    """The amount of data that has been trained."""

    epochs: int = 0
    batches: int = 0  # of the epoch after these
    all_batches: int = 0  # of all epochs


class Batches:
    """The batches of one ``fit`` of this rank."""

    def __init__(self, print_line: Callable[[str], None]) -> None:
        self._print_line = print_line
        self._start, self._state = Place(), b""
        self._generators: Arrays = {}  # when the present iterator was created
        self._saved_generators: Arrays = {}  # of the checkpoint
        self._data: Any = None  # Keras' EpochIterator
        self._iterator: Any = None
        self._is_one_for_all = self._is_awaited = False

    def wait(self) -> None:
        """Count the next batches; validation has its own EpochIterator."""
        self._is_awaited = True

    def are_of(self, data: Any) -> bool:
        """True if these are the batches of Keras' EpochIterator ``data``."""
        if self._is_awaited:
            self._data, self._is_awaited = data, False
        return self._data is data

    def begin_at(self, start: Place, saved: Arrays) -> None:
        """Resume after what was trained; ``saved`` is what ``read_state`` returned there."""
        self._start, self._state = start, saved["data"].tobytes() if "data" in saved else b""
        self._saved_generators = {
            name.removeprefix(GENERATORS): value for name, value in saved.items() if name.startswith(GENERATORS)
        }

    def read_state(self, batches: int) -> Arrays:
        """State of the data after so many batches of an epoch, for ``begin_at``."""
        position = self._read_position(batches)
        is_read_again = self._is_within(batches) and not position
        generators = self._generators if is_read_again else generator_states()
        named = {f"{GENERATORS}{name}": value for name, value in generators.items()}
        return {"data": np.frombuffer(position, np.uint8), **named}

    def _is_within(self, batches: int) -> bool:
        """True if the present iterator yields the next batch."""
        return bool(batches) or (self._is_one_for_all and self._data._current_iterator is self._iterator)

    def _read_position(self, batches: int) -> bytes:
        """The iterator's own state; empty if the data have to be read again."""
        if self._iterator is None or not self._is_within(batches):
            return b""
        dataset = getattr(self._iterator, "_dataset", None)
        if dataset is None or buffered_bytes(dataset) > MAX_STATE_BYTES:  # to make a long state may take all memory
            return b""
        data = read_iterator_state(self._iterator)
        return data if len(data) <= MAX_STATE_BYTES else b""

    def state_for(self, data: Any) -> bytes:
        """The state that the next iterator of Keras' EpochIterator ``data`` is going to take; mostly empty."""
        return self._state if data is self._data else b""

    def enumerate(self, plain: Callable[[], Iterator[tuple[Any, ...]]], data: Any) -> Iterator[tuple[Any, ...]]:
        """The batches of an epoch as Keras' EpochIterator ``data`` numbers them; of the first, what is left of it.

        Yields:
            The numbers of those that one call of the training function takes, and their iterator, as Keras does.

        Raises:
            DataError: there are no longer as many as were trained, or the state is of another pipeline.
        """
        start, self._start = self._start, Place()
        state = self._state
        self._is_one_for_all = data.steps_per_epoch is not None
        began = time.perf_counter()
        before = self._given_before(start, data)
        if not state:
            self._begin_earlier(start, data)
        set_generator_states(self._saved_generators)
        self._saved_generators = {}
        if not (self._iterator is not None and self._is_within(0)):
            self._generators = generator_states()
        for numbers in plain():  # and the iterator behind them: from Keras 3.11 on the first and the last, before one
            first, iterator = numbers[0], numbers[-1]
            if iterator is not self._iterator:
                self._iterator, self._state = iterator, b""
                data._steps_seen += before
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
                    self._print_line(
                        f"came to batch {start.batches + 1} of its epoch in the data after {seconds:.0f} s"
                    )
            yield numbers
        self._state = b""

    def _given_before(self, start: Place, data: Any) -> int:
        """The batches that the present iterator gave to former epochs."""
        if not self._is_one_for_all:
            return 0
        num = data._num_batches
        return max(0, (start.all_batches % num if num else start.all_batches) - start.batches)

    def _begin_earlier(self, start: Place, data: Any) -> None:
        """Start former iterators again, so that a pipeline that shuffles for each takes the order that would come."""
        num, adapter = data._num_batches, data.data_adapter
        if hasattr(adapter, "py_dataset"):  # which gives its batches by number, read ahead by threads of Keras'
            for _ in range(start.epochs):
                getattr(adapter.py_dataset, "on_epoch_begin", lambda: None)()
                if adapter.shuffle and num:  # as Keras does, by the generator that the user's methods may draw from
                    random.shuffle(list(range(num)))
                adapter.py_dataset.on_epoch_end()
        elif self._is_one_for_all:
            for _ in range(start.all_batches // num if num else 0):
                next(iter(data._get_iterator()), None)
                activity.move()
        else:
            for _ in range(start.epochs):
                adapter.on_epoch_begin()
                next(iter(data._get_iterator()), None)
                if num:
                    iter(data._get_iterator())  # as Keras does at the end of an epoch
                adapter.on_epoch_end()
                activity.move()

    def _read(self, iterator: Any, number: int, start: Place, *, may_end: bool = False) -> None:
        """Leave out so many batches; those that one call of the training function took may have been fewer."""
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
