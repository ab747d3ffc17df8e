"""What is saved is plain Keras, and what is loaded goes on distributed."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import keras
import numpy as np
import pytest

import ringtrain.keras as hvd
from ringtrain.collectives import Collective
from ringtrain.keras.distributed import find_distributed
from tests.keras.training import dataset, largest_difference, make_batches, make_model, split_batches, train
from tests.world.group import on_ranks
from tests.world.processes import clean_environment

LOAD_IN_PLAIN_KERAS = """
import sys, keras
model = keras.models.load_model(sys.argv[1])
assert not any(name.startswith(("ringtrain", "horovod")) for name in sys.modules)
print(type(model.optimizer).__module__, type(model.optimizer).__name__, int(model.optimizer.iterations.numpy()))
"""


@keras.saving.register_keras_serializable(package="tests")
class OwnOptimizer(keras.optimizers.SGD):
    """An optimizer that a user wrote."""


@on_ranks(2)
def test_the_configuration_is_that_of_the_plain_optimizer(collective: Collective) -> None:
    for create in (lambda: keras.optimizers.Adam(0.5, name="mine"), lambda: OwnOptimizer(0.5, name="mine")):
        plain = keras.saving.serialize_keras_object(create())
        distributed = hvd.DistributedOptimizer(create())
        assert keras.saving.serialize_keras_object(distributed) == plain
        copy = distributed.from_config(distributed.get_config())
        assert copy.get_config() == distributed.get_config()
        assert find_distributed(distributed) is distributed
        assert find_distributed(copy) is copy


@pytest.fixture
def directory(tmp_path: Path) -> str:
    return str(tmp_path)


@on_ranks(2, timeout=120)
def test_a_saved_model_resumes_its_training(collective: Collective, directory: str) -> None:
    for policy, name in (("float32", "plain"), ("mixed_float16", "scaled")):
        keras.config.set_dtype_policy(policy)
        path = Path(directory) / f"{name}-{collective.world.rank}.keras"
        batches = split_batches(make_batches(4))
        model = make_model()
        train("fit", model, hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), batches)
        model.save(path)
        if (collective.world.rank, name) == (0, "plain"):
            load_in_plain_keras(path)
        loaded = hvd.load_model(path)
        assert find_distributed(loaded.optimizer) is not None
        assert int(loaded.optimizer.iterations.numpy()) == int(model.optimizer.iterations.numpy()) > 0
        for each in (model, loaded):
            each.fit(dataset(batches[:4]), verbose=0)
        assert largest_difference(loaded, model) == 0.0


def load_in_plain_keras(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        config = json.loads(archive.read("config.json"))
    assert config["compile_config"]["optimizer"]["module"] == "keras.optimizers"
    command = [sys.executable, "-c", LOAD_IN_PLAIN_KERAS, str(path)]
    run = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=60, cwd="/")
    assert run.stdout.split() == ["keras.src.optimizers.adam", "Adam", "10"], run.stderr


@on_ranks(2)
def test_own_optimizer_classes_are_loaded(collective: Collective, directory: str) -> None:
    class Unregistered(keras.optimizers.SGD):
        pass

    path = Path(directory) / f"own-{collective.world.rank}.keras"
    model = make_model()
    model.compile(hvd.DistributedOptimizer(Unregistered(0.1)))
    model.save(path)
    loaded = hvd.load_model(path, custom_optimizers=[Unregistered])
    assert loaded.optimizer.__class__ is Unregistered
    np.testing.assert_array_equal(loaded.get_weights()[0], model.get_weights()[0])
