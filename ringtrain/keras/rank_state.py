"""The state of a ``fit`` in a checkpoint other than weights and optimizer: of ranks and callbacks."""

from __future__ import annotations

import collections
import io
import itertools
import random
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from ringtrain.collectives import Collective, all_gather_object, run_on_rank0
from ringtrain.collectives.metric_states import COMBINE, leaf_metrics, merging_of
from ringtrain.errors import DataError, UsageError
from ringtrain.guard.replicas import hash_bits
from ringtrain.messages.defects import describe_defect
from ringtrain.run.held_variables import find_optimizers, find_variables, variable_id
from ringtrain.run.variables import is_seed_state
from ringtrain.runtime.private import all_layers, own_statistics_of

Arrays = dict[str, npt.NDArray[Any]]
RANKS = "ranks/"  # prefix in a checkpoint: packed state of one rank
CALLBACKS = "callbacks/"
HELD = "held/"  # prefix in the state of one rank: variables that Keras does not list
METRICS = "metrics/"
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
    statistics = [v for layer in all_layers(model) for v in own_statistics_of(layer)]
    seeds = [v for v in model.variables if is_seed_state(v)]
    by_id = {id(v): v for v in (*statistics, *seeds)}
    return {f"own/{number}": v for number, v in enumerate(by_id.values())}


def own_of(model: keras.Model) -> Arrays:
    """Return the variables that differ between ranks, and the metrics' local states."""
    arrays = {}
    for name, variable in _own_variables(model).items():
        arrays[name] = _plain(variable.value)
    for number, variable in enumerate(model.metrics_variables):
        arrays[f"{METRICS}{number}"] = _plain(variable.value)
    return arrays


def set_own(model: keras.Model, values: Arrays) -> None:
    for name, variable in _own_variables(model).items():
        if name in values and values[name].shape == tuple(variable.shape):
            variable.assign(values[name])


def has_all_metrics(model: keras.Model, values: Arrays) -> bool:
    """Return True if all metrics' variables that ``own_of`` has saved exist."""
    variables = model.metrics_variables
    for number, variable in enumerate(variables):
        saved = values.get(f"{METRICS}{number}")
        if saved is None or saved.shape != tuple(variable.shape):
            return False
    return f"{METRICS}{len(variables)}" not in values


def set_metrics(model: keras.Model, values: Arrays) -> bool:
    """Set the metrics' local states; return False, without a change, if not all variables exist yet."""
    if not has_all_metrics(model, values):
        return False
    for number, variable in enumerate(model.metrics_variables):
        variable.assign(values[f"{METRICS}{number}"])
    return True


def add_metrics(model: keras.Model, values: Arrays) -> None:
    """Merge saved states into those of the batches since. An unmergeable state is unchanged."""
    number = 0
    for metric in leaf_metrics(model.metrics):
        reductions = merging_of(metric).reductions
        for index, variable in enumerate(metric.variables):
            saved = values.get(f"{METRICS}{number}")
            number += 1
            if reductions is not None and saved is not None and saved.shape == tuple(variable.shape):
                combine = COMBINE[reductions[index]]
                variable.assign(combine([_plain(variable.value), saved]))


class HeldState:
    """The variables that Keras lists neither as weights nor as metrics, as far as the fit changes them.

    They are a rank's own: a stateful RNN keeps a state for each row of the rank's batch.
    """

    def __init__(self, model: keras.Model, callbacks: Sequence[keras.callbacks.Callback]) -> None:
        """Note the values at the start of the fit, before a restore."""
        self._model = model
        self._callbacks = callbacks
        self._first_digests = {}
        for name, variable in self._find({}).items():
            self._first_digests[name] = _digest(_value_of(variable))

    def changed(self, listed: Mapping[str, Any]) -> Arrays:
        """Return the values that differ from those at the start.

        Args:
            listed: variables that are saved in another way, by any names.

        Raises:
            UsageError: a changed variable holds strings.
        """
        changed: Arrays = {}
        for name, variable in self._find(listed).items():
            value = _value_of(variable)
            if _digest(value) == self._first_digests.get(name):
                continue
            if value.dtype.kind in "OSU":
                raise UsageError(
                    f"the variable {name.removeprefix(HELD)!r} holds strings, and this fit() has changed it. "
                    "callbacks.Run saves numbers only: keep numbers in it, or keep it outside of the model."
                )
            changed[name] = _to_float32(value)
        return changed

    def set(self, values: Arrays, listed: Mapping[str, Any]) -> None:
        """Restore what ``changed`` has returned.

        Raises:
            UsageError: the variable does not exist, or has another shape.
        """
        variables = self._find(listed)
        for name, value in values.items():
            if not name.startswith(HELD):
                continue
            variable = variables.get(name)
            if variable is None or tuple(variable.shape) != value.shape:
                now = "is not there" if variable is None else f"has shape {list(variable.shape)} now"
                raise UsageError(
                    f"the checkpoint holds {name.removeprefix(HELD)!r} of shape {list(value.shape)}, and at the start "
                    f"of this fit() it {now}. Create the same model and callbacks, with the same batch size, on as "
                    "many ranks as before; or start a new run with Run(..., resume='never')."
                )
            variable.assign(tf.cast(value, variable.dtype))

    def _find(self, listed: Mapping[str, Any]) -> dict[str, Any]:
        others = (*listed.values(), *_own_variables(self._model).values(), *self._model.metrics_variables)
        known = {variable_id(variable) for variable in (*others, *self._model.variables)}
        for optimizer in find_optimizers(self._model).values():
            known |= {variable_id(variable) for variable in optimizer.variables}
        owners = {"model": self._model}
        for name, callback in _named(self._callbacks):
            if not type(callback).__module__.startswith("ringtrain."):
                owners[f"callbacks/{name}"] = callback
        held = {}
        for owner_name, owner in owners.items():
            for path, variable in find_variables(owner).items():
                if variable_id(variable) not in known:
                    known.add(variable_id(variable))
                    held[f"{HELD}{owner_name}/{path}"] = variable
        return held


