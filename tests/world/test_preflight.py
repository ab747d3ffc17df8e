"""Ranks that were not started alike, or have not the same data or model, stop at once and say who has what."""

import contextlib
import importlib
import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import keras
import pytest

from ringtrain.collectives import Collective, all_gather_object
from ringtrain.config import Config, OptimizerConfig
from ringtrain.errors import UsageError
from ringtrain.guard import preflight
from ringtrain.guard.preflight import ENTRIES_PER_BLOCK, require_alike, require_same_start
from ringtrain.training.job import create_job
from ringtrain.workloads.base import Workload
from ringtrain.workloads.digits import Digits
from tests.world.conftest import RunRingtrain
from tests.world.group import GLOO, on_ranks
from tests.world.test_runs import WORKLOADS, error_lines, events

SECONDS_TO_STOP = 1.0


@contextlib.contextmanager
def nodes_by_rank(collective: Any) -> Iterator[None]:
    """As if each rank were on a host of its own."""
    world = collective.world
    collective.world = replace(world, node=f"node{world.rank}")
    try:
        yield
    finally:
        collective.world = world


def refusal(collective: Any, act: Any, *, seconds: float = SECONDS_TO_STOP) -> str:
    """What all ranks are told, alike and in time, when they do this."""
    start = time.monotonic()
    with nodes_by_rank(collective), pytest.raises(UsageError) as caught:
        act()
    assert time.monotonic() - start < seconds
    assert caught.value.reach == "run"
    assert len(set(all_gather_object(collective, str(caught.value), name="refusal"))) == 1
    return str(caught.value)


def expected_line(fact: str, odd: int, size: int, odd_value: str, value: str) -> str:
    """A difference of one rank; of two, the first is the one that the other differs from."""
    others = [rank for rank in range(size) if rank != odd]
    if size == 2:
        values = [value, value]
        values[odd] = odd_value
        return f"{fact}: rank 1 on node1 has {values[1]}, rank 0 on node0 has {values[0]}"
    return f"{fact}: rank {odd} on node{odd} has {odd_value}, ranks {others[0]}, {others[1]} have {value}"


CONFIGS: dict[str, tuple[Config, str, str]] = {
    "seed": (Config(seed=3), "3", "0"),
    "accumulate": (Config(accumulate=2), "2", "1"),
    "optimizer.lr": (Config(optimizer=OptimizerConfig(lr=0.5)), "0.5", "0.01"),
    "options.width": (Config(options={"width": 7}), "7", "nothing"),
}


@on_ranks(2, 3, GLOO)
def test_a_differing_setting_is_named_with_its_rank_and_host(collective: Collective) -> None:
    rank, size = collective.world.rank, collective.world.size
    for odd in range(size):
        for fact, (other, odd_value, value) in CONFIGS.items():
            config = other if rank == odd else Config()
            message = refusal(
                collective, lambda config=config: require_same_start(collective, config, command="train", environ={})
            )
            assert message.splitlines()[1:] == [f"  {expected_line(fact, odd, size, odd_value, value)}"]


@pytest.mark.parametrize("fact", ["tensorflow", "device", "HOROVOD_CACHE_CAPACITY", "command", "communication"])
@on_ranks(3)
def test_versions_devices_and_the_environment_are_named(collective: Collective, fact: str) -> None:
    is_odd = collective.world.rank == 1
    environ = {"HOROVOD_CACHE_CAPACITY": "0"} if is_odd and fact == "HOROVOD_CACHE_CAPACITY" else {}
    command = "eval" if is_odd and fact == "command" else "train"
    description = collective.description
    versions = preflight.package_versions() | ({"tensorflow": "2.17.1"} if is_odd and fact == "tensorflow" else {})
    kind = "a GPU of compute capability 9.0" if is_odd and fact == "device" else "cores"
    if is_odd and fact == "communication":
        collective.description = "Horovod over MPI and NCCL"
    try:
        with (
            patch.object(preflight, "package_versions", return_value=versions),
            patch.object(preflight, "describe_device_kind", return_value=kind),
        ):
            message = refusal(
                collective, lambda: require_same_start(collective, Config(), command=command, environ=environ)
            )
    finally:
        collective.description = description
    [line] = message.splitlines()[1:]
    assert re.fullmatch(rf"  {fact}: rank 1 on node1 has .*, ranks 0, 2 have .*", line)


