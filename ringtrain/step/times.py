"""This rank's step time by part."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


class StepTimes:
    """Sums between log lines, by this rank's clock; computation and communication are separate only if timed."""

    def __init__(self, *, times_communication: bool) -> None:
        self._times_communication = times_communication
        self._input = self._steps = self._communication = 0.0
        self._taken: dict[str, float] = {}
        self._lap_begin = time.perf_counter()

    def lap(self) -> float:
        """Return seconds since the last call, without those left out."""
        begin, self._lap_begin = self._lap_begin, time.perf_counter()
        return self._lap_begin - begin

    @contextlib.contextmanager
    def leaving_out(self) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self._lap_begin += time.perf_counter() - begin

    def waiting_for(self, items: Iterable[Item]) -> Iterator[Item]:
        begin = time.perf_counter()
        for item in items:
            self._input += time.perf_counter() - begin
            yield item
            begin = time.perf_counter()

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self._steps += time.perf_counter() - begin

    def note_input(self, seconds: float) -> None:
        """Wait for batches within a call that trains many steps."""
        self._input += seconds
        self._steps -= seconds

    def note_communication(self, seconds: float) -> None:
        """``seconds``: from this rank's last gradient to the last sum."""
        self._communication += seconds

    @property
    def with_and_without_waits(self) -> tuple[float, float]:
        """Seconds of all steps, and those without waits for other ranks; 0 if not timed."""
        if not self._times_communication:
            return 0.0, 0.0
        steps_sec = self._input + self._steps
        return steps_sec, steps_sec - self._communication

    def totals(self) -> dict[str, float]:
        known = {"input_sec": self._input}
        if self._times_communication:
            known["compute_sec"] = max(0.0, self._steps - self._communication)
            known["communication_sec"] = self._communication
        return known

    def take(self, num_steps: int, sec_per_step: float) -> dict[str, float]:
        """Return the parts of ``sec_per_step`` since the last call.

        ``communication_sec``: not overlapped, with the wait for slower ranks. ``other_sec``: checks, log, copies for
        saves.
        """
        before, self._taken = self._taken, self.totals()
        known = {name: max(0.0, seconds - before.get(name, 0.0)) for name, seconds in self._taken.items()}
        parts = {name: round(seconds / num_steps, 6) for name, seconds in known.items()}
        return {**parts, "other_sec": round(max(0.0, sec_per_step - sum(parts.values())), 6)}
