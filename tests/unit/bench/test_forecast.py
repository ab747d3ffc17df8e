"""Forecasts: their formulas, the published table, and ``python -m benchmarks.forecast``."""

import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from benchmarks.forecast.__main__ import FLAGS, Options, main
from benchmarks.forecast.cluster import FIELDS, PRESETS, Cluster, Link, read_cluster
from benchmarks.forecast.measured import EVENTS, SETTINGS, measure
from benchmarks.forecast.model import (
    SCENARIOS,
    Work,
    forecast,
    last_worthwhile,
    slowest_of,
    uniform,
)
from benchmarks.predictions import PICTURE, RESULT, compare, draw, summarize
from ringtrain.cli import run_command

ROOT = Path(__file__).parents[3]
WORK = Work(step_sec=0.1, shapes=uniform(25_000_000), batch_size=64)
MEASURED = ["--step_sec", "0.1", "--batch_size", "64", "--parameters", "25000000"]
CLUSTER_FILE = {
    "device": "GPU",
    "devices_per_node": 4,
    "device_gbit": 100,
    "device_latency_us": 5,
    "node_gbit": 25,
    "node_latency_us": 10,
    "tcp": False,
}


def run_forecast(*arguments: str | Path) -> int:
    """Run the command in this process."""
    return run_command(main, [str(argument) for argument in arguments], program="benchmarks")


def test_all_reduces_take_latency_and_bytes() -> None:
    link = Link(gbit=8, latency_us=10)  # 1 GB/s
    assert link.ring(1e9, 4) == pytest.approx(6 * 10e-6 + 1.5)
    assert link.tree(1e9, 4) == pytest.approx(4 * 10e-6 + 2.0)
    cluster = Cluster(devices_per_node=2, device_gbit=80, device_latency_us=0, node_gbit=8, node_latency_us=0)
    assert cluster.all_reduce_sec(1e9, 2) == pytest.approx(0.1)
    assert cluster.all_reduce_sec(1e9, 8) == pytest.approx(0.1 + 1.5)
    # A tree has fewer messages.
    latent = Cluster(devices_per_node=1, device_gbit=1, node_gbit=1e5, node_latency_us=100)
    assert latent.all_reduce_sec(8, 64) == pytest.approx(2 * 6 * 100e-6, rel=1e-3)


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("devices", [1, 8, 64])
def test_the_measured_size_is_forecast_as_measured(scenario: str, devices: int) -> None:
    work = Work(step_sec=0.5, shapes=WORK.shapes, batch_size=64, measured_on=devices)
    found = forecast(work, PRESETS["roce25"], devices, SCENARIOS[scenario])
    assert found.step_sec == pytest.approx(0.5, rel=1e-3)
    assert found.examples_per_sec == pytest.approx(128 * devices, rel=1e-3)


def test_overlap_hides_what_the_backward_pass_leaves_time_for() -> None:
    cluster, [low, expected, high] = PRESETS["roce25"], (SCENARIOS[name] for name in ("low", "expected", "high"))
    exposed = [forecast(WORK, cluster, 16, each).exposed_sec for each in (low, expected, high)]
    assert exposed == sorted(exposed, reverse=True)
    whole = forecast(WORK, cluster, 16, low._replace(link_share=1.0)).exposed_sec
    assert exposed[2] == pytest.approx(whole / 6, rel=0.1)  # the last of six groups
    fast = replace(
        PRESETS["dgxa100"],
        node_gbit=1e5,
        device_gbit=1e5,
        node_latency_us=0,
        device_latency_us=0,
    )
    assert forecast(WORK, fast, 16, high).efficiency == pytest.approx(1, abs=1e-2)
    accumulated = Work(step_sec=0.4, shapes=WORK.shapes, batch_size=256, accumulate=4)
    # One of four micro-batches hides it.
    assert forecast(accumulated, cluster, 16, high).exposed_sec == pytest.approx(exposed[2], rel=1e-3)


def test_gradients_of_dense_layers_behind_convolutions_are_ready_at_once() -> None:
    work = Work(step_sec=1, shapes=[(3, 3, 8, 8), (8,), (3, 3, 8, 8), (8,), (64, 10), (10,)], batch_size=1)
    assert [work.ready(variable) for variable in range(6)] == [1.0, 0.5, 0.5, 0, 0, 0]
    dense = Work(step_sec=1, shapes=[(8, 8), (8,), (8, 8)], batch_size=1)
    assert [dense.ready(variable) for variable in range(3)] == [1.0, 0.5, 0.5]


