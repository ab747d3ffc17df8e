"""What a benchmark consists of: contenders, what is compared, and what came of each. Nothing is run here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

# In arguments and variables: directory of one run, and a free port for each process.
DIRECTORY = "{directory}"
PORT = "{port_%d}"
Arrays = Sequence[npt.NDArray[Any]]


@dataclass(frozen=True)
class Command:
    """A process; ``env`` is added to a clean environment."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Finished:
    """Output of a contender's processes."""

    directory: Path
    sec_until_first_step: float | None  # until the first line of a step; None without one


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of one run; loss and weights are None if not compared."""

    figures: Mapping[str, float]  # seconds by label, such as {"step": 0.06}
    raw: Mapping[str, Any] = field(default_factory=dict)  # other JSON values
    fault: str = ""  # error of the result
    checked: str = ""  # description of the check
    loss: float | None = None  # of the last step, over all samples
    weights: Arrays | None = None  # trained, in the model's order
    first_weights: Arrays | None = None  # the reference's before the training


class UnreadableError(Exception):
    """Missing or unreadable result of a contender that exited normally."""


@dataclass(frozen=True)
class Contender:
    name: str
    description: str
    commands: tuple[Command, ...]  # start together
    read: Callable[[Finished], Outcome]
    prepare: Callable[[Path], None] = lambda directory: None  # not timed


def contenders_of(read: Callable[[Finished], Outcome], *rows: tuple[str, str, Command]) -> tuple[Contender, ...]:
    """``rows``: name, description, command."""
    return tuple(Contender(name, description, (command,), read) for name, description, command in rows)


@dataclass(frozen=True)
class Comparison:
    """Speedup of ``name`` over ``other``: the ratio of their seconds in each round."""

    name: str
    other: str
    goal: float | None = None  # smallest wanted ratio


@dataclass(frozen=True)
class Experiment:
    name: str  # such as a model's
    unit: str  # of work, which the figures time
    contenders: tuple[Contender, ...]
    comparisons: tuple[Comparison, ...] = ()  # omitted if a contender is missing
    reference: Contender | None = None  # runs once before the rounds; for loss and weights
    num_bytes: Mapping[str, int] = field(default_factory=dict)  # of an all-reduce, by label

    def __post_init__(self) -> None:
        names = {each.name for each in self.contenders}
        kept = tuple(each for each in self.comparisons if {each.name, each.other} <= names)
        object.__setattr__(self, "comparisons", kept)


LOSS_TOLERANCE = 1e-4  # relative, after all steps in float32
# Relative to the change of the weights: two runs on an H200 with TF32 differ by 2e-3, divergent ranks by far more.
WEIGHTS_TOLERANCE = 5e-3


def check_outcome(outcome: Outcome, reference: Outcome | None) -> tuple[str, str]:
    """Return ``fault`` and ``checked``."""
    if outcome.fault or reference is None or outcome.loss is None or reference.loss is None:
        return outcome.fault, outcome.checked
    loss_difference = abs(outcome.loss - reference.loss) / abs(reference.loss)
    checked = f"loss {outcome.loss:.6g}, {loss_difference:.1e} from one process"
    fault = "" if loss_difference <= LOSS_TOLERANCE else f"the loss differs by more than {LOSS_TOLERANCE:.0e}"
    if outcome.weights is not None and reference.weights is not None and reference.first_weights is not None:
        difference = compare_weights(outcome.weights, reference.weights, first=reference.first_weights)
        checked += f"; weights {difference:.1e} of the way"
        if not difference <= WEIGHTS_TOLERANCE:
            fault = fault or f"the weights differ by more than {WEIGHTS_TOLERANCE:.0e} of the way"
    return fault and f"{fault} ({checked})", checked


def compare_weights(weights: Arrays, reference: Arrays, *, first: Arrays) -> float:
    """Euclidean distance to the reference, over the reference's change in training; infinite for other shapes."""
    if [w.shape for w in weights] != [w.shape for w in reference]:
        return float("inf")
    ended, right, begun = (
        np.concatenate([w.ravel() for w in each], dtype=np.float64) for each in (weights, reference, first)
    )
    return float(np.linalg.norm(ended - right) / np.linalg.norm(right - begun))