@contextlib.contextmanager
def loaded(**sources: str | None) -> Iterator[None]:
    """As if the user's workload had loaded these modules; None: not on this rank."""
    with tempfile.TemporaryDirectory() as directory:
        sys.path.insert(0, directory)
        for name, source in sources.items():
            if source is not None:
                (Path(directory) / f"{name}.py").write_text(source)
                importlib.invalidate_caches()
                importlib.import_module(name)
        try:
            yield
        finally:
            sys.path.remove(directory)
            for name in sources:
                sys.modules.pop(name, None)


def require_start(collective: Collective) -> None:
    require_same_start(collective, Config(), command="train", environ={})


@on_ranks(2)
def test_the_first_line_in_which_the_users_code_differs_is_shown(collective: Collective) -> None:
    rank = collective.world.rank
    with loaded(own=f"import json\n\nclass Own:\n    width = {3 + rank}\n    depth = {rank}\n"):
        message = refusal(collective, lambda: require_start(collective))
    assert message.splitlines()[1:] == ["  own.py line 4: rank 1 on node1 has width = 4, rank 0 on node0 has width = 3"]


@on_ranks(2)
def test_a_wrong_result_on_one_rank_is_reported_with_the_rank(collective: Collective) -> None:
    from tests.world.workloads.small import Small

    for method, given, said in (
        ("augment", lambda x, y, keys: x, "it must give the pair (x, y)"),
        ("create_optimizer", lambda learning_rate: "adam", "create_optimizer"),
        ("metrics", lambda y, outputs: {"share": None}, "'share'"),
    ):
        own = {method: staticmethod(given)} if collective.world.rank == 1 else {}
        workload = type("Mine", (Small,), own)()

        def create(workload: Workload = workload) -> None:
            create_job(workload, Config(steps=1), collective, num_threads=1)

        message = refusal(collective, create, seconds=60)  # it builds a model, and compiles
        assert message.startswith("rank 1 of 2 (the first on node1): "), message
        assert said in message


@on_ranks(3)
def test_a_module_is_compared_between_ranks_that_loaded_it(collective: Collective) -> None:
    rank = collective.world.rank
    with loaded(curves="a = 1\n" if rank == 0 else None, own="b = 2\n"):  # such as what draws on rank 0
        require_start(collective)
    with loaded(curves="a = 1\n" if rank == 0 else None, own=None if rank == 1 else f"b = 2\nc = {rank}\n"):
        message = refusal(collective, lambda: require_start(collective))
    [line] = message.splitlines()[1:]
    expected = "rank 1 on node1 has nothing, rank 2 on node2 has c = 2, rank 0 on node0 has c = 0"
    assert line == f"  own.py line 2: {expected}"


@on_ranks(2)
def test_the_versions_of_user_imports_are_compared(collective: Collective) -> None:
    import yaml  # in the package PyYAML

    version = f"1.{collective.world.rank}"
    with loaded(own="import yaml\n"), patch.object(yaml, "__version__", version):
        message = refusal(collective, lambda: require_start(collective))
    assert message.splitlines()[1:] == ["  yaml: rank 1 on node1 has 1.1, rank 0 on node0 has 1.0"]


@on_ranks(1, 2, 3, GLOO)
def test_ranks_that_were_started_equally_continue(collective: Collective) -> None:
    require_same_start(collective, Config(), command="train", environ={})


@on_ranks(2, 3)
def test_the_first_difference_of_long_lists_is_found(collective: Collective) -> None:
    rank, size = collective.world.rank, collective.world.size
    length = 2 * ENTRIES_PER_BLOCK + 7
    for place in (0, ENTRIES_PER_BLOCK - 1, ENTRIES_PER_BLOCK, length - 1):
        entries = [f"file {number}" for number in range(length)]
        if rank == size - 1:
            entries[place:] = ["other", *entries[place + 2 :]]  # one less
        message = refusal(
            collective,
            lambda entries=entries: require_alike(collective, {"file": entries}, UsageError, "what", name="long"),
        )
        line = expected_line(f"file {place + 1}", size - 1, size, "other", f"file {place}")
        assert message == f"what\n  {line}"


