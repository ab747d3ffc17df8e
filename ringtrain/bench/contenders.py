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


@dataclass(frozen=True)
class Command:
    """A process to start: its arguments, and its variables beside a clean environment."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Finished:
    """What a contender's processes left behind.

    Attributes:
        directory: where they wrote.
        sec_until_first_step: from the start to the first line of a step; None where none came.
    """

    directory: Path
    sec_until_first_step: float | None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one run of a contender gave.

    Attributes:
        figures: seconds by label, such as ``{"step": 0.06}``.
        raw: whatever else is worth keeping; JSON values.
        fault: why the result is wrong; empty where it is not.
        checked: by what that was seen.
        loss: that of the last step, over all samples; None where it is not to be compared.
        weights: the trained weights, in the model's order; None where they are not to be compared.
        first_weights: the reference's before the training.
    """

    figures: Mapping[str, float]
    raw: Mapping[str, Any] = field(default_factory=dict)
    fault: str = ""
    checked: str = ""
    loss: float | None = None
    weights: Sequence[npt.NDArray[Any]] | None = None
    first_weights: Sequence[npt.NDArray[Any]] | None = None


class UnreadableError(Exception):
    """A contender that ended well left no result, or none that can be read."""


@dataclass(frozen=True)
class Contender:
    """Something that is measured.

    Attributes:
        commands: processes that start together; one, where it starts the others itself.
        read: finds the outcome in what the processes left behind.
        prepare: makes the directory of a run ready, before it is timed.
    """

    name: str
    description: str
    commands: tuple[Command, ...]
    read: Callable[[Finished], Outcome]
    prepare: Callable[[Path], None] = lambda directory: None


def contenders_of(read: Callable[[Finished], Outcome], *rows: tuple[str, str, Command]) -> tuple[Contender, ...]:
    """Contenders that are one command each: their names, descriptions and commands."""
    return tuple(Contender(name, description, (command,), read) for name, description, command in rows)


@dataclass(frozen=True)
class Comparison:
    """How many times as fast ``name`` is as ``other``: the ratio of their seconds, round by round.

    Attributes:
        goal: the smallest ratio that is aimed at; None where there is none.
    """

    name: str
    other: str
    goal: float | None = None


@dataclass(frozen=True)
class Experiment:
    """Contenders that are measured in the same rounds.

    Attributes:
        name: what it is about, such as a model.
        unit: what the figures are the seconds of.
        reference: a contender that runs once before the rounds; loss and weights of the others are held against it.
        num_bytes: for an all-reduce, the bytes of each label.
        comparisons: those of which one contender is not there are left out.
    """

    name: str
    unit: str
    contenders: tuple[Contender, ...]
    comparisons: tuple[Comparison, ...] = ()
    reference: Contender | None = None
    num_bytes: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = {each.name for each in self.contenders}
        kept = tuple(each for each in self.comparisons if {each.name, each.other} <= names)
        object.__setattr__(self, "comparisons", kept)


LOSS_TOLERANCE = 1e-4  # relative, after all steps in float32
WEIGHTS_TOLERANCE = 1e-3  # of the way that the training went; ranks that train apart differ by many times that


def check_outcome(outcome: Outcome, reference: Outcome | None) -> tuple[str, str]:
    """Hold an outcome against the reference.

    Returns:
        Why it is wrong, or nothing; and by what that was seen.
    """
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


Arrays = Sequence[npt.NDArray[Any]]


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
