"""What is made of the runs: checks and tables."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from benchmarks.__main__ import bench_one, show
from benchmarks.contenders import Contender, Finished, Outcome, UnreadableError, check_outcome
from benchmarks.outcomes import read_own_data, read_start, read_unconnected
from benchmarks.peers.peer_models import MODELS, make_samples
from benchmarks.rounds import read_outcome
from benchmarks.settings import BenchOptions
from benchmarks.table import describe_result
from ringtrain.errors import UsageError

FIRST, LAST = [np.zeros(4), np.ones(2)], [np.ones(4), np.full(2, 3.0)]
REFERENCE = Outcome(figures={"step": 1.0}, loss=2.0, weights=LAST, first_weights=FIRST)


def outcome(*, loss: float = 2.0, weights: list[np.ndarray] | None = None) -> Outcome:
    return Outcome(figures={"step": 1.0}, loss=loss, weights=LAST if weights is None else weights)


def test_an_outcome_that_is_one_processs_is_right() -> None:
    fault, checked = check_outcome(outcome(), REFERENCE)
    assert not fault
    assert "0.0e+00 from one process" in checked


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (outcome(loss=2.001), "the loss differs"),
        (outcome(loss=float("nan")), "the loss differs"),
        (outcome(weights=[LAST[0] * 1.01, LAST[1]]), "the weights differ"),
        (outcome(weights=FIRST), "the weights differ"),
        (outcome(weights=LAST[:1]), "the weights differ"),
        (outcome(weights=[LAST[0] * np.nan, LAST[1]]), "the weights differ"),
    ],
)
def test_a_wrong_outcome_is_named(wrong: Outcome, words: str) -> None:
    fault, _ = check_outcome(wrong, REFERENCE)
    assert words in fault


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "CNN" else pytest.mark.slow) for name in MODELS]
)
def test_ranks_that_train_apart_are_found(name: str) -> None:
    together, alone = train(name, slice(None)), train(name, slice(MODELS[name].local_batch_size))
    assert not check_outcome(together, together)[0]
    fault, _ = check_outcome(Outcome(figures={}, loss=together.loss, weights=alone.weights), together)
    assert "the weights differ" in fault


def train(name: str, part: slice) -> Outcome:
    """A step on this part of the global batch of two ranks."""
    spec = MODELS[name]
    model, optimizer = spec.create(), keras.optimizers.SGD(spec.learning_rate)
    first = [np.copy(weights) for weights in model.get_weights()]
    x, y = make_samples(spec)
    batch = np.arange(2 * spec.local_batch_size)[part]
    with tf.GradientTape() as tape:
        loss = keras.losses.sparse_categorical_crossentropy(y[batch], model(x[batch]), from_logits=True)
    optimizer.apply(tape.gradient(loss, model.trainable_weights), model.trainable_weights)
    return Outcome(figures={}, loss=1.0, weights=model.get_weights(), first_weights=first)


def test_a_step_time_is_the_median_after_the_warm_up(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    seconds = [9.0, 0.1, 0.2, 0.9]
    events: list[dict[str, Any]] = [{"event": "start"}]
    events += [{"event": "train", "step": n, "loss": 2.0, "sec_per_step": s} for n, s in enumerate(seconds)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in events))
    read = read_own_data(Finished(directory=tmp_path, sec_until_first_step=None))
    assert read.figures == {"step": 0.2}
    assert read.raw["sec_per_step"] == seconds


def test_processes_apart_count_by_their_mean_speed(tmp_path: Path) -> None:
    for rank, seconds in enumerate((1.0, 3.0)):
        (tmp_path / f"result-{rank}.json").write_text(json.dumps({"sec_per_step": [0, seconds], "loss": 1.0}))
    read = read_unconnected(Finished(directory=tmp_path, sec_until_first_step=None))
    assert read.figures["step"] == pytest.approx(2 / (1 / 1.0 + 1 / 3.0))


@pytest.mark.parametrize("read", [read_own_data, read_start, read_unconnected])
def test_missing_output_is_not_taken_for_a_result(read: Any, tmp_path: Path) -> None:
    with pytest.raises(UnreadableError):
        read_outcome(Contender("c", "", (), read), Finished(directory=tmp_path, sec_until_first_step=None))


def result(**second_round: Any) -> dict[str, Any]:
    """A result file of two rounds: ours takes 1 and 2 ms, theirs twice as long."""

    def run(seconds: float) -> dict[str, Any]:
        return {"figures": {"step": seconds}, "checked": "", "fault": ""}

    rounds: list[dict[str, Any]] = [
        {"round": number, "order": [], "runs": {"ours": run(number / 1000), "theirs": run(2 * number / 1000)}}
        for number in (1, 2)
    ]
    rounds[1]["runs"].update(second_round)
    experiment = {
        "name": "CNN",
        "unit": "a step",
        "num_bytes": {},
        "contenders": {"ours": {}, "theirs": {}},
        "comparisons": [{"name": "ours", "other": "theirs", "goal": 1.5}],
        "reference": {"fault": ""},
        "rounds_wanted": 2,
        "rounds": rounds,
    }
    machine = {"processor": "P", "cores": 2}
    head = {"command": "bench step", "commit": "abc", "is_changed": False, "machine": machine, "size": 2}
    return {**head, "load_before": [0.1], "load_after": [0.2], "experiments": [experiment]}


def test_the_table_shows_medians_and_paired_ratios() -> None:
    text = "\n".join(describe_result(result()))
    assert "ours / theirs  2.000  2.000-2.000  2 pairs (50 %)" in text
    assert "goal 1.500 reached" in text
    assert "all 4 runs ended well and were checked" in text


def test_a_failed_run_is_shown_and_not_counted() -> None:
    failed = {"fault": "mpirun ended with 1; its last lines:\n    boom"}
    text = "\n".join(describe_result(result(theirs=failed)))
    assert "1 of 4 runs failed or were wrong:" in text
    assert "CNN, round 2, theirs: mpirun ended with 1" in text
    assert "boom" in text
    assert "1 pairs" in text


def test_contenders_without_comparisons_have_a_table() -> None:
    alone = result()
    alone["experiments"][0]["comparisons"] = []
    text = "\n".join(describe_result(alone))
    assert "theirs" in text
    assert "times as fast" not in text
    assert text.endswith("all 4 runs ended well and were checked")


def test_missing_rounds_are_reported() -> None:
    cut = result()
    cut["experiments"][0]["rounds_wanted"] = 7
    assert "CNN: 2 of 7 rounds were run" in "\n".join(describe_result(cut))


def test_sums_are_shown_with_their_bandwidth() -> None:
    values = result()
    [experiment] = values["experiments"]
    experiment["num_bytes"] = {"65536": 65536}
    for each in experiment["rounds"]:
        for run in each["runs"].values():
            run["figures"] = {"65536": 1e-4}
    assert "0.655" in "\n".join(describe_result(values))  # GB/s: 65,536 bytes in 100 microseconds


def test_a_file_that_is_no_result_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text("[1]")
    with pytest.raises(UsageError, match="no result file"):
        show(path, print)


WRONG: dict[str, Callable[[Path], object]] = {
    "no experiments": lambda path: path.write_text(json.dumps(result() | {"experiments": 3})),
    "no load": lambda path: path.write_text(json.dumps(result() | {"load_before": []})),
    "machine": lambda path: path.write_text(json.dumps(result() | {"machine": 7})),
    "rounds": lambda path: path.write_text(json.dumps(changed(rounds=[{"runs": [1]}]))),
    "zero": lambda path: path.write_text(json.dumps(changed(contenders=[], rounds=[{"runs": {"a": {}}}]))),
}


def changed(**values: Any) -> dict[str, Any]:
    value = result()
    value["experiments"][0] |= values
    return value


@pytest.mark.parametrize("kind", WRONG)
def test_an_invalid_result_file_gives_a_one_line_error(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "bench-step.json"
    WRONG[kind](path)
    with pytest.raises(UsageError, match="no result file of the benchmarks") as raised:
        show(path, print)
    assert "\n" not in str(raised.value)


def test_an_unwritable_path_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    options = BenchOptions(output=tmp_path / "file" / "result.json")
    with pytest.raises(UsageError, match=r"result\.json' cannot be written: .*Give another place with --output"):
        bench_one("step", options, [], print)