class ByRank(Digits):
    """Digits, of which one rank makes another model."""

    def __init__(self, rank: int, what: str) -> None:
        self.is_odd, self.what = rank == 1, what

    def create_model(self) -> keras.Model:
        layers = keras.layers
        units = 5 if self.is_odd and self.what == "shape" else 4
        name = "other" if self.is_odd and self.what == "name" else "hidden"
        more = [layers.Dense(4, name="more")] if self.is_odd and self.what == "number" else []
        dtype = {"dtype": "float16", "policy": "mixed_bfloat16"}.get(self.what if self.is_odd else "", "float32")
        activation = "tanh" if self.is_odd and self.what == "activation" else "relu"
        seed = 1 + self.is_odd  # rank 0's first weights are those of every rank
        first = keras.initializers.GlorotUniform(seed)
        hidden = layers.Dense(units, activation, kernel_initializer=first, name=name, dtype=dtype)
        return keras.Sequential(
            [keras.Input((8, 8, 1)), layers.Flatten(), hidden, *more, layers.Dense(10, name="last")], name="model"
        )

    def create_optimizer(self, learning_rate: float) -> keras.optimizers.Optimizer:
        momentum = 0.5 if self.is_odd and self.what == "optimizer" else 0.9
        return keras.optimizers.SGD(learning_rate, momentum=momentum)

    def metrics(self, y: Any, outputs: Any) -> dict[str, Any]:
        odd = {"odd": outputs[:, 0]} if self.is_odd and self.what == "metric" else {}
        return {**super().metrics(y, outputs), **odd}


MODELS = {
    "shape": "variable 1: rank 1 on node1 has weights/model/hidden/kernel float32 [64, 5], rank 0 on ",
    "dtype": "variable 1: rank 1 on node1 has weights/model/hidden/kernel float16 [64, 4], ",
    "name": "variable 1: rank 1 on node1 has weights/model/other/kernel float32 [64, 4], ",
    "number": "variable 3: rank 1 on node1 has weights/model/more/kernel float32 [4, 4], ",
    "optimizer": "momentum=0.5, ",
    "metric": "metric 2: rank 1 on node1 has odd, rank 0 on node0 has nothing",
    "activation": "rank 1 on node1 has Dense (layer 2): activation=tanh, rank 0 on node0 has Dense ",
    "policy": "Dense (layer 2): dtype.config.name=mixed_bfloat16, rank 0 on node0 has Dense ",
}


@pytest.mark.parametrize(
    "what",  # a variable is one text, of which the shape's case sees its type and name as well
    [pytest.param(what, marks=[pytest.mark.slow] * (what in ("dtype", "name"))) for what in MODELS],
)
@on_ranks(2)
def test_another_model_optimizer_or_metric_of_a_rank_is_named(collective: Collective, what: str) -> None:
    workload = ByRank(collective.world.rank, what)
    with nodes_by_rank(collective), pytest.raises(UsageError, match="would not train the same model") as caught:
        create_job(workload, Config(workload="digits", epochs=1), collective, num_threads=1)
    assert MODELS[what] in str(caught.value)
    assert len(set(all_gather_object(collective, str(caught.value), name="refusal"))) == 1


class LoadsLate(Digits):
    """Digits, whose model is made by a module that is imported only then."""

    def create_model(self) -> keras.Model:
        importlib.import_module("late")
        return super().create_model()


@on_ranks(2)
def test_code_that_is_loaded_with_the_model_is_compared_as_well(collective: Collective) -> None:
    with loaded(late=f"width = {collective.world.rank}\n"):
        del sys.modules["late"]
        require_start(collective)
        with nodes_by_rank(collective), pytest.raises(UsageError, match="the ranks run different code") as caught:
            create_job(LoadsLate(), Config(workload="digits", epochs=1), collective, num_threads=1)
    assert "late.py line 1: rank 1 on node1 has width = 1, rank 0 on node0 has width = 0" in str(caught.value)


