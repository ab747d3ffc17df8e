"""The state of a ``fit`` in a checkpoint other than weights and optimizer: of ranks and callbacks."""

from __future__ import annotations

import collections
import io
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from ringtrain.collectives import Collective, all_gather_object, run_on_rank0
from ringtrain.run.variables import is_seed_state

Arrays = dict[str, npt.NDArray[Any]]
RANKS = "ranks/"  # prefix in a checkpoint: packed state of one rank
CALLBACKS = "callbacks/"
# Counters of Keras' callbacks, which Keras resets in each ``fit``.
COUNTED = {
    keras.callbacks.EarlyStopping: ("wait", "best", "best_epoch", "stopped_epoch"),
    keras.callbacks.ReduceLROnPlateau: ("wait", "best", "cooldown_counter"),
    keras.callbacks.ModelCheckpoint: (
        "best", "epochs_since_last_save", "_batches_seen_since_last_saving", "_last_batch_seen",
    ),
}  # fmt: skip


def is_extra(name: str) -> bool:
    return name.startswith((RANKS, CALLBACKS))


def _own_variables(model: keras.Model) -> dict[str, keras.Variable]:
    """Variables that differ between ranks: moving statistics and seeds."""
    statistics = [v for layer in model._flatten_layers() for v in layer._non_trainable_variables]
    seeds = [v for v in model.variables if is_seed_state(v)]
    by_id = {id(v): v for v in (*statistics, *seeds)}
    return {f"own/{number}": v for number, v in enumerate(by_id.values())}


def metric_variables(model: keras.Model) -> list[keras.Variable]:
    """Sums over samples, which can be summed over ranks."""
    return [v for v in model.metrics_variables if getattr(v, "aggregation", "sum") == "sum"]


def add_metrics(model: keras.Model, values: Arrays) -> None:
    for number, variable in enumerate(metric_variables(model) if values else ()):
        saved = values.get(f"metrics/{number}")
        if saved is not None and saved.shape == tuple(variable.shape):
            variable.assign_add(saved)


def own_of(model: keras.Model) -> Arrays:
    """Return what this rank has of its own, with the metrics."""
    metrics = {f"metrics/{number}": v for number, v in enumerate(metric_variables(model))}
    return {name: _plain(v.value) for name, v in (_own_variables(model) | metrics).items()}


def set_own(model: keras.Model, values: Arrays) -> None:
    for name, variable in _own_variables(model).items():
        if name in values and values[name].shape == tuple(variable.shape):
            variable.assign(values[name])


def generator_states() -> Arrays:
    _, internal, gauss = random.getstate()
    states: Arrays = {
        "python": np.array(internal, np.uint32),
        "python_gauss": np.array([] if gauss is None else [gauss], np.float64),
    }
    numpy: Any = np.random.get_state(legacy=False)
    if numpy["bit_generator"] == "MT19937":  # the default; the state of a user-defined one is not saved
        states["numpy"] = np.append(numpy["state"]["key"], np.uint32(numpy["state"]["pos"]))
        states["numpy_gauss"] = np.array([numpy["has_gauss"], numpy["gauss"]], np.float64)
    return states


def set_generator_states(states: Arrays) -> None:
    if "python" in states:
        gauss = states["python_gauss"]
        random.setstate((3, tuple(states["python"].tolist()), float(gauss[0]) if gauss.size else None))
    if "numpy" in states:
        *key, position = states["numpy"].tolist()
        has_gauss, gauss = states["numpy_gauss"].tolist()
        np.random.set_state(("MT19937", np.array(key, np.uint32), position, int(has_gauss), gauss))


def _named(callbacks: Sequence[keras.callbacks.Callback]) -> Iterator[tuple[str, Any]]:
    """Keys are class and number: rank 0 may have other callbacks, such as ModelCheckpoint."""
    seen = collections.Counter[str]()
    for callback in callbacks:
        kind = type(callback).__name__
        yield f"{kind}/{seen[kind]}", callback
        seen[kind] += 1


def _counting(callbacks: Sequence[keras.callbacks.Callback]) -> Iterator[tuple[str, Any, str]]:
    for its, callback in _named(callbacks):
        for kind, names in COUNTED.items():
            if isinstance(callback, kind):
                yield from ((f"counts/{its}/{name}", callback, name) for name in names if hasattr(callback, name))


def counts_of(callbacks: Sequence[keras.callbacks.Callback]) -> Arrays:
    counts = {key: getattr(callback, name) for key, callback, name in _counting(callbacks)}
    return {key: np.asarray(value, np.float64) for key, value in counts.items() if value is not None}


def set_counts(callbacks: Sequence[keras.callbacks.Callback], values: Arrays) -> None:
    for key, callback, name in _counting(callbacks):
        if key in values:
            now = getattr(callback, name)
            setattr(callback, name, type(now)(values[key]) if isinstance(now, int) else float(values[key]))
    for its, callback in _named(callbacks):
        if isinstance(callback, keras.callbacks.EarlyStopping):
            saved = (values.get(f"{CALLBACKS}{its}/{place}") for place in itertools.count())
            callback.best_weights = list(itertools.takewhile(lambda v: v is not None, saved)) or callback.best_weights


def best_weights_of(callbacks: Sequence[keras.callbacks.Callback]) -> Arrays:
    """Equal on all ranks."""
    return {
        f"{CALLBACKS}{its}/{place}": _plain(weight)
        for its, callback in _named(callbacks)
        if isinstance(callback, keras.callbacks.EarlyStopping)
        for place, weight in enumerate(callback.best_weights or ())
    }


def _plain(value: Any) -> npt.NDArray[Any]:
    array = np.asarray(keras.ops.convert_to_numpy(value))
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array


def pack(arrays: Arrays) -> npt.NDArray[np.uint8]:
    buffer = io.BytesIO()
    named: dict[str, Any] = {name.replace("/", "|"): value for name, value in arrays.items()}
    np.savez(buffer, **named)
    return np.frombuffer(buffer.getvalue(), np.uint8)


def unpack(data: npt.NDArray[np.uint8]) -> Arrays:
    with np.load(io.BytesIO(data.tobytes()), allow_pickle=False) as arrays:
        return {name.replace("|", "/"): arrays[name] for name in arrays.files}


def gather_arrays(collective: Collective, arrays: Arrays) -> list[npt.NDArray[np.uint8]]:
    """Return every rank's packed arrays. Collective."""
    packed = pack(arrays)
    sizes = all_gather_object(collective, packed.size, name="fit/sizes")
    of_all = collective.all_gather(tf.constant(packed), name="fit/own").numpy()
    return np.split(of_all, np.cumsum(sizes)[:-1])


def scatter_arrays(collective: Collective, named: Mapping[str, npt.NDArray[Any]], *, former_size: int) -> Arrays:
    """Return this rank's arrays, and callbacks' best weights, of rank 0's checkpoint. Collective.

    If the number of ranks has changed, only arrays equal on all ranks.
    """
    world = collective.world
    packed = pack({name: value for name, value in named.items() if is_extra(name)})
    size = run_on_rank0(collective, lambda: int(packed.size), name="fit/own_size")
    mine = tf.constant(packed if world.is_rank0 else np.zeros(size, np.uint8))
    [of_all] = collective.broadcast([mine], name="fit/own_values")
    saved = unpack(of_all.numpy())
    own = unpack(saved[f"{RANKS}{world.rank if former_size == world.size else 0}"])
    if former_size != world.size:
        own = {name: value for name, value in own.items() if name.startswith("counts/")}
    return own | {name: value for name, value in saved.items() if name.startswith(CALLBACKS)}
