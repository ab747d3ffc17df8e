"""What a benchmark consists of: contenders, what is compared, and what came of each. Nothing is run here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

# In arguments and variables: the directory of one run, and a free port of this machine for each process.
DIRECTORY = "{directory}"
PORT = "{port_%d}"
Arrays = Sequence[npt.NDArray[Any]]


@dataclass(frozen=True)
class Command:
    """A process to start: its arguments, and the variables added to a clean environment."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Finished:
    """What a contender's processes left behind."""

    directory: Path  # where they wrote
    sec_until_first_step: float | None  # from the start to the first line of a step; None where none came


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one run of a contender gave; loss and weights are None where they are not to be compared."""

    figures: Mapping[str, float]  # seconds by label, such as {"step": 0.06}
    raw: Mapping[str, Any] = field(default_factory=dict)  # other values to keep; JSON values
    fault: str = ""  # why the result is wrong
    checked: str = ""  # by what that was seen
    loss: float | None = None  # of the last step, over all samples
    weights: Arrays | None = None  # trained, in the model's order
    first_weights: Arrays | None = None  # the reference's before the training


class UnreadableError(Exception):
    """A contender that ended well left no result, or none that can be read."""


@dataclass(frozen=True)
class Contender:
    """Something that is measured."""

    name: str
    description: str
    commands: tuple[Command, ...]  # processes that start together; one, where it starts the others itself
    read: Callable[[Finished], Outcome]
    prepare: Callable[[Path], None] = lambda directory: None  # makes a run's directory ready, before it is timed


def contenders_of(read: Callable[[Finished], Outcome], *rows: tuple[str, str, Command]) -> tuple[Contender, ...]:
    """Contenders that are one command each: their names, descriptions and commands."""
    return tuple(Contender(name, description, (command,), read) for name, description, command in rows)


@dataclass(frozen=True)
class Comparison:
    """How many times as fast ``name`` is as ``other``: the ratio of their seconds, round by round."""

    name: str
    other: str
    goal: float | None = None  # the smallest ratio that is aimed at


@dataclass(frozen=True)
class Experiment:
    """Contenders that are measured in the same rounds."""

    name: str  # what it is about, such as a model
    unit: str  # what the figures are the seconds of
    contenders: tuple[Contender, ...]
    comparisons: tuple[Comparison, ...] = ()  # those of which one contender is not there are left out
    reference: Contender | None = None  # runs once before the rounds; loss and weights are held against it
    num_bytes: Mapping[str, int] = field(default_factory=dict)  # of an all-reduce, the bytes of each label

    def __post_init__(self) -> None:
        names = {each.name for each in self.contenders}
        kept = tuple(each for each in self.comparisons if {each.name, each.other} <= names)
        object.__setattr__(self, "comparisons", kept)


LOSS_TOLERANCE = 1e-4  # relative, after all steps in float32
# Of the way that the training went: two runs on an H200 with TF32 differ by 2e-3, ranks that train apart by far more.
WEIGHTS_TOLERANCE = 5e-3


def check_outcome(outcome: Outcome, reference: Outcome | None) -> tuple[str, str]:
    """Hold an outcome against the reference: why it is wrong, or nothing; and by what that was seen."""
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
    """The Euclidean distance to the reference's weights, over the way that those went from their first values.

    Infinite where the shapes differ.
    """
    if [w.shape for w in weights] != [w.shape for w in reference]:
        return float("inf")
    ended, right, begun = (
        np.concatenate([w.ravel() for w in each], dtype=np.float64) for each in (weights, reference, first)
    )
    return float(np.linalg.norm(ended - right) / np.linalg.norm(right - begun))
