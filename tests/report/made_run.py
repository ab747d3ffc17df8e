"""Run directories as a run leaves them, made without training."""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

START_TIME = 1_700_000_000.0
SETTINGS: dict[str, Any] = {
    "workload": "digits",
    "steps": 40,
    "best_metric": "accuracy",
    "best_direction": "max",
    "optimizer": {"name": "adam", "lr": 0.01},
}
START = {
    "event": "start", "workload": "digits", "size": 2, "samples": 640, "global_batch_size": 64, "steps_per_epoch": 10,
    "first_step": 0, "total_steps": 40, "parameters": 1000, "node": "node1", "launcher": "mpirun",
    "versions": {"ringtrain": "1.2.3", "tensorflow": "4.5.6"},
}  # fmt: skip


def train_event(step: int, **values: Any) -> dict[str, Any]:
    """A logged step."""
    loss = 2.5 * math.exp(-step / 10)
    logged = {"loss": loss, "data_loss": loss, "lr": 0.01 / step, "gradient_norm": 1 + step % 3}
    speed = {"examples_per_sec": 640.0, "sec_per_step": 0.1}
    return {"event": "train", "step": step, "epoch": step / 10, "samples_seen": 64 * step, **logged, **speed, **values}


def eval_event(step: int, **values: Any) -> dict[str, Any]:
    """A logged evaluation."""
    scores = {"loss": 3 / step, "data_loss": 3 / step, "accuracy": 1 - 1 / step}
    return {"event": "eval", "step": step, "epoch": step / 10, "samples": 100, "seconds": 0.5, **scores, **values}


def usual_events(num_steps: int = 40, *, log_every: int = 1) -> Iterator[dict[str, Any]]:
    """A run with evaluations, a warning, and a stop with a restart in its middle."""
    middle = num_steps // 2 // log_every * log_every
    yield START
    for step in range(log_every, num_steps + 1, log_every):
        yield train_event(step)
        if step % (10 * log_every) == 0:
            yield eval_event(step)
        if step == middle:
            yield {"event": "warning", "step": step, "message": "rank 1 on node1 is slow"}
            yield {"event": "end", "status": "preempted", "exit_code": 75, "message": "stopped by SIGTERM"}
            yield START | {"first_step": step, "size": 4}
    yield {"event": "end", "status": "completed", "exit_code": 0}


def timed(events: Sequence[dict[str, Any]], *, sec_per_event: float = 0.25) -> list[dict[str, Any]]:
    """The events, each so much after the one before it."""
    return [event | {"time": START_TIME + place * sec_per_event} for place, event in enumerate(events)]


def make_run(path: Path, events: Sequence[dict[str, Any]] | None = None, **settings: Any) -> Path:
    """A run directory that holds the events."""
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(yaml.safe_dump(SETTINGS | settings, sort_keys=False))
    lines = [json.dumps(event) for event in (timed(list(usual_events())) if events is None else events)]
    (path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return path
