"""Interleaved rounds: in each, every contender runs once, in an order drawn by chance."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.children import ChildFailedError, run_together
from benchmarks.contenders import Contender, Experiment, Finished, Outcome, UnreadableError, check_outcome
from benchmarks.origin import ROOT, shorten
from ringtrain.errors import DataError

Run = dict[str, Any]


@dataclass(frozen=True)
class Runner:
    directory: Path
    env: Mapping[str, str]
    timeout: float

    def run(self, contender: Contender) -> Outcome:
        """Run a contender once, in a temporary directory."""
        directory = self.directory / contender.name
        directory.mkdir()
        try:
            contender.prepare(directory)
            finished = run_together(contender.commands, directory, env=self.env, cwd=ROOT, timeout=self.timeout)
            return read_outcome(contender, finished)
        finally:
            shutil.rmtree(directory)


def read_outcome(contender: Contender, finished: Finished) -> Outcome:
    """Raise UnreadableError for missing or invalid files."""
    try:
        return contender.read(finished)
    except (OSError, ValueError, KeyError, IndexError, DataError) as error:
        raise UnreadableError(f"it left no result that can be read: {type(error).__name__}: {error}") from error


def measure(
    experiment: Experiment, runner: Runner, *, rounds: int, seed: int, note: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Run the rounds of an experiment; ``note`` gets the content of the result file after each run."""
    result: dict[str, Any] = describe_experiment(experiment, rounds)
    reference = None
    if experiment.reference is not None:
        run, reference = measure_once(experiment.reference, runner, None)
        result["reference"] = run
        note(result)
        if reference is None:
            return result
    for number, order in enumerate(plan_orders(experiment.contenders, rounds, seed), start=1):
        runs: dict[str, Run] = {}
        result["rounds"].append({"round": number, "order": [each.name for each in order], "runs": runs})
        for contender in order:
            runs[contender.name], _ = measure_once(contender, runner, reference)
            note(result)
    return result


def measure_once(contender: Contender, runner: Runner, reference: Outcome | None) -> tuple[Run, Outcome | None]:
    start = time.monotonic()
    try:
        outcome = runner.run(contender)
    except (ChildFailedError, UnreadableError) as error:
        return {"fault": str(error), "wall_seconds": round(time.monotonic() - start, 1)}, None
    fault, checked = check_outcome(outcome, reference)
    seconds = round(time.monotonic() - start, 1)
    run = {"figures": outcome.figures, "checked": checked, "fault": fault, "wall_seconds": seconds, "raw": outcome.raw}
    return run, outcome


def plan_orders(contenders: Sequence[Contender], rounds: int, seed: int) -> list[list[Contender]]:
    chance = random.Random(seed)
    return [chance.sample(list(contenders), len(contenders)) for _ in range(rounds)]


def describe_experiment(experiment: Experiment, rounds: int) -> dict[str, Any]:
    """Head of an experiment in the result file."""
    return {
        "name": experiment.name,
        "unit": experiment.unit,
        "num_bytes": dict(experiment.num_bytes),
        "contenders": {
            each.name: {
                "description": each.description,
                "commands": [
                    {"argv": list(map(shorten, command.argv)), "env": dict(command.env)} for command in each.commands
                ],
            }
            for each in experiment.contenders
        },
        "comparisons": [{"name": each.name, "other": each.other, "goal": each.goal} for each in experiment.comparisons],
        "rounds_wanted": rounds,
        "rounds": [],
    }


def find_faults(result: Mapping[str, Any]) -> list[str]:
    """Describe each failed or wrong run in a line."""
    faults = []
    for experiment in result["experiments"]:
        runs = [("reference", experiment.get("reference", {}))]
        runs += [
            (f"round {each['round']}, {name}", run)
            for each in experiment["rounds"]
            for name, run in each["runs"].items()
        ]
        faults += [f"{experiment['name']}, {where}: {run['fault']}" for where, run in runs if run.get("fault")]
    return faults
