"""What the report reads of a run directory, and what it makes of it."""

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ringtrain
from ringtrain.cli import main
from ringtrain.errors import STATUS_WORDS, RingtrainError
from ringtrain.report.charts import describe_end, find_marks, plan_charts
from ringtrain.report.figures import DrawnRun, make_figures
from ringtrain.report.page import load_template, make_page
from ringtrain.report.ranking import rank
from ringtrain.report.reading import RunRecord, choose_settings, parse_events, read_run
from ringtrain.report.series import make_curves, thin
from ringtrain.report.tables import MISSING, compare_settings, format_seconds, list_facts, list_ranks, list_stacks
from ringtrain.report.timing import split_time
from ringtrain.run.directory import FIT_SETTINGS
from tests.report.made_run import START, eval_event, make_run, timed, train_event, usual_events

# --- What cannot be reported is said in one line ---


DAMAGES: dict[str, tuple[str, bytes | None, str]] = {  # a file of the run, its content, and what is said
    "no config": ("config.yaml", None, "is no run directory: it holds no config.yaml"),
    "damaged config": ("config.yaml", b"- 1\n", "config.yaml' is damaged"),
    "no events": ("metrics.jsonl", None, "cannot be read: No such file"),
    "empty events": ("metrics.jsonl", b"", "holds nothing to report: it is empty"),
    "damaged events": ("metrics.jsonl", b"\0\xff{\n[]\n7\n" * 3, "holds nothing to report: it contains no event"),
    "nothing there": ("", None, "is no run directory"),
    "a file": ("", b"text", "is no run directory"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_directory_without_a_run_gives_a_one_line_error(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, content, expected = DAMAGES[kind]
    path = make_run(tmp_path / "run")
    (path / name).unlink() if name else shutil.rmtree(path)
    if content is not None:
        (path / name).write_bytes(content)
    assert main(["report", str(path), "--output", str(tmp_path / "report.html")]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("ringtrain: error: ")
    assert expected in line
    assert str(path) in line
    assert not (tmp_path / "report.html").exists()


def test_an_unwritable_path_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "no" / "report.html"
    assert main(["report", str(make_run(tmp_path / "run")), "--output", str(target)]) == 2
    assert f"cannot be written to {str(target)!r}: No such file or directory" in capsys.readouterr().err


def test_the_last_line_gives_the_path_of_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "a")
    make_run(tmp_path / "b")
    assert main(["report", "a"]) == 0
    assert capsys.readouterr().out == "the report of 1 run is in a/report.html\n"
    assert main(["report", "a", "b"]) == 0
    assert capsys.readouterr().out == "the report of 2 runs is in report.html\n"
    assert (tmp_path / "a/report.html").is_file()
    assert (tmp_path / "report.html").is_file()


def test_a_run_is_reported_without_tensorflow(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    script = f"""
import sys
from ringtrain.cli import main
assert main(["report", {str(tmp_path / "run")!r}]) == 0
print(sorted({{"tensorflow", "keras", "horovod", "mpi4py"}} & set(sys.modules)))
"""
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert finished.stdout.splitlines()[-1] == "[]"


# --- Events ---


@pytest.mark.parametrize("cut", [1, 20, 40])
def test_a_last_line_that_is_being_written_is_normal(cut: int) -> None:
    whole = "".join(json.dumps(event) + "\n" for event in usual_events()).encode()
    events, num_unreadable = parse_events(whole[:-cut].splitlines(keepends=True))
    assert num_unreadable == 0
    expected = list(usual_events())
    assert events == (expected if cut == 1 else expected[:-1])


def test_damaged_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    lines[3:3] = ['{"event": "tr', '{"event": "train", "step": "3"}', "[" * 100_000, '{"event": "train", "step": true}']
    (run / "metrics.jsonl").write_text("\n".join(lines))
    record = read_run(run)
    assert len(record.events) == len(lines) - 4
    assert record.num_unreadable == 4
    assert "4 lines of metrics.jsonl could not be read" in make_page([record])


def test_curves_hold_the_values_of_the_events() -> None:
    events = timed(list(usual_events()))
    curves = make_curves(events)
    trained = [event for event in events if event["event"] == "train"]
    loss = curves["train/loss"]
    assert loss.means.tolist() == loss.lows.tolist() == loss.highs.tolist() == [e["loss"] for e in trained]
    assert loss.steps.tolist() == [e["step"] for e in trained]
    pause = 0.25  # from the stop to the next start
    np.testing.assert_allclose(
        loss.elapsed, [e["time"] - events[0]["time"] - pause * (e["step"] > 20) for e in trained]
    )
    assert curves["eval/accuracy"].means.tolist() == [e["accuracy"] for e in events if e["event"] == "eval"]
    assert not any(name.endswith(("/time", "/seconds", "/samples", "/epoch")) for name in curves)


def test_nonfinite_values_do_not_break_a_curve() -> None:
    values: list[Any] = ["nan", 1.0, "inf", 2.0, None, "-inf", 10**400, "text", True]
    curve = make_curves([{"event": "train", "step": step, "loss": value} for step, value in enumerate(values)])[
        "train/loss"
    ]
    np.testing.assert_array_equal(curve.means, [np.nan, 1, np.nan, 2, np.nan, np.nan])
    assert (curve.num_not_finite, curve.num_values) == (4, 6)
    assert curve.crosses.tolist() == [0, 2, 5, 6]


def test_of_a_step_that_is_there_twice_the_later_counts() -> None:
    events = [train_event(1, loss=1.0), train_event(2, loss=2.0), train_event(1, loss=3.0)]
    curve = make_curves(events)["train/loss"]
    assert (curve.steps.tolist(), curve.means.tolist()) == ([1, 2], [3, 2])


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.one_of(st.floats(-1e6, 1e6), st.just(float("nan"))), min_size=1, max_size=400),
    strides=st.lists(st.integers(1, 50), min_size=400, max_size=400),
    max_points=st.integers(2, 50),
)
def test_thinning_keeps_the_extremes_of_each_interval(values: list[float], strides: list[int], max_points: int) -> None:
    steps, logged = np.cumsum(strides[: len(values)]).astype(float), np.array(values)
    curve = thin(steps, steps, logged, max_points=max_points)
    assert len(curve.steps) <= max_points
    assert curve.steps[-1] == steps[-1]
    before = -1.0
    for place, end in enumerate(curve.steps):
        inside = logged[(steps > before) & (steps <= end)]
        finite = inside[np.isfinite(inside)]
        if len(finite):
            assert (curve.lows[place], curve.highs[place]) == (finite.min(), finite.max())
            np.testing.assert_allclose(curve.means[place], finite.mean(), rtol=1e-9, atol=1e-6)
        else:
            assert np.isnan([curve.means[place], curve.lows[place], curve.highs[place]]).all()
        before = end


# --- Charts and marks ---


def test_a_loss_over_two_decades_has_a_logarithmic_axis() -> None:
    def scale(first: float, last: float) -> str:
        events = [train_event(1, loss=first), train_event(2, loss=last)]
        [chart] = [chart for chart in plan_charts([make_curves(events)]) if chart.title == "Loss"]
        return chart.scale

    assert [scale(1, 0.02), scale(1, 0.005), scale(1, 0), scale(1, -5)] == ["linear", "log", "linear", "linear"]


def test_the_loss_on_the_data_is_drawn_if_it_differs() -> None:
    def titles(**values: Any) -> list[str]:
        return [chart.title for chart in plan_charts([make_curves([train_event(1, **values), eval_event(1)])])]

    usual = ["Loss", "Accuracy", "Learning rate", "Gradient norm", "Throughput, all ranks"]
    assert titles() == usual
    assert titles(data_loss=0.5) == ["Loss", "Loss on the data, without regularisation", *usual[1:]]
    assert titles(input_sec=0.1)[-1] == "Step time"


def test_restarts_warnings_and_ends_are_marked_at_their_steps(tmp_path: Path) -> None:
    marks, num_left_out = find_marks(RunRecord(path=tmp_path, events=timed(list(usual_events()))))
    assert [(mark.kind, mark.step) for mark in marks] == [
        ("warning", 20), ("end", 20), ("restart", 20), ("end", 40),
    ]  # fmt: skip
    assert num_left_out == 0
    assert marks[2].text == "started again on 4 ranks from step 20"
    diverged = [START, train_event(3), {"event": "end", "status": "diverged", "exit_code": 4, "message": "step 4: nan"}]
    [mark] = find_marks(RunRecord(path=tmp_path, events=diverged))[0]
    assert (mark.kind, mark.step, mark.elapsed, mark.text) == ("failure", 3, None, "diverged, exit code 4: step 4: nan")


def test_charts_reach_to_the_last_mark(tmp_path: Path) -> None:
    saved = {"event": "checkpoint", "step": 48}
    run = RunRecord(path=tmp_path, events=timed([START, train_event(40), saved, {"event": "end", "exit_code": 75}]))
    curves = make_curves(run.events)
    drawn = DrawnRun("run", curves, *find_marks(run))
    for along_time, end in ((False, 48), (True, 0.75)):
        figure, *_ = make_figures(plan_charts([curves]), [drawn], along_time=along_time)
        assert figure["layout"]["xaxis"]["range"] == [0, end]


def test_a_run_of_a_single_curve_is_drawn() -> None:
    curves = make_curves([{"event": "eval", "step": 3, "loss": 0.5}, {"event": "eval", "step": 6, "loss": 0.4}])
    assert len(curves) == 1
    figure, *_ = make_figures(plan_charts([curves]), [DrawnRun("run", curves, [], 0)], along_time=False)
    assert figure["layout"]["xaxis"]["range"] == [0, 6]


# --- Time breakdown ---


def at(seconds: float, event: dict[str, Any]) -> dict[str, Any]:
    return event | {"time": 1e9 + seconds}


END = {"event": "end", "status": "completed", "exit_code": 0}
KILLED = [at(0, START), at(3, train_event(20)), at(100, START | {"first_step": 20}), at(104, train_event(40))]


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([at(0, START), at(3, train_event(20)), at(4, eval_event(20)), at(5, END)],
         {"training": 2, "evaluation": 0.5, "rest": 2.5}),
        ([*KILLED, at(105, END)], {"training": 4, "killed": 97, "rest": 4}),
        ([*KILLED[:2], at(6, {"event": "end", "status": "preempted", "exit_code": 75}), *KILLED[2:]],
         {"training": 4, "rest": 6}),
        ([*KILLED[:2], at(6, {"event": "end", "status": "diverged", "exit_code": 4}), *KILLED[2:]],
         {"training": 4, "lost": 3, "rest": 3}),
        ([at(0, {"event": "end", "status": "usage", "exit_code": 2}), at(3600, START), at(3603, train_event(20))],
         {"training": 2, "rest": 1}),
        ([at(0, START), at(9, {"event": "end", "status": "hang", "exit_code": 6})], {"lost": 9}),
        ([at(0, START), at(3, train_event(20, input_sec=0.01, compute_sec=0.06, communication_sec=0.02))],
         {"input_sec": 0.2, "compute_sec": 1.2, "communication_sec": 0.4, "other_sec": 0.2, "rest": 1}),
        ([START, train_event(20), eval_event(20), END], {"training": 2, "evaluation": 0.5}),
        ([START, END], {}),
    ],
    ids=["whole", "killed", "preempted", "diverged", "mistyped", "hung", "split", "no times", "no steps"],
)  # fmt: skip
def test_the_time_is_split_by_activity(events: list[dict[str, Any]], expected: dict[str, float]) -> None:
    assert split_time(events) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (59.9, "59.9 s"), (59.97, "1 min"), (125, "2 min 5 s"), (3600, "1 h"), (7500, "2 h 5 min"),
     (90000, "1 d 1 h")],
)  # fmt: skip
def test_durations_are_written_in_their_two_largest_units(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_the_ranks_of_the_last_start_are_listed_with_their_usage(tmp_path: Path) -> None:
    places = [{"node": f"n{rank}", "pid": 7, "device": "CPU", "cores": "0-3"} for rank in range(2)]
    usage = [{"input_sec": 2.0, "peak_memory_mib": 1500 + rank} for rank in range(2)]
    events = [START | {"ranks": places[:1]}, END, START | {"ranks": places}, END | {"ranks": usage}]
    assert list_ranks(RunRecord(path=tmp_path, events=events)) == (
        ["node", "device", "cores", "process ID", "input", "peak memory"],
        [["n0", "CPU", "0-3", "7", "2.0 s", "1,500 MiB"], ["n1", "CPU", "0-3", "7", "2.0 s", "1,501 MiB"]],
        0,
    )
    assert list_ranks(RunRecord(path=tmp_path, events=events[:3])).rows[1] == ["n1", "CPU", "0-3", "7"]
    assert list_ranks(RunRecord(path=tmp_path, events=[START, END])).rows == []
    many = RunRecord(path=tmp_path, events=[START | {"ranks": places * 100}])
    assert (len(list_ranks(many).rows), list_ranks(many).num_left_out) == (128, 72)


def test_the_stacks_of_a_hang_are_listed_by_their_ranks(tmp_path: Path) -> None:
    stacks = [{"ranks": [1], "text": "sleeps"}, {"ranks": [0, 2], "text": "waits"}, {"ranks": "all"}, "x"]
    hang = {"event": "end", "status": "hang", "exit_code": 6, "stacks": stacks}
    assert list_stacks(RunRecord(path=tmp_path, events=[START, hang])) == [
        ("rank 1", "sleeps"),
        ("ranks 0, 2", "waits"),
    ]
    assert list_stacks(RunRecord(path=tmp_path, events=[START, hang, START])) == []


def test_a_fit_shows_only_the_settings_of_its_callback() -> None:
    source = (Path(ringtrain.__file__).parent / "keras/run.py").read_text()
    [run] = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef) and node.name == "Run"]
    [init] = [node for node in run.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    assert {argument.arg for argument in init.args.kwonlyargs} <= set(FIT_SETTINGS)
    config = {
        "workload": "fit of a.py",
        "options": {"optimizer": "Adam"},
        "epochs": 3,
        "optimizer": {},
        "backend": "auto",
    }
    assert list(choose_settings(config)) == ["workload", "options", "epochs"]
    assert choose_settings(config | {"workload": "digits"})["backend"] == "auto"


def summarize(run: RunRecord) -> dict[str, str]:
    return {fact.name: f"{fact.value} {fact.note}".strip() for fact in list_facts(run)}


def test_the_summary_of_a_stopped_run_shows_the_saved_step(tmp_path: Path) -> None:
    saved = {"event": "checkpoint", "step": 37, "path": "checkpoints/step-000000037"}
    assert summarize(RunRecord(path=tmp_path, events=[START, train_event(30), saved]))["Steps"] == "37 of 40"
    resumed = [START | {"first_step": 37}]
    assert summarize(RunRecord(path=tmp_path, events=resumed))["Steps"] == "37 of 40"


def test_the_summary_shows_the_longest_of_several_restarts(tmp_path: Path) -> None:
    restarts = [
        train_event(20, restart_sec=21.5),
        train_event(30, restart_sec=125),
        train_event(40, restart_sec="?"),
        train_event(50, restart_sec=10**400),
    ]
    facts = summarize(RunRecord(path=tmp_path, events=[START, *restarts]))
    assert facts["Longest restart"] == "2 min 5 s between the logged steps before and after it"
    assert "Longest restart" not in summarize(RunRecord(path=tmp_path, events=[START, train_event(20)]))
    assert "train/restart_sec" not in make_curves(restarts)


def test_the_summary_of_a_fit_omits_unknown_facts(tmp_path: Path) -> None:
    start = {"event": "start", "workload": "fit of a.py", "size": 2, "first_step": 0, "parameters": 227}
    facts = summarize(RunRecord(path=tmp_path, events=[start, train_event(2), eval_event(2)]))
    assert facts["Samples trained on"].startswith("128")
    assert (facts["Best evaluation loss"], facts["Accuracy"]) == ("1.5 at step 2", "0.5 at step 2")
    assert not {"Samples", "Steps per epoch"} & set(facts)


def test_an_end_is_named_in_plain_words() -> None:
    assert describe_end({"status": "lostranks", "exit_code": 1, "message": "why"}) == "lost a rank, exit code 1: why"
    kinds = [RingtrainError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    one_word = {"failed", "diverged", "hang", "preempted", "damaged"}
    assert {kind.status() for kind in kinds if kind.__module__.startswith("ringtrain.")} - one_word <= set(STATUS_WORDS)


def test_differing_and_equal_settings_are_listed_separately() -> None:
    differing, same = compare_settings([{"seed": 0, "lr": 0.1, "steps": None}, {"seed": 0, "lr": 0.2}])
    assert differing == [("lr", ["0.1", "0.2"]), ("steps", ["null", "not set"])]
    assert [(fact.name, fact.value) for fact in same] == [("seed", "0")]


def test_a_package_that_does_not_load_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "run")
    monkeypatch.setitem(sys.modules, "jinja2", None)
    load_template.cache_clear()
    assert main(["report", str(tmp_path / "run")]) == 2
    assert "what report needs cannot be loaded: ModuleNotFoundError: import of jinja2" in capsys.readouterr().err


def test_runs_are_sorted_by_their_best_metric_with_the_settings_that_differ(tmp_path: Path) -> None:
    def made(name: str, accuracy: float | None, lr: float, seed: int) -> Path:
        evaluations = (
            [] if accuracy is None else [eval_event(1, accuracy=accuracy / 2), eval_event(2, accuracy=accuracy)]
        )
        events = [train_event(1), train_event(2), *evaluations]
        return make_run(tmp_path / name, events, out=name, seed=seed, optimizer={"name": "sgd", "lr": lr})

    paths = [made("a", 0.5, 0.001, 1), made("b", None, 0.1, 1), made("c", 0.9, 0.01, 2), made("<d>", 0.7, 1.0, 1)]
    ranking, best = rank([read_run(path) for path in paths], ["a", "b", "c", "<d>"])
    assert [(row["name"], row["score"]) for row in ranking.rows] == [
        ("c", "0.9"),
        ("<d>", "0.7"),
        ("a", "0.5"),
        ("b", MISSING),
    ]
    assert [run.path.name for run in best] == ["c", "<d>", "a", "b"]
    assert (ranking.settings, ranking.rows[0]["settings"]) == (["optimizer.lr", "seed"], ["0.01", "2"])
    assert [axis.title for axis in ranking.axes] == ["optimizer.lr", "seed", "accuracy"]
    lrs = dict(zip("cdab", [float(line.split()[0].split(",")[1]) for line in ranking.lines], strict=True))
    steps = [lrs["a"] - lrs["c"], lrs["c"] - lrs["b"], lrs["b"] - lrs["d"]]
    assert min(steps) > 0
    assert max(steps) - min(steps) < 0.2, "the axis is not logarithmic"
    assert "<polyline" not in make_page([read_run(path) for path in paths])
    page = make_page([read_run(path) for path in 2 * paths])
    assert page.count("<polyline") == 8
    assert "<d>" not in page
    assert "Below, the best 6 are compared." in page
