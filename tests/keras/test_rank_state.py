"""What a ``fit`` keeps besides its weights: to whom it goes back, and what is never made of it."""

from __future__ import annotations

import keras
import numpy as np

from ringtrain.keras.rank_state import best_weights_of, counts_of, set_counts


def test_counts_go_to_the_callbacks_of_their_class() -> None:
    """Rank 0 alone saves the best model; its counts go to all ranks where there are others than before."""
    former = [keras.callbacks.ModelCheckpoint("best.keras"), *(keras.callbacks.EarlyStopping() for _ in range(2))]
    for callback, best in zip(former, (1.0, 2.0, 3.0), strict=True):
        callback.best = best
    former[2].best_weights = [np.ones(2)]
    stopping = [keras.callbacks.EarlyStopping() for _ in range(2)]
    set_counts(stopping, counts_of(former) | best_weights_of(former))
    assert [callback.best for callback in stopping] == [2.0, 3.0]
    assert stopping[0].best_weights is None
    assert stopping[1].best_weights[0].tolist() == [1.0, 1.0]
