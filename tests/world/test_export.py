"""The model of a run, written for use without ringtrain."""

import json
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

from ringtrain.errors import UsageError
from ringtrain.export import describe_loading, explaining_keras, find_parts
from ringtrain.run.checkpoint import read_checkpoint
from tests.world.conftest import RunRingtrain
from tests.world.processes import clean_environment, run_command
from tests.world.running import events

WORKLOAD = '''
import keras
import numpy as np
from layers_of_mine import Scale
from ringtrain.data.sources import from_arrays
from ringtrain.errors import DataError
from ringtrain.workloads.base import Sources, Workload


class Mine(Workload):
    """Averaged weights, moving statistics, a layer of its own; its data may be gone."""

    defaults = {"epochs": 3, "batch_size": 16, "optimizer": {"name": "adam", "lr": 0.05, "ema": 0.99}}

    def create_model(self):
        layers = [keras.Input((4,)), keras.layers.BatchNormalization(), Scale(), keras.layers.Dense(1)]
        return keras.Sequential(layers)

    def create_sources(self, data_dir, *, synthetic):
        if not (data_dir and (data_dir / "x.npy").exists()):
            raise DataError("there is no x.npy.")
        x = np.load(data_dir / "x.npy")
        y = x.sum(axis=1, keepdims=True)
        return Sources(train=from_arrays(x, y), evaluation=from_arrays(x, y))

    def loss(self, y, outputs):
        return keras.losses.mean_squared_error(y, outputs)
'''
LAYERS = """
import keras

@keras.saving.register_keras_serializable(package="mine")
class Scale(keras.layers.Layer):
    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")

    def call(self, x):
        return x * self.scale
"""
# A process that has Keras and the layer, but no ringtrain; it prints the loss over the evaluation's samples.
LOAD = """
import json, sys
import keras, numpy as np, tensorflow as tf
import layers_of_mine
x = np.load(sys.argv[3])
if sys.argv[1] == "keras":
    outputs = keras.saving.load_model(sys.argv[2])(x, training=False)
else:
    model = tf.saved_model.load(sys.argv[2])
    outputs = model.serve(x)
assert not [name for name in sys.modules if name.split(".")[0] == "ringtrain"]
print(json.dumps(float(np.mean((np.asarray(outputs, np.float64) - x.sum(axis=1, keepdims=True)) ** 2))))
"""


@pytest.mark.parametrize("form", ["keras", pytest.param("saved_model", marks=pytest.mark.slow)])
def test_an_exported_model_predicts_as_the_evaluated_one(
    run_ringtrain: RunRingtrain, tmp_path: Path, form: str
) -> None:
    (tmp_path / "mine.py").write_text(WORKLOAD)
    (tmp_path / "layers_of_mine.py").write_text(LAYERS)
    data = tmp_path / "data"
    data.mkdir()
    np.save(data / "x.npy", np.random.default_rng(0).normal(size=(48, 4)).astype(np.float32))
    env = {"PYTHONPATH": str(tmp_path)}
    trained = run_ringtrain(
        ["--workload", tmp_path / "mine.py", "--data_dir", data, "--out", tmp_path / "run"], env=env
    )
    assert trained.rc == 0, trained.stderr
    loss = events(tmp_path / "run", "eval")[-1]["loss"]
    step = events(tmp_path / "run", "eval")[-1]["step"]
    x = data.rename(tmp_path / "moved") / "x.npy"

    arguments = ["export", tmp_path / "run", "--workload", tmp_path / "mine.py"]
    arguments += ["--format", form, "--checkpoint", "newest"]
    exported = run_ringtrain(arguments, env=env)
    assert exported.rc == 0, exported.stderr
    assert "moving averages of the weights" in exported.stdout
    assert ("import what its own layers are made of: layers_of_mine" in exported.stdout) == (form == "keras")
    output = tmp_path / "run/export" / (f"step-{step:09d}.keras" if form == "keras" else f"step-{step:09d}")
    assert list(output.parent.glob(".*")) == []
    loaded = run_command(
        [sys.executable, "-c", LOAD, form, str(output), str(x)],
        env=clean_environment(PYTHONPATH=str(tmp_path)), timeout=60, cwd=tmp_path,
    )  # fmt: skip
    assert loaded.rc == 0, loaded.stderr
    assert json.loads(loaded.stdout) == pytest.approx(loss, rel=1e-5)

    again = run_ringtrain(arguments, env=env)
    assert (again.rc, "exists already, and is not changed" in again.stderr) == (2, True)
    variables = tmp_path / f"run/checkpoints/step-{step:09d}/variables.bin"
    variables.write_bytes(variables.read_bytes()[:-4] + b"none")
    other = tmp_path / ("other.keras" if form == "keras" else "other")
    damaged = run_ringtrain([*arguments, "--output", other], env=env)
    assert (damaged.rc, "its bytes have changed" in damaged.stderr) == (3, True)
    assert not other.exists()


