"""Forecasts: their formulas, the published table, and the command."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.predictions import PICTURE, RESULT, compare, draw, summarize
from ringtrain.cli import main
from ringtrain.predict.cluster import PRESETS, Cluster, Link, fit_link
from ringtrain.predict.forecast import SCENARIOS, Work, forecast, last_worthwhile, slowest_of
from ringtrain.predict.measured import measure, uniform
from ringtrain.report.forecasts import compare as compare_with
from ringtrain.report.forecasts import read_forecast
from ringtrain.report.reading import read_run

ROOT = Path(__file__).parents[2]
WORK = Work(step_sec=0.1, shapes=uniform(25_000_000), batch_size=64)
FLAGS = ["--step_sec", "0.1", "--batch_size", "64", "--parameters", "25000000"]


def test_all_reduces_take_latency_and_bytes() -> None:
    link = Link(gbit=8, latency_us=10)  # 1 GB/s
    assert link.ring(1e9, 4) == pytest.approx(6 * 10e-6 + 1.5)
    assert link.tree(1e9, 4) == pytest.approx(4 * 10e-6 + 2.0)
    cluster = Cluster(devices_per_node=2, device_gbit=80, device_latency_us=0, node_gbit=8, node_latency_us=0)
    assert cluster.all_reduce_sec(1e9, 2) == pytest.approx(0.1)
    assert cluster.all_reduce_sec(1e9, 8) == pytest.approx(0.1 + 1.5)
    latent = Cluster(devices_per_node=1, node_gbit=1e5, node_latency_us=100)  # a tree has fewer messages
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
    fast = Cluster(node_gbit=1e5, device_gbit=1e5, node_latency_us=0, device_latency_us=0)
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


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A directory of a run on two ranks, with a log of four intervals."""
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / "config.yaml").write_text("workload: digits\naccumulate: 1\noptimizer: {name: sgd}\n")
    ranks = [{"node": "a"}, {"node": "a"}]
    start = {"event": "start", "size": 2, "global_batch_size": 128, "total_steps": 1000, "first_step": 0}
    events: list[dict[str, Any]] = [start | {"parameters": 1_000_000, "ranks": ranks}]
    for step, seconds in ((10, 9.0), (20, 0.11), (30, 0.12), (40, 0.10)):
        events.append({"event": "train", "step": step, "sec_per_step": seconds, "communication_sec": 0.01})
        events[-1]["examples_per_sec"] = 128 / seconds
    (directory / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return directory


def test_a_run_is_forecast(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "forecast"
    assert main(["predict", str(run), "--preset", "p4d", "--nodes", "4", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "measured on 2 ranks, 3 intervals of the log" in shown
    written = json.loads((out / "forecast.json").read_text())
    assert [row["expected"]["devices"] for row in written["rows"]] == [8, 16, 32]
    assert (written["work"]["step_sec"], written["work"]["compute_sec"]) == (0.11, pytest.approx(0.10))
    assert sum(math.prod(shape) for shape in written["work"]["shapes"]) == 1_000_000
    rate = written["rows"][0]["expected"]["examples_per_sec"]
    assert f"{128_000 / rate / 3600:.2f}" in shown
    assert "<div" in (out / "forecast.html").read_text()


def test_a_report_shows_forecast_and_measured(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two = ["--cluster.devices_per_node", "2", "--out", str(tmp_path / "forecast")]
    assert main(["predict", *FLAGS, *two, "--nodes", "2"]) == 0
    file = tmp_path / "forecast/forecast.json"
    assert main(["report", str(run), "--forecast", str(file)]) == 0
    expected = json.loads(file.read_text())["rows"][0]["expected"]
    [rate, step, own, communication] = compare_with(read_run(run), read_forecast(file)).rows
    step_ms, exposed_ms = 1000 * expected["step_sec"], 1000 * expected["exposed_sec"]
    assert rate[1:3] == ("1,164", f"{expected['examples_per_sec']:,.0f}")
    assert step[1:] == ("110", f"{step_ms:.4g}", f"{110 - step_ms:+.4g}")
    assert own[1:] == ("100", f"{step_ms - exposed_ms:.4g}", f"{100 - step_ms + exposed_ms:+.4g}")
    assert communication[1:] == ("10", f"{exposed_ms:.4g}", f"{10 - exposed_ms:+.4g}")
    assert f"<td>{step[2]}</td><td>{step[3]}</td>" in (run / "report.html").read_text()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (None, "which cannot be read: No such file or directory"),
        ("{}", "holds no forecast. Make one: ringtrain predict RUN --out DIR"),
        ('{"rows": [{"expected": 1}]}', "holds no forecast"),
    ],
)
def test_what_is_no_forecast_is_refused(
    text: str | None, named: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "forecast.json"
    if text is not None:
        file.write_text(text)
    assert main(["report", str(run), "--forecast", str(file)]) == 2
    assert named in capsys.readouterr().err


def test_a_forecast_of_other_sizes_says_so(run: Path) -> None:
    row = {name: {"devices": 8.0} for name in ("expected", "low", "high")}
    assert compare_with(read_run(run), {8: row}).note == "The forecast is for 8 ranks, not for 2."


def test_a_fit_is_forecast(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It logs neither its batch nor its length."""
    start, *others = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    del start["global_batch_size"], start["total_steps"], start["first_step"]
    start["trained_shapes"] = [[1000, 1000]]
    events = [start, *(event | {"examples_per_sec": 64 / event["sec_per_step"]} for event in others)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert main(["predict", str(run), "--nodes", "1", "--out", str(run / "forecast")]) == 0
    work = json.loads((run / "forecast/forecast.json").read_text())["work"]
    assert work["batch_size"] == pytest.approx(32, rel=0.1)
    assert work["shapes"] == [[1000, 1000]]


def test_input_and_checkpoints_limit_the_rate(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", *FLAGS, "--nodes", "2", "--input_rate", "320"]) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[1].split()[2:5] == ["2,560"] * 3  # 8 devices
    assert "steps wait for input, or for checkpoints to be written, on 8, 16 devices" in shown
    assert WORK.least_sec(1.0) == 0
    assert replace(WORK, save_sec=30.0, save_every=100).least_sec(1.0) == pytest.approx(0.3)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"event": "checkpoint", "step": 40, "seconds": 2.0}\n')
    (run / "config.yaml").write_text("workload: digits\ncheckpoint_every: 10\noptimizer: {name: sgd}\n")
    assert measure(run)[0].least_sec(1.0) == pytest.approx(0.2)


def test_a_link_is_fitted_to_measured_sums() -> None:
    link = Link(gbit=12.5, latency_us=40)
    assert fit_link([(1024, 2e-5), (4096, 1e-5)], 4) is None
    found = fit_link([(size, link.ring(size, 4)) for size in (1024, 2**16, 2**22, 2**28)], 4)
    assert found is not None
    assert (found.gbit, found.latency_us) == pytest.approx((link.gbit, link.latency_us))


def test_a_step_is_forecast_from_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", *FLAGS, "--nodes", "2", "--cluster.node_gbit", "10"]) == 0
    slow = capsys.readouterr().out.splitlines()
    assert main(["predict", *FLAGS, "--nodes", "2"]) == 0
    assert [line.split()[:2] for line in slow[1:3]] == [["1", "8"], ["2", "16"]]
    assert slow[2] != capsys.readouterr().out.splitlines()[2]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--preset", "dgxa10"], "Did you mean 'dgxa100'?"),
        (["--cluster.node_gbit", "0"], "cluster.node_gbit is 0.0; it must be from 0.001 to 100000, in Gbit/s"),
        (["--cluster.devices_per_node", "0"], "cluster.devices_per_node is 0; it must be from 1 to 1024"),
        (["--nodes", "0"], "nodes is 0; it must be a finite number above 0"),
        (["--input_rate", ".nan"], "input_rate is nan; it must be a finite number above 0"),
        (["--input_rate", ".inf"], "input_rate is inf; it must be a finite number above 0"),
        (["--nodes", "100000"], "nodes is 100000; it must be at most 4096"),
        (["--global_batch_size", "100"], "global_batch_size is 100, less than the 512 devices"),
        (["--variation", "3"], "variation is 3.0; it must be from 0 to 1"),
    ],
)
def test_an_impossible_cluster_is_refused(words: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", *FLAGS, *words]) == 2
    assert named in capsys.readouterr().err


def test_a_run_that_is_too_short_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join(lines[:3]) + "\n")
    assert main(["predict", str(run)]) == 2
    assert "holds 1 measured intervals of steps; a forecast needs 2" in capsys.readouterr().err
    (run / "metrics.jsonl").write_text("\n".join([lines[0], *['{"event": "train", "step": 5}'] * 5]) + "\n")
    assert main(["predict", str(run)]) == 2
    assert "holds 0 measured intervals" in capsys.readouterr().err
    assert main(["predict", str(run), "--batch_size", "8"]) == 2
    assert "batch_size is given without the time of its steps" in capsys.readouterr().err
    assert main(["predict", "--step_sec", "0.1"]) == 2
    assert "batch_size is missing. Give the directory of a run, or --batch_size and --parameters." in (
        capsys.readouterr().err
    )
