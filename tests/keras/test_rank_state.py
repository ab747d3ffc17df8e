"""What a ``fit`` keeps besides its weights: to whom it goes back, and what is never made of it."""

import io
import zipfile
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

from ringtrain.errors import DataError
from ringtrain.keras import batches
from ringtrain.keras.rank_state import best_weights_of, counts_of, pack, set_counts, unpack


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


def archive_of(content: bytes, *, compression: int = zipfile.ZIP_STORED, name: str = "a.npy") -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        archive.writestr(name, content)
    return file.getvalue()


def array_of(description: bytes) -> bytes:
    """A file of NumPy with this header, without values."""
    return b"\x93NUMPY\x01\x00v\x00" + description.ljust(117) + b"\n"


TERABYTES = array_of(b"{'descr': '<f4', 'fortran_order': False, 'shape': (1099511627776,)}")
OBJECTS = array_of(b"{'descr': '|O', 'fortran_order': False, 'shape': (1,)}")
FOREIGN = {
    "no archive": (b"no such format", "BadZipFile"),
    "compressed": (archive_of(bytes(2**20), compression=zipfile.ZIP_DEFLATED), "it is compressed"),
    "terabytes": (archive_of(TERABYTES), "MemoryError|ValueError|EOFError"),
    "objects": (archive_of(OBJECTS), "pickle"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_the_state_of_ranks_that_was_not_packed_here_is_refused(kind: str) -> None:
    content, reason = FOREIGN[kind]
    with pytest.raises(DataError, match=f"state of ranks and callbacks cannot be read: .*({reason})"):
        unpack(np.frombuffer(content, np.uint8))


def test_packed_arrays_come_back() -> None:
    arrays = {"a/b": np.arange(3), "c": np.ones(2, "float32")}
    unpacked = unpack(pack(arrays))
    assert unpacked.keys() == arrays.keys()
    for name, value in arrays.items():
        np.testing.assert_array_equal(unpacked[name], value)
