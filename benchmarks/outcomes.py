"""Read what a contender left behind. Missing or invalid files raise their own exceptions."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.contenders import Finished, Outcome, UnreadableError
from ringtrain.run.store import find_newest

RUN = "run"  # ringtrain's run directory, below that of the contender
LARGEST_RIGHT_LOSS = 30.0  # of ten classes; chance is ln 10 = 2.3, and MANY begins with 10


def read_peer(finished: Finished) -> Outcome:
    [result] = _read_results(finished.directory)
    first = finished.directory / "first.npz"
    return Outcome(
        figures={"step": steady(result["sec_per_step"])},
        raw={"sec_per_step": result["sec_per_step"]},
        loss=result["loss"],
        weights=read_arrays(finished.directory / "result.npz"),
        first_weights=read_arrays(first) if first.exists() else None,
    )


def read_unconnected(finished: Finished) -> Outcome:
    """Give the seconds of a step at the processes' mean speed."""
    results = _read_results(finished.directory)
    seconds = [steady(result["sec_per_step"]) for result in results]
    losses = [result["loss"] for result in results]
    is_right = all(loss < LARGEST_RIGHT_LOSS for loss in losses)
    return Outcome(
        figures={"step": statistics.harmonic_mean(seconds)},
        raw={"sec_per_step": [result["sec_per_step"] for result in results], "losses": losses},
        fault="" if is_right else f"a loss is not that of a training: {losses}",
        checked="a bound, which trains something else: its losses are finite",
    )


def read_training(finished: Finished) -> Outcome:
    """Use ringtrain's log and last checkpoint."""
    last, sec_per_step = _read_log(finished)
    checkpoint, _ = find_newest(finished.directory / RUN / "checkpoints")
    if checkpoint is None or checkpoint.step != last["step"]:
        raise UnreadableError("its last step is not saved")
    weights = [value for name, value in checkpoint.variables.items() if name.startswith("weights/")]
    figures, raw = {"step": steady(sec_per_step)}, {"sec_per_step": sec_per_step}
    return Outcome(figures=figures, raw=raw, loss=last["loss"], weights=weights)


def read_own_data(finished: Finished) -> Outcome:
    """Nothing else trains on the data: the loss must be plausible."""
    last, sec_per_step = _read_log(finished)
    loss = last["loss"]
    return Outcome(
        figures={"step": steady(sec_per_step)},
        raw={"sec_per_step": sec_per_step, "loss": loss},
        fault="" if loss < LARGEST_RIGHT_LOSS else f"a loss of {loss} is not that of a training",
        checked=f"loss {loss:.4g} after {last['step']} steps",
    )


def read_start(finished: Finished) -> Outcome:
    if finished.sec_until_first_step is None:
        raise UnreadableError("it ended without a line of its first step")
    figures = {"first step": finished.sec_until_first_step}
    return Outcome(figures=figures, checked="the line of the first step, and exit code 0")


def read_figures(finished: Finished) -> Outcome:
    """For scripts that measure and check."""
    [result] = _read_results(finished.directory)
    return Outcome(**{"raw": {}, **result})


def steady(sec_per_step: list[float]) -> float:
    """Median without the first interval, the warm-up."""
    return statistics.median(sec_per_step[1:])


def read_arrays(path: Path) -> list[np.ndarray]:
    with np.load(path, allow_pickle=False) as archive:
        return [archive[f"arr_{number}"] for number in range(len(archive.files))]


def _read_results(directory: Path) -> list[dict[str, Any]]:
    results = [json.loads(path.read_text()) for path in sorted(directory.glob("result*.json"))]
    if not results:
        raise UnreadableError("it wrote no result")
    return results


def _read_log(finished: Finished) -> tuple[dict[str, Any], list[float]]:
    """Return the last event, and seconds per step of each interval."""
    text = (finished.directory / RUN / "metrics.jsonl").read_text()
    lines = [event for event in map(json.loads, text.splitlines()) if event["event"] == "train"]
    return lines[-1], [line["sec_per_step"] for line in lines]
