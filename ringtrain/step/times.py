"""The parts of this rank's step time: input, computation, communication, and the rest."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


class StepTimes:
    """Adds up the parts of the steps' time, by this rank's clock, from one line of the log to the next.

    Computing and communication are told apart where the step times its communication: on cores, and not where
    TensorFlow is to be deterministic. Otherwise the wait for data alone is known.
    """

    def __init__(self, *, times_communication: bool) -> None:
        self._times_communication = times_communication
        self._input = self._steps = self._communication = 0.0
        self._taken: dict[str, float] = {}
        self._lap_begin = time.perf_counter()

    def lap(self) -> float:
        """The seconds since this was called last, without those left out."""
        begin, self._lap_begin = self._lap_begin, time.perf_counter()
        return self._lap_begin - begin

    @contextlib.contextmanager
    def leaving_out(self) -> Iterator[None]:
        """A context whose time does not count: no step is trained in it."""
        begin = time.perf_counter()
        yield
        self._lap_begin += time.perf_counter() - begin

    def waiting_for(self, items: Iterable[Item]) -> Iterator[Item]:
        """The same items; the time until each is there is input."""
        begin = time.perf_counter()
        for item in items:
            self._input += time.perf_counter() - begin
            yield item
            begin = time.perf_counter()

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """A context within which a step is computed."""
        begin = time.perf_counter()
        yield
        self._steps += time.perf_counter() - begin

    def note_communication(self, seconds: float) -> None:
        """Add the time of a step between this rank's last gradient and the last sum over all ranks."""
        self._communication += seconds

    def totals(self) -> dict[str, float]:
        """The parts of all steps so far, in seconds."""
        known = {"input_sec": self._input}
        if self._times_communication:
            known["compute_sec"] = max(0.0, self._steps - self._communication)
            known["communication_sec"] = self._communication
        return known

    def take(self, num_steps: int, sec_per_step: float) -> dict[str, float]:
        """The parts of ``sec_per_step``, seconds a step, since this was called last, and begin again.

        ``communication_sec`` is what no computation hid; it includes the wait for slower ranks. ``other_sec`` is what
        is left: checks, the log, the copies of saves.
        """
        before, self._taken = self._taken, self.totals()
        known = {name: max(0.0, seconds - before.get(name, 0.0)) for name, seconds in self._taken.items()}
        parts = {name: round(seconds / num_steps, 6) for name, seconds in known.items()}
        return {**parts, "other_sec": round(max(0.0, sec_per_step - sum(parts.values())), 6)}
