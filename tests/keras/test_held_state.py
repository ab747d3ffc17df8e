"""A stopped ``fit`` resumes bit for bit, whatever variables its model, optimizers, metrics and callbacks hold."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ringtrain.keras as hvd
from ringtrain.collectives import Collective
from ringtrain.errors import ReplicasDifferError, UsageError
from ringtrain.run.held_variables import find_optimizers, find_variables
from tests.keras.held_models import BATCHES, KINDS, MeanWeights, make_gan, make_gan_data
from tests.keras.test_kept import Stop, terminate
from tests.world.group import on_ranks
from tests.world.running import events

EPOCHS = 3


def bits(model: keras.Model, callback: MeanWeights) -> dict[str, bytes]:
    """Return all values that the fit has changed, by the paths of their variables."""
    held = find_variables(model)
    held |= {f"callback/{name}": variable for name, variable in find_variables(callback).items()}
    values = {}
    for name, variable in held.items():
        plain = variable.value if isinstance(variable, keras.Variable) else variable
        values[name] = np.asarray(tf.convert_to_tensor(plain)).tobytes()
    return values


def fit(out: str, kind: str, *, stop_at: int = 0, **settings: Any) -> tuple[int | None, dict[str, bytes], Any]:
    """Fit a model as a script does that has just been started. Return its exit code, values and logs."""
    hvd.init()
    keras.utils.clear_session()
    keras.utils.set_random_seed(3)
    make_model, make_data = KINDS[kind]
    model = make_model()
    means = MeanWeights()
    callbacks: list[Any] = [means]
    if stop_at:
        callbacks.append(Stop(stop_at, terminate))
    best_metric = "generator_loss" if kind == "gan" else "loss"
    callbacks.append(hvd.callbacks.Run(out, checkpoint_every=0, log_every=100, best_metric=best_metric, **settings))
    try:
        history = model.fit(make_data(), epochs=EPOCHS, verbose=0, callbacks=callbacks).history
    except SystemExit as end:
        return int(end.code or 0), bits(model, means), None
    return None, bits(model, means), history


@pytest.fixture
def directory(tmp_path: Path) -> str:
    return str(tmp_path)


@pytest.mark.parametrize("kind", ["gan", "stateful"])
@on_ranks(1, 2, slow=[3])
def test_everything_that_a_fit_changes_is_resumed(collective: Collective, kind: str, directory: str) -> None:
    _, whole, whole_history = fit(f"{directory}/whole", kind)
    stop_at = BATCHES + 2  # in the second epoch; several ranks hear it one step later
    code, _, _ = fit(f"{directory}/run", kind, stop_at=stop_at)
    assert code == 75
    code, resumed, history = fit(f"{directory}/run", kind)
    assert code is None
    first_step = events(Path(directory, "run"), "start")[-1]["first_step"]
    assert first_step == stop_at + (collective.world.size > 1)
    assert [name for name in whole if whole[name] != resumed.get(name)] == []
    assert whole.keys() == resumed.keys()
    for name, values in history.items():
        assert values == whole_history[name][1:], name


@on_ranks(2, slow=[3])
def test_state_of_the_rows_of_a_batch_needs_as_many_ranks(collective: Collective, directory: str) -> None:
    """The checkpoint is written by all ranks, and resumed by one that is alone."""
    from ringtrain.collectives.base import Solo
    from ringtrain.keras.rank_state import RANKS, gather_arrays, scatter_arrays
    from ringtrain.runtime.world import World

    rank = collective.world.rank
    alone = Solo(World(rank=0, size=1, local_rank=0, local_size=1, node="n", launcher="none"))
    for is_equal in (True, False):
        state = {"held/model/states/0": np.full((2, 3), 1.0 if is_equal else rank), "own/0": np.zeros(1)}
        parts = gather_arrays(collective, state)
        named = {f"{RANKS}{number}": part for number, part in enumerate(parts)}
        if is_equal:
            restored = scatter_arrays(alone, named, former_size=collective.world.size)
            assert list(restored) == ["held/model/states/0"]
            continue
        with pytest.raises(UsageError, match=rf"written by {len(parts)} ranks, each with its own 'model/states/0'"):
            scatter_arrays(alone, named, former_size=collective.world.size)


@on_ranks(2)
def test_a_slot_of_the_second_optimizer_that_differs_is_found(collective: Collective, directory: str) -> None:
    """One rank changes a slot of the generator's optimizer."""

    class Change(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            slot = self.model.optimizers_by_name["generator"].variables[-1]
            if batch == 1 and collective.world.rank == 1:
                slot.assign(slot + 1.0)

    hvd.init()
    keras.utils.set_random_seed(3)
    model = make_gan()
    run = hvd.callbacks.Run(directory, best_metric="generator_loss", check_replicas_every=1)
    with pytest.raises(SystemExit) as end:
        model.fit(make_gan_data(), verbose=0, callbacks=[Change(), run])
    assert end.value.code == ReplicasDifferError.exit_code
    message = events(Path(directory), "end")[-1]["message"] if collective.world.is_rank0 else "optimizers/"
    assert "optimizers/" in message


@on_ranks(1)
def test_an_optimizer_that_no_trace_can_build_is_refused_by_name(collective: Collective, directory: str) -> None:
    class Eager(type(make_gan())):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            assert float(tf.reduce_sum(data[0]).numpy())
            return super().train_step(data)

    hvd.init()
    model = Eager()
    model.build((None, 3))
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), run_eagerly=True)
    model.optimizers_by_name["generator"] = hvd.DistributedOptimizer(keras.optimizers.Adam(0.02))
    run = hvd.callbacks.Run(directory, best_metric="generator_loss")
    with pytest.raises(SystemExit) as end:
        model.fit(make_gan_data(), verbose=0, callbacks=[run])
    assert end.value.code == 2
    path = next(path for path in find_optimizers(model) if path != "optimizer")
    message = events(Path(directory), "end")[-1]["message"]
    assert f"model.{path} has no variables before its first step" in message


@on_ranks(1)
def test_an_elastic_state_restores_all_optimizers_and_layers(collective: Collective) -> None:
    hvd.init()
    for kind, (make_model, make_data) in KINDS.items():
        model = make_model()
        if kind == "gan":
            unbuilt = r"model\..*generator has no variables before its first step"
            with pytest.raises(UsageError, match=unbuilt):
                hvd.elastic.KerasState(model)
        model.fit(make_data(), verbose=0)
        state = hvd.elastic.KerasState(model)
        before = bits(model, MeanWeights())
        model.fit(make_data(), verbose=0)
        assert bits(model, MeanWeights()) != before
        state.restore()
        assert bits(model, MeanWeights()) == before


@on_ranks(2)
def test_ranks_with_another_second_optimizer_are_refused(collective: Collective) -> None:
    hvd.init()
    model = make_gan()
    other = keras.optimizers.Adam(0.02, beta_1=0.5 + 0.25 * collective.world.rank)
    model.optimizers_by_name["generator"] = hvd.DistributedOptimizer(other)
    with pytest.raises(UsageError, match=r"different values of beta_1 in the optimizer .*generator"):
        model.fit(make_gan_data(), verbose=0)