@pytest.mark.parametrize("devices", [1, 2, 16, 512])
def test_the_slowest_device_is_the_expected_maximum(devices: int) -> None:
    drawn = 1 + 0.05 * np.random.default_rng(0).normal(size=(4000, devices)).max(axis=1).mean()
    assert slowest_of(devices, 0.05) == pytest.approx(drawn, abs=2e-3)


def test_nodes_stop_paying_at_a_fixed_global_batch() -> None:
    def rate(nodes: int, batch: int | None) -> float:
        batch_size = None if batch is None else batch / nodes
        return forecast(WORK, PRESETS["tcp10"], nodes, SCENARIOS["expected"], batch_size=batch_size).examples_per_sec

    assert 1 < last_worthwhile([rate(nodes, 1024) for nodes in range(1, 65)]) < 16
    assert last_worthwhile([100.0 * nodes for nodes in range(1, 65)]) == 64
    assert last_worthwhile([100.0, *(120.0 + 70 * nodes for nodes in range(9))]) == 10  # the second pays for all
    assert last_worthwhile([100.0, 149.0, 160.0]) == 1


def test_published_rates_are_forecast() -> None:
    result = json.loads((ROOT / RESULT).read_text())
    rows = result["table"]
    assert {name: result[name] for name in summarize(rows)} == summarize(rows)
    assert result["within_5_points"] >= 0.75 * len(rows)
    assert result["in_interval"] >= 0.8 * len(rows)
    assert result["median_width"] <= 0.25
    assert result["within_5_points"] > result["simplest_within_5_points"]
    without_layers = compare(models=["BERT large seq 128 LAMB"])
    assert without_layers == [row for row in rows if row["model"].startswith("BERT large seq")]
    page = (ROOT / "docs/scaling.md").read_text()
    assert f"Of {len(rows)} efficiencies {result['within_5_points']} are within 5 points" in " ".join(page.split())
    assert (ROOT / PICTURE).read_text() == draw(rows)


@pytest.mark.slow  # builds five large models
def test_the_published_table_is_that_of_the_forecasts() -> None:
    assert json.loads((ROOT / RESULT).read_text())["table"] == compare()


Events = list[dict[str, Any]]


def make_events(device: str = "GPU:0") -> Events:
    """A log of two ranks with four intervals and a checkpoint."""
    start = {
        "event": "start",
        "size": 2,
        "first_step": 0,
        "global_batch_size": 128,
        "total_steps": 1000,
        "trained_shapes": [[1000, 999], [1000]],
        "ranks": [{"node": "a", "device": device}, {"node": "a", "device": device}],
    }
    events: Events = [start]
    for step, seconds in ((10, 9.0), (20, 0.11), (30, 0.12), (40, 0.10)):
        events.append(
            {
                "event": "train",
                "step": step,
                "sec_per_step": seconds,
                "examples_per_sec": 128 / seconds,
                "input_sec": 0.001,
                "communication_sec": 0.01,
            }
        )
    events.append({"event": "checkpoint", "step": 40, "seconds": 2.0})
    return events


def make_settings() -> dict[str, Any]:
    """The settings of a run of a workload."""
    return {
        "workload": "digits",
        "accumulate": 1,
        "compression": "none",
        "checkpoint_every": 1000,
        "optimizer": {"name": "sgd"},
    }


