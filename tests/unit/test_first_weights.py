"""Weights of files that a new run starts from (``init_from``)."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import keras
import numpy as np
import pytest

from ringtrain.errors import DataError, UsageError
from ringtrain.run.checkpoint import Checkpoint, write_files
from ringtrain.run.variables import name_variables, named_weights
from ringtrain.training.weights import take_weights


def job_of(model: keras.Model) -> Any:
    named = name_variables(weights=named_weights(model))
    step = SimpleNamespace(
        model=model, named_variables=named, averages=SimpleNamespace(pairs=[]), optimizer=keras.optimizers.SGD()
    )
    return SimpleNamespace(step=step)


def create_model(*, head: int = 2, head_name: str = "head", dtype: str = "float32") -> keras.Model:
    """A model in which Keras' numbers of layers, names and nesting differ; all weights are drawn at random."""
    layers = keras.layers
    body = keras.Sequential(
        [keras.Input((4,)), layers.Dense(3, name="a"), layers.BatchNormalization(name="norm")], name="body"
    )
    recurrent = layers.Bidirectional(layers.LSTM(2, name="lstm"), name="both")
    given = keras.Input((4,))
    inner = keras.Model(given, layers.Dropout(0.1)(body(given)), name="inner")
    given = keras.Input((5, 4))
    latent = recurrent(layers.TimeDistributed(inner, name="each")(given))
    model = keras.Model(given, layers.Dense(head, name=head_name, dtype=dtype)(latent), name="whole")
    for variable in [variable for _, variable in named_weights(model)]:
        variable.assign(np.random.default_rng().normal(size=variable.shape))
    return model


@pytest.mark.parametrize("name", ["a.weights.h5", "a.keras"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_all_weights_come_back_from_keras_files(name: str, dtype: str, tmp_path: Path) -> None:
    source, model = create_model(dtype=dtype), create_model(dtype=dtype)
    (source.save_weights if name.endswith("h5") else source.save)(tmp_path / name)
    lines = take_weights(job_of(model), tmp_path / name)
    number = len(named_weights(model))
    assert lines == [f"init_from {tmp_path / name}: {number} of {number} variables taken"]
    for (path, old), (_, new) in zip(named_weights(source), named_weights(model), strict=True):
        np.testing.assert_array_equal(np.asarray(old.value), np.asarray(new.value), err_msg=path)


def test_what_does_not_fit_is_listed_and_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "a.weights.h5"
    create_model(head=7).save_weights(file)
    model = create_model()
    before = model.get_layer("head").get_weights()
    lines = take_weights(job_of(model), file)
    assert lines[1:] == ["  new: head/kernel [4, 2], of shape [4, 7] there", "  new: head/bias [2], of shape [7] there"]
    for old, new in zip(before, model.get_layer("head").get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    lines = take_weights(job_of(create_model(head_name="other")), file)
    assert lines[1] == "  new: other/kernel [4, 2], not there"
    assert lines[-1] == "  not used: head/0, head/1"


def test_damaged_and_other_files_are_named(tmp_path: Path) -> None:
    job = job_of(create_model())
    for name in ("a.weights.h5", "a.keras"):
        (tmp_path / name).write_bytes(b"no such format")
        with pytest.raises(DataError, match=re.escape(f"init_from '{tmp_path / name}' cannot be read")):
            take_weights(job, tmp_path / name)
    with h5py.File(tmp_path / "a.weights.h5", "w") as file:
        file["secret"] = h5py.ExternalLink("/etc/hostname", "x")
        file.create_dataset("head/vars/1", (2,), "u1", external=[("/etc/hostname", 0, 2)])
    with pytest.raises(UsageError, match="holds none"):
        take_weights(job, tmp_path / "a.weights.h5")


@pytest.mark.parametrize("kind", ["a.weights.h5", "a.keras", "a.safetensors", "step-000000001"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e300])
def test_values_that_are_not_finite_are_named(kind: str, value: float, tmp_path: Path) -> None:
    """1e300 is too large for the model's float32."""
    dtype = "float64" if value == 1e300 else "float32"
    source, path = create_model(dtype=dtype), tmp_path / kind
    source.get_layer("head").set_weights([np.array([[0, 0], [0, value], [value, 0], [0, 0]]), np.zeros(2)])
    if kind.endswith(".h5"):
        source.save_weights(path)
    elif kind.endswith(".keras"):
        source.save(path)
    else:
        values = {f"weights/{name}": variable.numpy() for name, variable in named_weights(source)}
        if kind.startswith("step"):
            path.mkdir()
            write_files(path, Checkpoint(step=1, variables=values, progress={}, run={}))
        else:
            path.write_bytes(as_safetensors({name.removeprefix("weights/"): value for name, value in values.items()}))
    message = f"init_from '{path}' has values that are not finite (NaN or infinite) in head/kernel (2 of 8)."
    with pytest.raises(DataError, match=re.escape(message)):
        take_weights(job_of(create_model()), path)


def as_safetensors(values: dict[str, np.ndarray]) -> bytes:
    header, data = {}, b""
    for name, value in values.items():
        end = len(data) + value.nbytes
        dtype = f"F{8 * value.dtype.itemsize}" if value.dtype.kind == "f" else f"U{8 * value.dtype.itemsize}"
        header[name] = {"dtype": dtype, "shape": value.shape, "data_offsets": [len(data), end]}
        data += value.tobytes()
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def test_values_that_the_model_itself_creates_infinite_may_be_so(tmp_path: Path) -> None:
    """Such as a mask of a decoder."""

    @keras.saving.register_keras_serializable("tests")
    class Masked(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.kernel = self.add_weight(shape=(4,))
            self.mask = self.add_weight(
                shape=(4,), initializer=lambda shape, dtype: keras.ops.full(shape, -np.inf, dtype), trainable=False
            )

        def call(self, x: Any) -> Any:
            return x * self.kernel

    def create() -> keras.Model:
        given = keras.Input((4,))
        return keras.Model(given, Masked(name="masked")(given))

    create().save_weights(tmp_path / "a.weights.h5")
    assert "2 of 2 variables taken" in take_weights(job_of(create()), tmp_path / "a.weights.h5")[0]