def _value_of(variable: Any) -> npt.NDArray[Any]:
    value = variable.value if isinstance(variable, keras.Variable) else variable
    return np.asarray(tf.convert_to_tensor(value))


def _digest(value: npt.NDArray[Any]) -> int | str:
    return repr(value.tolist()) if value.dtype.kind in "OSU" else hash_bits(value)


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
    return _to_float32(np.asarray(keras.ops.convert_to_numpy(value)))


def _to_float32(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Convert bfloat16, which NumPy's files lack."""
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array


def pack(arrays: Arrays) -> npt.NDArray[np.uint8]:
    buffer = io.BytesIO()
    named: dict[str, Any] = {name.replace("/", "|"): value for name, value in arrays.items()}
    np.savez(buffer, **named)
    return np.frombuffer(buffer.getvalue(), np.uint8)


def unpack(data: npt.NDArray[np.uint8]) -> Arrays:
    """Return the arrays that ``pack`` packed.

    Raises:
        DataError: it packed others, or the checkpoint was changed.
    """
    file = io.BytesIO(data.tobytes())
    try:
        with zipfile.ZipFile(file) as archive:
            if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
                raise ValueError("it is compressed")
        with np.load(file, allow_pickle=False) as arrays:
            return {name.replace("|", "/"): arrays[name] for name in arrays.files}
    except Exception as error:  # zipfile and NumPy raise many kinds for wrong content
        raise DataError(
            f"the checkpoint's state of ranks and callbacks cannot be read: {describe_defect(error).rstrip('. ')}. "
            "Remove this checkpoint, so that the run resumes from an older one.",
            reach="run",
        ) from None


def gather_arrays(collective: Collective, arrays: Arrays) -> list[npt.NDArray[np.uint8]]:
    """Return every rank's packed arrays. Collective."""
    packed = pack(arrays)
    sizes = all_gather_object(collective, packed.size, name="fit/sizes")
    of_all = collective.all_gather(tf.constant(packed), name="fit/own").numpy()
    return np.split(of_all, np.cumsum(sizes)[:-1])


def scatter_arrays(collective: Collective, named: Mapping[str, npt.NDArray[Any]], *, former_size: int) -> Arrays:
    """Return this rank's arrays, and callbacks' best weights, of rank 0's checkpoint. Collective.

    If the number of ranks has changed, only arrays equal on all ranks.

    Raises:
        UsageError: the number of ranks has changed, and the ranks had different states of a layer.
    """
    world = collective.world
    packed = pack({name: value for name, value in named.items() if is_extra(name)})
    size = run_on_rank0(collective, lambda: int(packed.size), name="fit/own_size")
    mine = tf.constant(packed if world.is_rank0 else np.zeros(size, np.uint8))
    [of_all] = collective.broadcast([mine], name="fit/own_values")
    saved = unpack(of_all.numpy())
    rank = world.rank if former_size == world.size else 0
    own = unpack(saved[f"{RANKS}{rank}"])
    if former_size != world.size:
        states = [unpack(value) for name, value in saved.items() if name.startswith(RANKS)]
        _require_equal_held(states, size=world.size)
        own = {name: value for name, value in own.items() if name.startswith(("counts/", HELD))}
    return own | {name: value for name, value in saved.items() if name.startswith(CALLBACKS)}


def _require_equal_held(states: Sequence[Arrays], *, size: int) -> None:
    """Refuse another number of ranks for state that belongs to the rows of a rank's batch."""
    for name, first in states[0].items():
        if not name.startswith(HELD):
            continue
        if any(name not in state or not np.array_equal(state[name], first) for state in states):
            raise UsageError(
                f"the checkpoint was written by {len(states)} ranks, each with its own {name.removeprefix(HELD)!r} "
                f"(a stateful layer keeps one for each row of a batch), and now the number of ranks is {size}. Resume "
                f"with {len(states)} ranks, or start a new run with Run(..., resume='never')."
            )
