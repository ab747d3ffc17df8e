"""Which of a model's variables are what."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import keras


def is_seed_state(variable: keras.Variable) -> bool:
    """Whether a variable is the state of a seed generator (dropout's): broadcasting it would make all masks alike."""
    return variable.name == "seed_generator_state"