def write_run(directory: Path, events: Events, settings: Mapping[str, Any]) -> Path:
    """Write a run directory."""
    directory.mkdir(exist_ok=True)
    (directory / "config.yaml").write_text(yaml.safe_dump(dict(settings), sort_keys=False))
    lines = [json.dumps(event) + "\n" for event in events]
    (directory / "metrics.jsonl").write_text("".join(lines))
    return directory


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A directory of a run on two ranks."""
    return write_run(tmp_path / "run", make_events(), make_settings())


def test_a_run_is_forecast(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "new" / "forecast.json"
    assert run_forecast(run, "--cluster", "p4d", "--nodes", "4", "--output", output) == 0
    shown = capsys.readouterr().out
    assert "run: 2 ranks on 1 node, 3 intervals of the log, 0.11 s a step" in shown
    assert "the run's ranks are taken as 2 GPUs on 1 node of this cluster" in shown
    written = json.loads(output.read_text())
    assert [row["expected"]["devices"] for row in written["rows"]] == [8, 16, 32]
    work = written["work"]
    assert (work["step_sec"], work["compute_sec"]) == (0.11, pytest.approx(0.10))
    assert (work["batch_size"], work["measured_on"]) == (64, 2)
    assert sum(math.prod(shape) for shape in work["shapes"]) == 1_000_000
    rate = written["rows"][0]["expected"]["examples_per_sec"]
    assert f"{128_000 / rate / 3600:.2f}" in shown


def test_the_assumptions_are_printed_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_forecast(*MEASURED, "--cluster", "tcp25", "--variation", "0.04") == 0
    lines = capsys.readouterr().out.splitlines()
    table = next(place for place, line in enumerate(lines) if line.startswith("nodes "))
    assert lines[0] == "The forecast assumes:"
    assert lines[1].startswith("  cluster tcp25: nodes of 4 GPUs; 100 Gbit/s and 5 us a message")
    assert "by TCP (at 65% of this rate)" in lines[1]
    scenarios = [line for line in lines[:table] if "compute varies by 4.0%" in line]
    assert [line.split(":")[0].strip() for line in scenarios] == ["from", "expected", "to"]
    assert "  each device has 64 samples a step, however many there are" in lines[:table]


def test_the_cluster_must_be_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([run], MEASURED):
        assert run_forecast(*arguments) == 2
        printed = capsys.readouterr()
        assert "cluster must be given" in printed.err
        assert printed.out == ""


@pytest.mark.parametrize("device", ["GPU:0", "CPU"])
def test_a_run_on_other_devices_than_the_cluster_s_is_refused(
    device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", make_events(device), make_settings())
    file = tmp_path / "cores.yaml"
    file.write_text(yaml.safe_dump(CLUSTER_FILE | {"device": "CPU"}))
    clusters = {"GPU:0": "p4d", "CPU": str(file)}
    for kind, cluster in clusters.items():
        if kind == device:
            assert run_forecast(run, "--cluster", cluster) == 0
            assert capsys.readouterr().err == ""
        else:
            assert run_forecast(run, "--cluster", cluster) == 2
            printed = capsys.readouterr()
            words = {"CPU": "CPU cores, and the cluster has GPUs"}
            expected = words.get(device, "a GPU, and the cluster has CPU cores")
            assert f"its rank 0 trained on {expected}" in printed.err
            assert printed.out == ""


def test_one_rank_on_another_device_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = make_events()
    events[0]["ranks"][1]["device"] = "CPU"
    run = write_run(tmp_path / "run", events, make_settings())
    assert run_forecast(run, "--cluster", "p4d") == 2
    assert "its rank 1 trained on CPU cores" in capsys.readouterr().err


def test_a_fit_is_forecast(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It records neither its batch nor its length."""
    events = make_events()
    del events[0]["global_batch_size"], events[0]["total_steps"]
    for event in events[1:5]:
        event["examples_per_sec"] = 64 / event["sec_per_step"]
    settings = {"workload": "fit of train.py", "optimizer": {}, "checkpoint_every": 0}
    run = write_run(tmp_path / "run", events, settings)
    output = tmp_path / "forecast.json"
    assert run_forecast(run, "--cluster", "p4d", "--nodes", "1", "--output", output) == 0
    assert "a fit records neither compression nor accumulation" in capsys.readouterr().out
    work = json.loads(output.read_text())["work"]
    assert work["batch_size"] == pytest.approx(32, rel=0.1)
    for event in events[1:5]:
        event["examples_per_sec"] = 0.0  # its number of samples is unknown
    write_run(run, events, settings)
    assert run_forecast(run, "--cluster", "p4d") == 3
    assert "does not record how many samples a step has" in capsys.readouterr().err


def test_input_and_checkpoints_limit_the_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*MEASURED, "--cluster", "p4d", "--nodes", "2", "--input_rate", "320"]
    assert run_forecast(*flags) == 0
    shown = capsys.readouterr().out
    first_row = shown.partition("node-hours\n")[2].splitlines()[0]
    assert first_row.split()[2:5] == ["2,560"] * 3  # 8 devices
    assert "steps wait for input, or for checkpoints to be written, on 8, 16 devices" in shown
    assert WORK.least_sec(1.0) == 0
    assert replace(WORK, save_sec=30.0, save_every=100).least_sec(1.0) == pytest.approx(0.3)
    settings = make_settings() | {"checkpoint_every": 10}
    run = write_run(tmp_path / "run", make_events(), settings)
    assert measure(run, PRESETS["p4d"]).work.least_sec(1.0) == pytest.approx(0.2)


