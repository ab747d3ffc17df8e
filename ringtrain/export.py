"""``ringtrain export``: a run's model for use without ringtrain, as Keras' own file or as a SavedModel."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import keras

from ringtrain.collectives.normalization import SyncBatchNormalization
from ringtrain.config import Config
from ringtrain.errors import DataError, RingtrainError, UsageError
from ringtrain.run.checkpoint import Checkpoint, read_checkpoint
from ringtrain.run.directory import refuse_taken
from ringtrain.run.variables import name_variables, named_weights
from ringtrain.runtime.private import all_layers
from ringtrain.training.creation import create_model, set_up_keras
from ringtrain.training.job import read_sources
from ringtrain.workloads.base import Workload

Format = Literal["keras", "saved_model"]


class Parts(NamedTuple):
    registered: list[str]  # registered with Keras, such as ``ringtrain>MirrorAverage``
    unregistered: list[str]
    has_code: bool  # Lambda function or TFSMLayer, which Keras refuses to load in safe mode


def export(workload: Workload, config: Config, checkpoint_path: Path, output: Path, form: Format) -> list[str]:
    """Write a checkpoint's model, with averaged weights if evaluation uses them.

    Atomic; never overwrites. Returns lines for the user: contents, and how to load them.
    """
    checkpoint = read_checkpoint(checkpoint_path)
    model = rebuild_model(workload, in_float32(config), checkpoint)
    use_float32(model)
    with explaining_keras(form):
        use_plain_normalization(model)
    with explaining_keras(form):
        parts = find_parts(keras.saving.serialize_keras_object(model)) if form == "keras" else Parts([], [], False)
    if parts.has_code:
        raise UsageError(
            f"the model of {config.workload!r} has a Lambda layer or a TFSMLayer, whose code Keras will not load from "
            "a file. Make it a layer of a class, or give --format saved_model."
        )
    write_model(model, output, form)
    return [
        f"{output}: the model of step {checkpoint.step}, {model.count_params():,} parameters"
        + (", moving averages of the weights" if config.optimizer.ema else ""),
        *describe_loading(output, form, parts),
    ]


def in_float32(config: Config) -> Config:
    """Return the settings without mixed precision, whose weights are float32 already."""
    if config.precision in ("mixed_float16", "mixed_bfloat16"):
        return replace(config, precision="float32")
    return config


def use_float32(model: keras.Model) -> None:
    """Make layers compute in float32 that have a mixed precision of their own."""
    for layer in all_layers(model):
        if layer.dtype_policy.name in ("mixed_float16", "mixed_bfloat16"):
            layer.dtype_policy = "float32"


def use_plain_normalization(model: keras.Model) -> None:
    """Make each ``SyncBatchNormalization`` that Keras would write a ``BatchNormalization``.

    In inference they are equal. Those that code of another layer creates are left: Keras does not
    write them, and the code creates them again.
    """
    written = keras.saving.serialize_keras_object(model)
    names = {
        item["config"]["name"]
        for item in _named_objects(written)
        if item["class_name"] == SyncBatchNormalization.__name__
    }
    for layer in all_layers(model):
        if type(layer) is SyncBatchNormalization and layer.name in names:
            # It adds no state of its own, so that the object may change its class.
            object.__setattr__(layer, "__class__", keras.layers.BatchNormalization)


def rebuild_model(workload: Workload, config: Config, checkpoint: Checkpoint) -> keras.Model:
    set_up_keras(config)
    missing: DataError | None = None
    try:
        read_sources(workload, config, None)  # model shapes may depend on the data
    except DataError as error:
        missing = error
    try:
        model = create_model(workload)
        set_values(model, checkpoint)
    except Exception as error:
        if missing is not None:
            raise missing from error
        raise
    return model


def set_values(model: keras.Model, checkpoint: Checkpoint) -> None:
    saved = {name: v for name, v in checkpoint.variables.items() if name.startswith(("weights/", "averages/"))}
    wanted = name_variables(weights=named_weights(model))
    if any(name.startswith("averages/") for name in saved):
        wanted |= name_variables(averages=[(v.path, v) for v in model.trainable_variables])
    of_checkpoint = {name: value.shape for name, value in saved.items()}
    of_model = {name: tuple(variable.shape) for name, variable in wanted.items()}
    wrong = sorted(name for name in saved | wanted if of_checkpoint.get(name) != of_model.get(name))
    if wrong:
        raise UsageError(
            f"the model is not the one of the checkpoint: {', '.join(wrong[:5])}"
            f"{f' and {len(wrong) - 5} more' if len(wrong) > 5 else ''} differ. Bring the former one back."
        )
    for name, variable in wanted.items():  # averages last: they replace the weights
        variable.assign(saved[name])


def write_model(model: keras.Model, output: Path, form: Format) -> None:
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        directory = Path(tempfile.mkdtemp(prefix=".writing-", dir=output.parent))
    except OSError as error:
        raise UsageError(f"{str(output)!r} cannot be written: {error.strerror}. Give another with --output.") from error
    try:
        written = directory / ("model.keras" if form == "keras" else "model")
        with explaining_keras(form):
            if form == "keras":
                model.save(written)
            else:
                model.export(written, format="tf_saved_model", verbose=False)
        take_name(written, output)
    except OSError as error:
        raise RingtrainError(f"{str(output)!r} cannot be written: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def explaining_keras(form: Format) -> Iterator[None]:
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        other = "saved_model" if form == "keras" else "keras"
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise UsageError(
            f"Keras cannot write this model as {form}: {reason.rstrip('.')}. Mend the layer, or give --format {other}."
        ) from error


def take_name(written: Path, output: Path) -> None:
    refuse_taken(output)
    if written.is_dir():
        os.mkdir(output)  # fails if it exists; os.rename would replace an empty directory
        os.rename(written, output)
    else:
        os.link(written, output)


def find_parts(serialized: Mapping[str, Any]) -> Parts:
    named = list(_named_objects(serialized))
    own = [item for item in named if item.get("registered_name") and not (item["module"] or "").startswith("keras.")]
    # For functions, "config" is the name.
    names = {item["config"] if item["class_name"] == "function" else item["registered_name"] for item in own}
    registered = {name for name in names if ">" in name}
    has_code = any(item["class_name"] in ("__lambda__", "TFSMLayer") for item in named)
    return Parts(sorted(registered), sorted(names - registered), has_code)


def describe_loading(output: Path, form: Format, parts: Parts) -> list[str]:
    if form == "saved_model":
        return [f"load it with model = tf.saved_model.load({str(output)!r}); model.serve(x) predicts"]
    lines = [f"load it with keras.saving.load_model({str(output)!r})"]
    modules = sorted({keras.saving.get_registered_object(name).__module__ for name in parts.registered})
    if modules:
        places = ", ".join(_importable(module) for module in modules)
        lines.append(f"before that, import what its own layers are made of: {places}")
    if parts.unregistered:
        objects = ", ".join(f"{name!r}: {name}" for name in parts.unregistered)
        lines.append(
            f"with custom_objects={{{objects}}}, which are not registered with Keras: "
            "@keras.saving.register_keras_serializable() above them makes an import enough"
        )
    return lines


def _importable(module: str) -> str:
    """Return a module's name for the user's imports; within ringtrain a workload file's name differs."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return Path(file).stem if module.startswith("ringtrain_user_") and file else module


def _named_objects(value: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(value, Mapping):
        if "class_name" in value:
            yield value
        for inner in value.values():
            yield from _named_objects(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _named_objects(inner)
