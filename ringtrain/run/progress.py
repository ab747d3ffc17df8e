"""The counters of a run: equal on every rank, kept in every checkpoint."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

MAX_COUNT = 2**63


def is_place(value: Any) -> bool:
    """True if it is a step with a state in base64 and a directory."""
    if not (isinstance(value, (list, tuple)) and list(map(type, value)) == [int, str, str]):
        return False
    return 0 <= value[0] < MAX_COUNT and re.fullmatch(r"[A-Za-z0-9+/]*={0,2}", value[1]) is not None


@dataclass(kw_only=True)
class Progress:
    """Counters that a run needs to resume as if it had never stopped."""

    evaluated_step: int = -1  # of the last evaluation; -1 before the first
    best: float | None = None  # of ``best_metric`` so far; None before the first evaluation
    best_step: int = -1  # of the best value
    evaluations_without_best: int = 0  # since then
    samples_seen: int = 0  # of all ranks so far, if that does not follow from the step
    epochs_done: int = 0  # of a ``fit``, whose own data say what a step is
    batches_done: int = 0  # of its epoch after these
    skipped_in_a_row: int = 0  # steps that were not finite, up to now without an interruption
    finished: Literal["completed", "stopped early"] | None = None  # how the run came to its end, if it has
    # Of each rank's pipeline a step up to here, its state before it (base64), and the directory of its data; rank 0's
    # alone where all read alike.
    places: list[tuple[int, str, str]] = field(default_factory=list)

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> Progress:
        """Read the counters of a checkpoint."""
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
        """Take in an evaluation's value of ``best_metric``; True if it is a new best. NaN never is."""
        sign = 1 if direction == "max" else -1
        is_best = not math.isnan(value) and (self.best is None or sign * value > sign * self.best)
        self.evaluated_step = step
        if is_best:
            self.best, self.best_step, self.evaluations_without_best = value, step, 0
        else:
            self.evaluations_without_best += 1
        return is_best
