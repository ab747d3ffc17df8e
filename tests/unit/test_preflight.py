"""What the ranks compare before they train, and how differences are told; without other ranks."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from ringtrain.config import Config, OptimizerConfig
from ringtrain.data.sources import from_arrays
from ringtrain.guard import preflight
from ringtrain.guard.preflight import describe_difference, describe_source, digest, find_differing, summarize
from ringtrain.messages.ranks import group_ranks, name_ranks

NODES = ["node3", "node3", "node7", "node7"]


@pytest.mark.parametrize(
    ("values", "nodes", "words"),
    [
        ("0030", NODES, "rank 2 on node7 has 3, ranks 0, 1, 3 have 0"),
        ("03", ["node3", "node7"], "rank 1 on node7 has 3, rank 0 on node3 has 0"),
        ("1231", NODES, "rank 1 on node3 has 2, rank 2 on node7 has 3, ranks 0, 3 have 1"),
    ],
    ids=["the odd one", "of two both", "each value"],
)
def test_a_difference_is_told_with_its_ranks_hosts_and_values(values: str, nodes: list[str], words: str) -> None:
    assert describe_difference("seed", list(values), nodes) == f"seed: {words}"


def test_a_fact_that_a_rank_does_not_have_is_a_difference() -> None:
    ranks: list[dict[str, str]] = [{"seed": "0"}, {"seed": "0", "own.py line": "x"}]
    assert find_differing(ranks) == ["own.py line"]


def test_long_values_are_cut() -> None:
    line = describe_difference("a", ["x" * 1000, "y"], NODES[:2])
    assert "x" * preflight.MAX_VALUE_LENGTH + "..." in line
    assert len(line) < 300


@pytest.mark.parametrize(
    ("ranks", "with_nodes", "words"),
    [
        ([1], True, "rank 1 on node3"),
        ([1, 2], True, "rank 1 on node3 and rank 2 on node7"),
        ([2, 3], True, "ranks 2, 3 on node7"),
        ([0, 1, 2, 3], False, "ranks 0-3"),
        ([0, 2, 3], False, "ranks 0, 2, 3"),
        ([3], False, "rank 3"),
    ],
)
def test_ranks_in_words(ranks: list[int], with_nodes: bool, words: str) -> None:
    assert name_ranks(ranks, NODES if with_nodes else None) == words


def test_of_many_hosts_a_few_are_named() -> None:
    nodes = [f"node{rank}" for rank in range(10)]
    words = name_ranks(range(10), nodes)
    assert words.endswith("rank 3 on node3 and ranks on 6 more hosts")
    assert "node4" not in words


def test_the_majority_value_comes_first_then_the_first_rank_s() -> None:
    assert list(group_ranks([1, 2, 2]).items()) == [(2, [1, 2]), (1, [0])]
    assert list(group_ranks([1, 2, 2, 1]).items()) == [(1, [0, 3]), (2, [1, 2])]


def test_a_list_travels_as_its_length_and_digest() -> None:
    assert summarize({"a": "text", "b": ["x", "y"]}) == {"a": "text", "b": {"entries": 2, "digest": digest(["x", "y"])}}
    assert digest(["x", "y"]) != digest(["xy"]) != digest(["y", "x"])


def facts_of(config: Config, environ: dict[str, str] | None = None) -> dict[str, Any]:
    return preflight.describe_start(config, environ or {})


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return find_differing([summarize(before), summarize(after)])


def test_every_setting_but_the_data_directory_is_compared(tmp_path: Path) -> None:
    config = Config()
    settings: dict[str, Any] = {"seed": 3, "steps": 5, "accumulate": 2, "out": tmp_path, "check_replicas_every": 7}
    for name, value in settings.items():
        assert changed(facts_of(config), facts_of(replace(config, **{name: value}))) == [name]
    other = replace(config, optimizer=OptimizerConfig(lr=0.5), options={"width": 3})
    assert set(changed(facts_of(config), facts_of(other))) == {"options.width", "optimizer.lr"}
    assert changed(facts_of(config), facts_of(replace(config, data_dir=tmp_path))) == []


def test_of_the_environment_only_shared_settings_are_compared() -> None:
    config = Config()
    own = {
        "HOROVOD_RANK": "1",
        "HOROVOD_SECRET_KEY": "secret",
        "HOROVOD_TIMELINE": "t",
        "AWS_SECRET_ACCESS_KEY": "secret",
    }
    assert changed(facts_of(config), facts_of(config, own)) == []
    assert "secret" not in str(facts_of(config, own))
    common = {"HOROVOD_CACHE_CAPACITY": "0", "HOROVOD_FUSION_THRESHOLD": "1024", "TF_XLA_FLAGS": "--tf_xla_auto_jit=2"}
    assert changed(facts_of(config), facts_of(config, common)) == sorted(common)


def test_versions_are_compared() -> None:
    facts = facts_of(Config())
    assert facts["Python"] == f"{sys.version_info.major}.{sys.version_info.minor}"
    assert facts["numpy"] == np.__version__
    assert {"ringtrain", "tensorflow", "keras", "horovod", "mpi4py"} <= set(facts)


def test_the_device_is_cores_or_a_gpu_s_compute_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    """A made GPU: there need not be one here."""
    details: dict[str, Any] = {"device_name": "NVIDIA H200", "compute_capability": (9, 0)}
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: [])
    assert facts_of(Config())["device"] == "cores"
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: ["GPU 0"])
    monkeypatch.setattr(tf.config.experimental, "get_device_details", lambda gpu: details)
    assert facts_of(Config())["device"] == "a GPU of compute capability 9.0"
    details.clear()
    assert facts_of(Config())["device"] == "a GPU of compute capability unknown"


def test_this_package_s_files_are_compared_by_digest() -> None:
    files = [entry.split()[0] for entry in preflight.describe_package()["ringtrain file"]]
    assert {"training/loop.py", "workloads/digits.py"} <= set(files)


def test_arrays_are_compared_by_structure_type_and_shape() -> None:
    x, y = np.zeros((10, 5), np.float32), np.arange(10)
    same = describe_source("train", from_arrays(x, y))
    assert same == {"train": "10 samples (ArraySource)", "train array": ["x float32 [5]", "y int64 []"]}
    others = [
        from_arrays(x[:9], y[:9]),
        from_arrays(x.astype(np.float64), y),
        from_arrays(x[:, :4], y),
        from_arrays(x, np.array(list("abcdefghij"))),
        from_arrays({"a": x}, y),
    ]
    assert all(changed(same, describe_source("train", other)) for other in others)
