"""What a ``fit`` keeps besides its weights: to whom it goes back, and what is never made of it."""

from unittest import mock

import keras
import numpy as np
import tensorflow as tf

from ringtrain.keras import batches
from ringtrain.keras.rank_state import best_weights_of, counts_of, set_counts


def test_counts_go_to_the_callbacks_of_their_class() -> None:
    """Rank 0 alone saves the best model; its counts go to all ranks where there are others than before."""
    former = [keras.callbacks.ModelCheckpoint("best.keras"), *(keras.callbacks.EarlyStopping() for _ in range(2))]
    for callback, best in zip(former, (1.0, 2.0, 3.0), strict=True):
        callback.best = best
    former[2].best_weights = [np.ones(2)]
    stopping = [keras.callbacks.EarlyStopping() for _ in range(2)]
    for callback in stopping:
        callback.on_train_begin()  # before, the callback of an older Keras has no attribute ``best``
    set_counts(stopping, counts_of(former) | best_weights_of(former))
    assert [callback.best for callback in stopping] == [2.0, 3.0]
    assert stopping[0].best_weights is None
    assert stopping[1].best_weights[0].tolist() == [1.0, 1.0]


def test_the_state_of_a_long_buffer_is_never_made() -> None:
    images = tf.data.Dataset.from_tensors(tf.zeros([256, 256, 4])).repeat()  # 1 MiB each
    for length, expected in ((2, b"state"), (10_000, b"")):
        of_fit = batches.Batches()
        of_fit._iterator = iter(images.shuffle(length).batch(2))
        with mock.patch.object(batches, "read_iterator_state", return_value=b"state") as read:
            assert of_fit.read_state(1)["data"].tobytes() == expected
        assert read.called == bool(expected)