SYNCHRONIZED = '''
import keras
import numpy as np
from ringtrain import Sources, SyncBatchNormalization, Workload, from_arrays

x = np.random.default_rng(0).normal(3.0, 2.0, size=(64, 5, 4)).astype("float32")


class Mine(Workload):
    """Normalizes over all ranks: in the model, in a model within it, and within a layer around another."""

    defaults = {"epochs": 2, "batch_size": 16}

    def create_model(self):
        layers = keras.layers
        inner = keras.Sequential([keras.Input((5, 4)), layers.Dense(4), SyncBatchNormalization()])
        around = layers.TimeDistributed(SyncBatchNormalization(), name="around")
        own = layers.Dense(3, dtype="mixed_bfloat16")
        return keras.Sequential([keras.Input((5, 4)), inner, around, own, layers.Flatten(), layers.Dense(1)])

    def create_sources(self, data_dir, *, synthetic):
        return Sources(train=from_arrays(x, x.sum(axis=(1, 2))[:, None] / 60))

    def loss(self, y, outputs):
        return keras.losses.mean_squared_error(y, outputs)
'''
# A process in which ringtrain cannot be imported.
LOAD_PLAINLY = """
import json, sys
sys.modules["ringtrain"] = None
import keras, numpy as np, tensorflow as tf
x = np.random.default_rng(1).normal(3.0, 2.0, size=(8, 5, 4)).astype("float32")
path = sys.argv[1]
if path.endswith(".keras"):
    model = keras.saving.load_model(path)
    outputs = model(x, training=False)
    kinds = [type(layer).__name__ for layer in (model.layers[0].layers[-1], model.layers[1].layer)]
    weights = np.concatenate([variable.numpy().ravel() for variable in model.weights]).tolist()
else:
    model = tf.saved_model.load(path)
    outputs, kinds, weights = model.serve(x), [], []
print(json.dumps([outputs.dtype.name if hasattr(outputs.dtype, "name") else outputs.dtype, kinds, weights,
                  np.asarray(outputs).tolist()]))
"""


OTHER_PRECISIONS = ("float32", "mixed_float16")


@pytest.mark.parametrize(
    "precision",
    ["mixed_bfloat16", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHER_PRECISIONS)],
)
def test_an_exported_model_is_plain_keras_in_float32(
    run_ringtrain: RunRingtrain, tmp_path: Path, precision: str
) -> None:
    workload = tmp_path / "mine.py"
    workload.write_text(SYNCHRONIZED)
    words = ["--workload", workload, "--out", tmp_path / "run"]
    trained = run_ringtrain([*words, "--precision", precision])
    assert trained.rc == 0, trained.stderr
    forms = ["keras", "saved_model"] if precision == "mixed_bfloat16" else ["keras"]
    results = {}
    for form in forms:
        output = tmp_path / ("model.keras" if form == "keras" else "model")
        words = ["export", tmp_path / "run", "--workload", workload, "--format", form]
        exported = run_ringtrain([*words, "--output", output])
        assert exported.rc == 0, exported.stderr
        assert "before that, import" not in exported.stdout
        loaded = run_command(
            [sys.executable, "-c", LOAD_PLAINLY, str(output)],
            env=clean_environment(),
            timeout=60,
            cwd=tmp_path,
        )
        assert loaded.rc == 0, loaded.stderr
        results[form] = json.loads(loaded.stdout)
    dtype, kinds, weights, outputs = results["keras"]
    assert (dtype, kinds) == ("float32", ["BatchNormalization"] * 2)
    saved = read_checkpoint(next((tmp_path / "run/checkpoints").glob("step-*"))).variables
    values = [value.ravel() for name, value in saved.items() if name.startswith("weights/")]
    np.testing.assert_array_equal(np.sort(weights), np.sort(np.concatenate(values)))
    if len(forms) > 1:
        assert results["saved_model"][0] == "float32"
        assert np.ravel(results["saved_model"][3]) == pytest.approx(np.ravel(outputs), rel=1e-5, abs=1e-6)


@keras.saving.register_keras_serializable(package="tests")
class Known(keras.layers.Layer):
    """Registered with Keras."""


class Unknown(keras.layers.Layer):
    """Not registered."""


def twice(x: keras.KerasTensor) -> keras.KerasTensor:
    return x + x


@keras.saving.register_keras_serializable(package="tests")
def thrice(x: keras.KerasTensor) -> keras.KerasTensor:
    return x + x + x


def test_custom_objects_needed_for_loading_are_found() -> None:
    inner = keras.Sequential([keras.Input((2,)), Unknown(), keras.layers.Dense(2, activation=twice)])
    model = keras.Sequential([keras.Input((2,)), Known(), keras.layers.Activation(thrice), inner])
    parts = find_parts(keras.saving.serialize_keras_object(model))
    assert parts == (["tests>Known", "tests>thrice"], ["Unknown", "twice"], False)
    lines = describe_loading(Path("model.keras"), "keras", parts)
    assert Known.__module__ in lines[1]
    assert "custom_objects={'Unknown': Unknown, 'twice': twice}" in lines[2]
    x = keras.Input((2,))
    plain = keras.Model(x, keras.layers.Dense(2, activation="relu")(keras.ops.exp(x) * x))
    assert find_parts(keras.saving.serialize_keras_object(plain)) == ([], [], False)


def test_code_in_a_model_is_found() -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Lambda(lambda x: x)])
    assert find_parts(keras.saving.serialize_keras_object(model)).has_code


def test_a_saved_model_within_a_model_is_code(tmp_path: Path) -> None:
    keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]).export(tmp_path / "saved", verbose=False)
    layer = keras.layers.TFSMLayer(str(tmp_path / "saved"), call_endpoint="serve")
    model = keras.Sequential([keras.Input((2,)), layer])
    assert find_parts(keras.saving.serialize_keras_object(model)).has_code


class Mute(keras.layers.Layer):
    """Takes what Keras cannot write down, and does not say how it is made."""

    def __init__(self, function: object) -> None:
        super().__init__()
        self.function = function


def test_a_model_that_keras_cannot_write_is_a_user_s_error() -> None:
    model = keras.Sequential([keras.Input((2,)), Mute(object())])
    with pytest.raises(UsageError, match=r"Keras cannot write this model as keras: .*--format saved_model"), \
         explaining_keras("keras"):  # fmt: skip
        keras.saving.serialize_keras_object(model)