def test_a_run_that_is_too_short_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", make_events()[:3], make_settings())
    assert run_forecast(run, "--cluster", "p4d") == 2
    assert "holds 1 measured intervals of steps; a forecast needs 2" in capsys.readouterr().err


def test_only_the_last_start_counts(tmp_path: Path) -> None:
    resumed = make_events()
    resumed[0]["first_step"] = 40
    for event in resumed[1:5]:
        event["step"] += 40
        event["sec_per_step"] *= 2
    run = write_run(tmp_path / "run", [*make_events(), *resumed], make_settings())
    assert measure(run, PRESETS["p4d"]).work.step_sec == pytest.approx(0.22)


def test_lines_that_hold_no_event_are_left_out(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = run / "metrics.jsonl"
    assert run_forecast(run, "--cluster", "p4d") == 0
    undisturbed = capsys.readouterr().out
    first, *others = log.read_text().splitlines(keepends=True)
    odd = ['{"event": "tr\n', "[1]\n", "7\n", '{"event": 5}\n', "[" * 5000 + "\n", "\n"]
    log.write_text("".join([first, *odd, *others, '{"event": "train", "st']))
    assert run_forecast(run, "--cluster", "p4d") == 0
    assert capsys.readouterr().out == undisturbed


# Wrong values of every field. JSON holds the first ones, YAML all of them.
WRONG_VALUES: list[Any] = [
    "text",
    "",
    "nan",
    None,
    True,
    math.nan,
    math.inf,
    -math.inf,
    0,
    0.5,
    -1,
    10**400,
    -(10**400),
    1e300,
    [],
    {},
    [[]],
    [None],
    [{}],
    [[0]],
    [[-1]],
    [[math.nan]],
    [["text"]],
    [[10**400]],
    [[2**40, 2**40]],
    [[1] * 1000],
    [[1]] * 200_000,
    [{"node": "a", "device": "TPU"}],
    [{"node": "a", "device": None}],
    [{"node": 7, "device": "GPU:0"}],
    [{"node": "a", "device": "GPU:0"}] * 3,
    {"node": "a"},
]
NULL = (None,)
FROM_0 = (0,)
POSITIVE = (0.5,)
# The values of the list above that are right.
RIGHT_VALUES: dict[tuple[str, str], tuple[Any, ...]] = {
    ("start", "first_step"): FROM_0,
    ("start", "total_steps"): (None, 0),
    ("start", "global_batch_size"): NULL,
    ("start", "trained_shapes"): ([[]],),
    ("train", "step"): FROM_0,
    ("train", "sec_per_step"): POSITIVE,
    ("train", "examples_per_sec"): (0, 0.5),
    ("train", "input_sec"): (None, 0, 0.5),
    ("train", "communication_sec"): (None, 0, 0.5),
    ("checkpoint", "seconds"): (0, 0.5),
    ("config.yaml", "checkpoint_every"): FROM_0,
    # A name that is no word of ours is a user-defined workload.
    ("config.yaml", "workload"): ("text", "", "nan"),
    ("cluster.yaml", "device_gbit"): POSITIVE,
    ("cluster.yaml", "device_latency_us"): (0, 0.5),
    ("cluster.yaml", "node_gbit"): POSITIVE,
    ("cluster.yaml", "node_latency_us"): (0, 0.5),
    ("cluster.yaml", "tcp"): (True,),
}


def is_right(place: str, name: str, value: Any) -> bool:
    """Return True if the table above says that this value is right."""
    right_values = RIGHT_VALUES.get((place, name), ())
    return any(type(value) is type(right) and value == right for right in right_values)


def require_refusal_or_sense(
    code: int, capsys: pytest.CaptureFixture[str], place: str, file: Path, name: str, value: Any
) -> None:
    """Check that a wrong value is named with its file and field, and that a right one is used."""
    printed = capsys.readouterr()
    if is_right(place, name, value):
        assert code == 0, (name, value, printed.err)
        assert not re.search(r"\b(nan|inf)\b", printed.out), (name, value)
        return
    assert code in (2, 3), (name, value)
    [line] = printed.err.splitlines()
    assert printed.out == ""
    assert str(file) in line
    assert f"{name} is " in line, (name, value)
    assert "; it must be " in line
    assert repr(value)[:40] in line
    assert len(line) < 1000


FIELDS_OF_EVENTS = [(kind, name) for kind, table in EVENTS.items() for name in table]


@pytest.mark.parametrize(("kind", "name"), FIELDS_OF_EVENTS)
@pytest.mark.timeout(120)
def test_a_wrong_value_in_an_event_is_named(
    kind: str, name: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = [event["event"] for event in make_events()]
    place = max(index for index, found in enumerate(kinds) if found == kind)
    for value in WRONG_VALUES:
        events = make_events()
        events[place][name] = value
        write_run(run, events, make_settings())
        code = run_forecast(run, "--cluster", "p4d", "--nodes", "4")
        require_refusal_or_sense(code, capsys, kind, run / "metrics.jsonl", name, value)


@pytest.mark.parametrize("name", ["workload", *SETTINGS])
def test_a_wrong_setting_is_named(name: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for value in WRONG_VALUES:
        settings = make_settings() | {name: value}
        write_run(run, make_events(), settings)
        code = run_forecast(run, "--cluster", "p4d", "--nodes", "4")
        if has_many_values(value):
            assert code == 2
            assert "more than 65,536 bytes" in capsys.readouterr().err
            continue
        require_refusal_or_sense(code, capsys, "config.yaml", run / "config.yaml", name, value)


def has_many_values(value: Any) -> bool:
    """Return True for a value that makes a YAML file too long to be read."""
    return isinstance(value, list) and len(value) > 1000


@pytest.mark.parametrize("name", FIELDS)
def test_a_wrong_value_in_a_cluster_file_is_named(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cluster.yaml"
    for value in WRONG_VALUES:
        file.write_text(yaml.safe_dump(CLUSTER_FILE | {name: value}, sort_keys=False))
        code = run_forecast(*MEASURED, "--cluster", file, "--nodes", "4")
        if has_many_values(value):
            assert code == 2
            assert "more than 65,536 bytes" in capsys.readouterr().err
            continue
        require_refusal_or_sense(code, capsys, "cluster.yaml", file, name, value)


def missing_fields() -> Iterator[tuple[str, str, bool]]:
    """Yield place, name, and if it must be there, of each field."""
    for kind, table in EVENTS.items():
        for name, (_, is_required) in table.items():
            yield kind, name, is_required
    for name, (_, is_required) in SETTINGS.items():
        yield "config.yaml", name, is_required
    yield "config.yaml", "workload", True


@pytest.mark.parametrize(("place", "name", "is_required"), list(missing_fields()))
def test_a_missing_field_is_named(
    place: str, name: str, is_required: bool, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events, settings = make_events(), make_settings()
    for values in (*[event for event in events if event["event"] == place], settings):
        if place in ("config.yaml", values.get("event")):
            values.pop(name, None)
    write_run(run, events, settings)
    code = run_forecast(run, "--cluster", "p4d", "--nodes", "4")
    printed = capsys.readouterr()
    if is_required:
        assert code == 3
        assert f"{name} is missing; it must be " in printed.err
    else:
        assert code == 0, printed.err


@pytest.mark.parametrize("name", FIELDS)
def test_a_cluster_file_has_all_fields(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump({key: CLUSTER_FILE[key] for key in CLUSTER_FILE if key != name}))
    assert run_forecast(*MEASURED, "--cluster", file) == 2
    assert f"{str(file)!r}: {name} is missing; it must be " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (None, "which cannot be read: No such file or directory"),
        ("", "it must hold the fields of a cluster"),
        ("[1]", "it must hold the fields of a cluster"),
        ("a: [", "is no YAML file of a cluster"),
        ("tcp: true\ntcp: false", "the key 'tcp' is there twice"),
        ("tcp: !!python/object/apply:os.getcwd []", "is no YAML file of a cluster"),
        ("node_gbt: 5", "'node_gbt' is no field of a cluster. Did you mean 'node_gbit'?"),
        ("1: 5", "a key is no text"),
        ("node_gbit: " + "0x1" + "0" * 50_000, "is a value with thousands of digits"),
        ("x: " + "[" * 3000, "is no YAML file of a cluster"),
    ],
)
def test_what_is_no_cluster_file_is_refused(
    text: str | None, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cluster.yaml"
    if text is not None:
        file.write_text(text)
        if text.startswith("node_gbit"):
            rest = {name: value for name, value in CLUSTER_FILE.items() if name != "node_gbit"}
            file.write_text(yaml.safe_dump(rest) + text)
    assert run_forecast(*MEASURED, "--cluster", file) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert named in line


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--cluster", "dgxa10"], "Did you mean 'dgxa100'?"),
        (["--cluster", "x" * 5000], "(5002 characters)"),
        (["--cluster", "x" * 5000 + ".yaml"], "File name too long"),
        (["--nodes", "0"], "nodes is 0; it must be a whole number from 1 to 4,096"),
        (["--nodes", "100000"], "nodes is 100000; it must be a whole number from 1 to 4,096"),
        (["--input_rate", ".nan"], "input_rate is nan; it must be a number from 1e-06"),
        (["--input_rate", ".inf"], "input_rate is inf; it must be a number from 1e-06"),
        (["--step_sec", "-1"], "step_sec is -1.0; it must be a number from 1e-09"),
        (["--batch_size", "9" * 400], "batch_size is 9999"),
        (["--parameters", "0"], "parameters is 0; it must be a whole number from 1"),
        (["--samples", "-5"], "samples is -5; it must be a whole number from 1"),
        (["--global_batch_size", "100"], "global_batch_size is 100, less than the 512 devices"),
        (["--variation", "3"], "variation is 3.0; it must be a number from 0 to 0.5"),
        (["--output", "x" * 5000], "cannot be written: File name too long"),
    ],
)
def test_a_wrong_flag_is_named(words: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_forecast("--cluster", "p4d", *MEASURED, *words) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert named in line
    assert len(line) < 1000


def test_missing_flags_are_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_forecast(run, "--cluster", "p4d", "--batch_size", "8") == 2
    assert "batch_size is given without the time of its steps" in capsys.readouterr().err
    assert run_forecast("--cluster", "p4d", "--step_sec", "0.1") == 2
    remedy = "Give the directory of a run, or --batch_size and --parameters."
    assert f"batch_size is missing. {remedy}" in capsys.readouterr().err


def test_every_flag_with_a_number_has_a_rule() -> None:
    numbers = [name for name, hint in Options.__annotations__.items() if hint.startswith(("int", "float"))]
    assert numbers == list(FLAGS)


@pytest.mark.parametrize("words", [["--nodes", "4096"], ["--nodes", "1"]])
@pytest.mark.timeout(60)
def test_the_largest_and_smallest_forecasts_are_finite(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = make_events()
    events[0]["trained_shapes"] = [[1]] * 10_000
    run = write_run(tmp_path / "run", events, make_settings())
    for extreme in (["--step_sec", "1e-9"], ["--step_sec", "1e7"]):
        assert run_forecast(run, "--cluster", "tcp10", *extreme, *words) == 0
        assert not re.search(r"\b(nan|inf)\b", capsys.readouterr().out)


def test_an_output_replaces_only_a_forecast(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "mine.json"
    command = [*MEASURED, "--cluster", "p4d", "--nodes", "2", "--output"]
    for mine in (output, run / "metrics.jsonl", run / "config.yaml", tmp_path):
        if mine == output:
            output.write_text('{"mine": 1}\n')
        before = mine.read_bytes() if mine.is_file() else b""
        assert run_forecast(*command, mine) == 2
        printed = capsys.readouterr()
        assert "which exists and is not a forecast; it is left unchanged" in printed.err
        assert printed.out == ""
        assert (mine.read_bytes() if mine.is_file() else b"") == before
    output.unlink()
    for _ in range(2):
        assert run_forecast(*command, output) == 0
    assert json.loads(output.read_text())["rows"]


def test_the_page_shows_what_the_command_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs/scaling.md").read_text()
    [listing] = re.findall(r"```console\n\$ python -m benchmarks.forecast (.*?)```", page, re.DOTALL)
    command, _, printed = listing.partition("\n")
    assert run_forecast(*shlex.split(command)) == 0
    assert capsys.readouterr().out == printed
    [cluster] = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    file = tmp_path / "my_cluster.yaml"
    file.write_text(cluster)
    assert read_cluster(file) == PRESETS["roce25"]
    presets = re.search(r"Presets: (.*?)\. For", page)
    assert presets is not None
    assert re.findall(r"`(\w+)`", presets[1]) == list(PRESETS)
