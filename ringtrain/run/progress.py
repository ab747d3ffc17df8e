"""Counters of a run, equal on all ranks, in every checkpoint."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

MAX_COUNT = 2**63


def is_place(value: Any) -> bool:
    """True for [step, base64 state, directory]."""
    if not (isinstance(value, (list, tuple)) and list(map(type, value)) == [int, str, str]):
        return False
    return 0 <= value[0] < MAX_COUNT and re.fullmatch(r"[A-Za-z0-9+/]*={0,2}", value[1]) is not None


@dataclass(kw_only=True)
class Progress:
    evaluated_step: int = -1
    best: float | None = None  # of ``best_metric``; None: no evaluation
    best_step: int = -1
    evaluations_without_best: int = 0
    samples_seen: int = 0  # over all ranks, if not implied by the step
    epochs_done: int = 0
    batches_done: int = 0
    skipped_in_a_row: int = 0  # latest consecutive non-finite steps
    finished: Literal["completed", "stopped early"] | None = None
    # Per rank: step, the pipeline's state before it (base64), data directory; only rank 0's for a shared stream.
    places: list[tuple[int, str, str]] = field(default_factory=list)

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> Progress:
        if unknown := values.keys() - {field.name for field in fields(cls)}:
            raise ValueError(f"its progress holds {min(unknown)!r}")
        progress = cls(**values)
        for name, value in vars(progress).items():
            if name not in ("best", "finished", "places") and (type(value) is not int or not -1 <= value < MAX_COUNT):
                raise ValueError(f"its {name} is {value!r}")
        if progress.best is not None and type(progress.best) not in (int, float):
            raise ValueError(f"its best is {progress.best!r}")
        if not isinstance(progress.places, list) or not all(map(is_place, progress.places)):
            raise ValueError("its places are no list of a step, a state and a directory for each rank")
        if progress.finished not in (None, "completed", "stopped early"):
            raise ValueError(f"its finished is {progress.finished!r}")
        return progress

    def note_evaluation(self, step: int, value: float, direction: Literal["min", "max"]) -> bool:
        """Return True for a new best. NaN never is."""
        sign = 1 if direction == "max" else -1
        is_best = not math.isnan(value) and (self.best is None or sign * value > sign * self.best)
        self.evaluated_step = step
        if is_best:
            self.best, self.best_step, self.evaluations_without_best = value, step, 0
        else:
            self.evaluations_without_best += 1
        return is_best