BY_RANK = ("-m", "tests.world.started_by_rank")
WHOLE_RUNS: dict[str, tuple[str, list[str], dict[str, str], str]] = {
    # launcher, flags and variables of rank 1 alone, what is said
    "seed over MPI": ("mpirun", ["--seed", "3"], {}, r"\n  seed: rank 1 on \S+ has 3, rank 0 on \S+ has 0"),
    "seed over Gloo": ("horovodrun --gloo", ["--seed", "3"], {}, r"  seed: rank 1 on \S+ has 3, rank 0 on \S+ has 0"),
    "cache": (
        "mpirun",
        [],
        {"HOROVOD_CACHE_CAPACITY": "0"},  # by itself: both ranks wait in their first collective
        r"\n  HOROVOD_CACHE_CAPACITY: rank 1 on \S+ has 0, rank 0 on",
    ),
    "cache over Gloo": (
        "horovodrun --gloo",
        [],
        {"HOROVOD_CACHE_CAPACITY": "0"},
        r"  HOROVOD_CACHE_CAPACITY: rank 1 on \S+ has 0, rank 0 on \S+ has nothing",
    ),
    "wrong value": ("mpirun", ["--epochs", "0"], {}, r"error: rank 1 on \S+: epochs is 0; it must be at least 1"),
}


@pytest.mark.parametrize(
    "case", ["seed over MPI", *(pytest.param(case, marks=pytest.mark.slow) for case in list(WHOLE_RUNS)[1:])]
)
def test_differently_started_ranks_fail_and_write_nothing(
    run_ringtrain: RunRingtrain, tmp_path: Path, case: str
) -> None:
    launcher, flags, variables, said = WHOLE_RUNS[case]
    odd = json.dumps({"rank": 1, "flags": flags, "variables": variables})
    arguments = [odd, "--workload", f"{WORKLOADS}:Line", "--out", str(tmp_path / "out")]
    env = {"TF_CPP_MIN_LOG_LEVEL": "2"}
    finished = run_ringtrain(arguments, launcher=launcher, env=env, python=BY_RANK, timeout=60)
    assert finished.rc == (2 if launcher == "mpirun" else 1)  # Gloo's launcher knows no other
    assert re.search(said, finished.stderr), finished.stderr
    assert len(error_lines(finished)) == 1, finished.stderr
    # horovodrun's own process shows one after any exit code but 0
    assert launcher != "mpirun" or "Traceback" not in finished.stderr + finished.stdout
    assert not (tmp_path / "out").exists()


def test_a_rendezvous_that_is_gone_is_named(run_ringtrain: RunRingtrain, tmp_path: Path) -> None:
    left = {
        "HOROVOD_CONTROLLER": "gloo", "HOROVOD_RANK": "0", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": "0",
        "HOROVOD_LOCAL_SIZE": "2", "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": "1",
    }  # fmt: skip
    finished = run_ringtrain(["--workload", "polynomial", "--out", tmp_path / "out"], env=left, timeout=60)
    assert finished.rc == 2
    [line] = error_lines(finished)
    assert "Horovod's launcher does not answer at 127.0.0.1:1 (HOROVOD_GLOO_RENDEZVOUS_ADDR and _PORT)" in line


def test_ranks_with_other_data_end_with_3(run_ringtrain: RunRingtrain, tmp_path: Path) -> None:
    odd = json.dumps({"rank": 1, "flags": [], "variables": {"RINGTRAIN_TEST_SAMPLES": "11"}})
    arguments = [odd, "--workload", f"{WORKLOADS}:LineOfSomeSamples", "--out", str(tmp_path / "out")]
    finished = run_ringtrain(arguments, launcher="mpirun", python=BY_RANK, timeout=60)
    assert finished.rc == 3
    assert re.search(r"\n  train: rank 1 on \S+ has 11 samples .*, rank 0 on \S+ has 12 samples", finished.stderr)
    end = events(tmp_path / "out")[-1]
    assert (end["status"], end["exit_code"]) == ("data", 3)
