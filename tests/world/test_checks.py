"""Ranks that cannot sum, or share a GPU, are refused before anything is trained."""

import os
import re
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from ringtrain.collectives import Collective
from ringtrain.collectives.connect import require_working_sums
from ringtrain.errors import UsageError
from ringtrain.runtime.devices import SHARED_GPUS, plan_devices
from ringtrain.runtime.machine import read_machine
from ringtrain.terminal.startup import describe_start
from tests.world.group import GLOO, on_ranks


@on_ranks(2, 3)
def test_ranks_that_have_the_same_gpu_are_refused_on_all(collective: Collective) -> None:
    node = collective.world.node
    with pytest.raises(UsageError, match=rf"^ranks 0, 1 on {re.escape(node)} have the same GPU \(abc\)") as caught:
        require_working_sums(collective, "abc" if collective.world.rank < 2 else "def")
    assert caught.value.reach == "run"


@on_ranks(2, 3, GLOO)
def test_ranks_on_cores_or_on_gpus_of_their_own_may_train(collective: Any) -> None:
    require_working_sums(collective, None)
    require_working_sums(collective, f"gpu {collective.world.rank}")
    world = collective.world
    with patch.object(collective, "world", replace(world, node=f"node{world.rank}")):
        require_working_sums(collective, "abc")


@on_ranks(2, 3)
def test_a_mix_of_cores_and_gpus_is_refused_on_all_ranks(collective: Collective) -> None:
    world = collective.world
    with pytest.raises(UsageError, match=rf"^rank 0 on {re.escape(world.node)} computes on cores") as caught:
        require_working_sums(collective, f"gpu {world.rank}" if world.rank else None)
    assert caught.value.reach == "run"


@on_ranks(2)
def test_ranks_may_share_a_gpu_if_the_user_allows_nccl_to(collective: Collective) -> None:
    with patch.dict(os.environ, {SHARED_GPUS: "1"}):
        require_working_sums(collective, "abc")


@on_ranks(2)
def test_nodes_with_gpus_invisible_to_tensorflow_are_named(collective: Collective) -> None:
    """A machine with a driver and without a GPU cannot be had here: the plan says that there is one."""
    machine = replace(read_machine(os.environ), may_have_gpus=True)
    plan = plan_devices(collective.world, machine, os.environ)
    warnings = {}
    for hidden in (None, "", "-1"):
        kept = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        with patch.dict(os.environ, kept if hidden is None else {"CUDA_VISIBLE_DEVICES": hidden}, clear=hidden is None):
            lines = describe_start(collective, plan, "core 0")
        warnings[hidden] = [line for line in lines if line.startswith("warning: ")]
    [line] = warnings.pop(None)
    assert line.startswith(f"warning: {collective.world.node} has NVIDIA's driver")
    assert warnings == {"": [], "-1": []}


@on_ranks(1)
def test_one_rank_may_train(collective: Collective) -> None:
    require_working_sums(collective, "abc")


@pytest.mark.parametrize("gpu", [None, "gpu"])
@on_ranks(2, 3)
def test_a_backend_that_does_not_sum_is_refused_on_all_ranks(collective: Any, gpu: str | None) -> None:
    """As Horovod's do on a GPU that its kernels were not compiled for."""
    size, last = collective.world.size, collective.world.size - 1
    all_reduce = collective.all_reduce

    def reduce_on_others(tensors: Any, *, name: str) -> Any:
        totals = all_reduce(tensors, name=name)
        return [*totals[:-1], tensors[-1]] if collective.world.rank == last else totals

    right = size * (size + 1) // 2
    remedy = "make setup GPU=1" if gpu else r"Compile it again: make setup\."
    with (
        patch.object(collective, "all_reduce", reduce_on_others),
        pytest.raises(UsageError, match=rf"all ranks is {right}, but {size} on rank {last}\. .*{remedy}") as caught,
    ):
        require_working_sums(collective, gpu and f"{gpu} {collective.world.rank}")
    assert caught.value.reach == "run"
