"""Callbacks of Keras that write files or restore a model, on several ranks."""

import csv
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import ringtrain.keras as hvd
from ringtrain.collectives import Collective, all_gather_object
from ringtrain.errors import UsageError
from ringtrain.keras.writers import TARGETS
from tests.keras.test_guards import TapedModel
from tests.keras.training import dataset, make_batches, make_model
from tests.world.group import on_ranks

EPOCHS = 2


@contextmanager
def shared_directory() -> Iterator[Path]:
    """A directory that all ranks see. Collective."""
    path = hvd.broadcast_object(tempfile.mkdtemp() if hvd.rank() == 0 else "")
    try:
        yield Path(path)
    finally:
        hvd.allgather_object(None)
        if hvd.rank() == 0:
            shutil.rmtree(path)


def fit(model: keras.Model, callbacks: list[Any], **options: Any) -> None:
    """Train with a distributed optimizer; a tape of the model may reduce instead."""
    optimizer = keras.optimizers.SGD(0.1)
    if not isinstance(model, TapedModel):
        optimizer = hvd.DistributedOptimizer(optimizer)
    model.compile(optimizer, "mse")
    arguments = {"epochs": EPOCHS, "verbose": 0, **options}
    model.fit(dataset(make_batches(4, steps=2)), callbacks=callbacks, **arguments)


@on_ranks(1, 2, 3)
def test_one_rank_writes_a_file_that_all_ranks_name(collective: Collective) -> None:
    hvd.init()
    with shared_directory() as directory:
        callbacks = [
            keras.callbacks.CSVLogger(directory / "log.csv", append=True),
            keras.callbacks.ModelCheckpoint(directory / "model.keras"),
            keras.callbacks.TensorBoard(directory / "board", write_graph=False),
        ]
        model = make_model()
        fit(model, callbacks)
        fit(model, callbacks)
        hvd.allgather_object(None)
        with (directory / "log.csv").open() as file:
            rows = list(csv.reader(file))
        assert len(rows) == 1 + 2 * EPOCHS
        saved = keras.saving.load_model(directory / "model.keras", compile=False)
        for mine, right in zip(saved.get_weights(), model.get_weights(), strict=True):
            np.testing.assert_array_equal(mine, right)
        assert len(list((directory / "board" / "train").glob("*tfevents*"))) == 2  # fits
        assert not any(name.startswith("on_") for each in callbacks for name in vars(each))


@on_ranks(2)
def test_each_rank_writes_a_file_of_its_own(collective: Collective) -> None:
    hvd.init()
    with shared_directory() as directory:
        fit(make_model(), [keras.callbacks.CSVLogger(directory / f"log-{hvd.rank()}.csv")])
        hvd.allgather_object(None)
        lines = [len((directory / f"log-{rank}.csv").read_text().splitlines()) for rank in range(2)]
        assert lines == [1 + EPOCHS] * 2


@pytest.mark.parametrize("ranks", [[0, 1], [0], [1]])
@on_ranks(2)
def test_backup_and_restore_is_refused_before_training(collective: Collective, ranks: list[int]) -> None:
    hvd.init()
    model = make_model()
    before = model.get_weights()
    with shared_directory() as directory:
        backup = keras.callbacks.BackupAndRestore(directory / "backup")
        with pytest.raises(UsageError, match=r"BackupAndRestore .* on ranks? .*hvd\.callbacks\.Run"):
            fit(model, [backup] if hvd.rank() in ranks else [])
        assert not (directory / "backup").exists()
    for mine, right in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(mine, right)


@on_ranks(2)
def test_backup_and_restore_is_refused_with_a_tape(collective: Collective) -> None:
    hvd.init()
    with shared_directory() as directory, pytest.raises(UsageError, match="BackupAndRestore"):
        fit(TapedModel(make_model().layers), [keras.callbacks.BackupAndRestore(directory / "backup")])


@on_ranks(1)
def test_backup_and_restore_works_on_one_rank(collective: Collective) -> None:
    hvd.init()
    with shared_directory() as directory:
        fit(make_model(), [keras.callbacks.BackupAndRestore(directory / "backup")])


@on_ranks(2)
def test_first_epochs_are_compared_before_training(collective: Collective) -> None:
    hvd.init()
    with pytest.raises(UsageError, match=r"first epochs \(rank 0: 1, rank 1: 2\)\. .*initial_epoch"):
        fit(make_model(), [], initial_epoch=hvd.rank())
    with pytest.raises(UsageError, match=r"^rank 1 stopped after 0 epochs .*initial_epoch"):
        fit(make_model(), [], initial_epoch=EPOCHS * hvd.rank())
    fit(make_model(), [], initial_epoch=1)


@on_ranks(1)
def test_a_run_refuses_callbacks_that_restore_or_exchange_weights(collective: Collective) -> None:
    hvd.init()
    run = hvd.callbacks.Run("never")
    model = make_model()
    for other, words in [
        (keras.callbacks.BackupAndRestore("backup"), "Leave BackupAndRestore out"),
        (keras.callbacks.SwapEMAWeights(swap_on_epoch=True), "swap_on_epoch=False"),
    ]:
        with pytest.raises(UsageError, match=words):
            keras.callbacks.CallbackList([other, run], model=model)
    keras.callbacks.CallbackList([keras.callbacks.SwapEMAWeights(), run], model=model)


@on_ranks(2)
def test_averaged_weights_may_be_exchanged_on_all_ranks(collective: Collective) -> None:
    hvd.init()
    model = make_model()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, use_ema=True)), "mse")
    swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
    model.fit(dataset(make_batches(4)), epochs=EPOCHS, verbose=0, callbacks=[swap])
    digests = all_gather_object(collective, [w.tobytes().hex() for w in model.get_weights()], name="w")
    assert digests[0] == digests[1]


SAFE = {  # they write and restore nothing
    "Callback",
    "CallbackList",
    "EarlyStopping",
    "History",
    "LambdaCallback",
    "LearningRateScheduler",
    "ProgbarLogger",
    "ReduceLROnPlateau",
    "TerminateOnNaN",
}
LOOKED_AT = {"BackupAndRestore", "SwapEMAWeights"}


def test_every_callback_of_keras_is_looked_at() -> None:
    """A new one has to be sorted into one of these."""
    names = {name for name in dir(keras.callbacks) if name[0].isupper()}
    assert names <= SAFE | LOOKED_AT | set(TARGETS)
