"""ringtrain.keras holds every public name of Horovod's Keras modules, with its arguments."""

import inspect
import types
from pathlib import Path

import horovod.keras
import horovod.tensorflow.keras
import numpy as np
import pytest

import ringtrain.keras as hvd
from ringtrain.collectives import Collective
from ringtrain.errors import UsageError
from tests.world.group import on_ranks

# Helpers that those modules import for themselves.
NOT_THEIR_OWN = {"is_version_greater_equal_than"}
PAGE = Path(__file__).parents[2] / "docs" / "coming-from-horovod.md"


def public_names(module: types.ModuleType) -> set[str]:
    names = {name for name, value in vars(module).items() if not name.startswith("_") and not inspect.ismodule(value)}
    return names - NOT_THEIR_OWN


@pytest.mark.parametrize("module", [horovod.tensorflow.keras, horovod.keras])
def test_every_public_name_is_there(module: types.ModuleType) -> None:
    assert public_names(module) <= set(hvd.__all__)
    assert public_names(module.callbacks) <= public_names(hvd.callbacks)
    assert set(horovod.tensorflow.keras.elastic.__all__) <= public_names(hvd.elastic)


def test_all_lists_every_public_name() -> None:
    assert (public_names(hvd) - {"Any", "PAGE", "NOT_HERE"}) | {"callbacks", "elastic"} == set(hvd.__all__)


NOT_THERE = {
    "broadcast_optimizer_state": "it is PyTorch's; use broadcast_variables",
    "broadcast_parameters": "it is PyTorch's; use broadcast_variables",
    "broadcast_object_fn": "it needs a session of TensorFlow 1; use broadcast_object",
    **dict.fromkeys(("split_list", "gpu_available"), "it is internal to Horovod; import horovod.tensorflow to use it"),
}


@pytest.mark.parametrize("name", NOT_THERE)
def test_an_unsupported_name_gives_the_remedy(name: str) -> None:
    with pytest.raises(AttributeError, match=f"ringtrain.keras has no '{name}': {NOT_THERE[name]}.*See docs/"):
        getattr(hvd, name)
    with pytest.raises(ImportError, match=f"ringtrain.keras has no '{name}': {NOT_THERE[name]}.*See docs/"):
        exec(f"from ringtrain.keras import {name}")
    assert not hasattr(hvd, name)


def test_an_unknown_name_gives_python_s_own_error() -> None:
    with pytest.raises(AttributeError, match=r"module 'ringtrain\.keras' has no attribute 'sise'"):
        hvd.sise  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'sise'"):
        exec("from ringtrain.keras import sise")


OURS = [
    (horovod.tensorflow.keras, hvd, "DistributedOptimizer"),
    (horovod.keras, hvd, "PartialDistributedOptimizer"),
    (horovod.tensorflow.keras, hvd, "load_model"),
    (horovod.tensorflow, hvd, "DistributedGradientTape"),
    (horovod.tensorflow, hvd, "PartialDistributedGradientTape"),
    (horovod.tensorflow, hvd, "broadcast_variables"),
    *[
        (horovod.tensorflow.keras.callbacks, hvd.callbacks, name)
        for name in sorted(public_names(horovod.tensorflow.keras.callbacks))
    ],
]


@pytest.mark.parametrize(("theirs", "mine", "name"), OURS)
def test_arguments_and_defaults_are_upstream_s(theirs: types.ModuleType, mine: types.ModuleType, name: str) -> None:
    def arguments(function: object) -> list[tuple[str, object]]:
        parameters = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
        return [(parameter.name, parameter.default) for parameter in parameters]

    assert arguments(getattr(mine, name)) == arguments(getattr(theirs, name))


OPERATIONS = (
    "allgather",
    "allreduce",
    "alltoall",
    "broadcast",
    "broadcast_",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "reducescatter",
)


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_takes_the_arguments_of_both_interfaces(name: str) -> None:
    """By position those of Keras' interface, if it has the operation; by name those of either."""
    mine = inspect.signature(getattr(hvd, name)).parameters
    theirs = inspect.signature(getattr(horovod.tensorflow, name)).parameters
    assert theirs.keys() - {"tensor"} <= mine.keys()
    of_keras = getattr(horovod.tensorflow.keras, name, None)
    first = list(inspect.signature(of_keras).parameters if of_keras else theirs)
    assert list(mine)[1 : len(first)] == first[1:]


def test_the_page_names_every_name() -> None:
    page = PAGE.read_text()
    names = set(hvd.__all__) | public_names(hvd.callbacks) & public_names(horovod.tensorflow.keras.callbacks)
    assert not [name for name in sorted(names) if f"`{name}`" not in page]


@on_ranks(2)
def test_reexported_functions_work(collective: Collective) -> None:
    rank = collective.world.rank
    hvd.init()
    assert (hvd.rank(), hvd.size(), hvd.is_initialized()) == (rank, 2, True)
    np.testing.assert_allclose(hvd.allreduce([1.0 + rank]), [1.5])
    np.testing.assert_allclose(hvd.allgather([float(rank)]), [0.0, 1.0])
    np.testing.assert_allclose(hvd.broadcast([float(rank)], 1), [1.0])
    np.testing.assert_allclose(hvd.reducescatter([1.0 + rank, 3.0]), [[1.5], [3.0]][rank])
    assert hvd.broadcast_object({"rank": rank}, 1) == {"rank": 1}
    assert hvd.allgather_object(rank) == [0, 1]
    with pytest.raises(RuntimeError, match="broadcast_variables"):
        hvd.broadcast_global_variables(0)


def test_keras_must_run_on_tensorflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keras.config.backend", lambda: "jax")
    with pytest.raises(UsageError, match="KERAS_BACKEND=tensorflow"):
        hvd.init()
