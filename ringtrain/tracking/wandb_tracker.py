"""Weights & Biases; with WANDB_MODE=offline it writes to the run directory."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import wandb

from ringtrain.files.bounded import make_directory
from ringtrain.tracking.base import PROJECT, Row, TrackedRun


class WandbTracker:
    def __init__(self) -> None:
        self._run: Any = None
        self._project = os.environ.get("WANDB_PROJECT", PROJECT)
        is_offline = os.environ.get("WANDB_MODE") == "offline"
        server = "offline" if is_offline else os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
        self.address = f"{server} {os.environ.get('WANDB_ENTITY', '')}/{self._project}"

    def start(self, run: TrackedRun) -> None:
        make_directory(run.path / "wandb")  # a link would be followed
        self._run = wandb.init(
            project=self._project,
            id=run.id,
            name=run.name,
            config={**run.parameters, **run.tags},
            dir=os.environ.get("WANDB_DIR", str(run.path)),
            resume="allow",
        )
        self._run.define_metric("*", step_metric="step")  # a resumed run may send a step again

    def log(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._run.log({"step": row.step, **row.values})

    def end(self, status: str, tags: Mapping[str, str], files: Sequence[Path]) -> None:
        self._run.summary.update(dict(tags))
        for file in files:
            self._run.save(str(file), base_path=str(file.parent), policy="now")
        self._run.finish(exit_code=0 if status in ("completed", "preempted") else 1)


create = WandbTracker
