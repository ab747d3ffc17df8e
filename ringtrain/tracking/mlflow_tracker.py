"""MLflow, at MLFLOW_TRACKING_URI."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import mlflow
from mlflow.entities import Metric, Param, RunTag

from ringtrain.tracking.base import PROJECT, Row, TrackedRun

NOT_ALLOWED = re.compile(r"[^\w .:/-]")  # in the name of a metric
ID_TAG = "ringtrain.run"
MAX_METRICS, MAX_PARAMETERS = 1000, 100  # of log_batch
STATUSES = {"completed": "FINISHED", "preempted": "SCHEDULED", "killed": "KILLED"}  # others: FAILED


class MlflowTracker:
    def __init__(self) -> None:
        self._client = mlflow.MlflowClient()
        self._experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        self.address = f"{mlflow.get_tracking_uri()} {self._experiment}"
        self._id = ""

    def start(self, run: TrackedRun) -> None:
        experiment = self._client.get_experiment_by_name(self._experiment)
        place = experiment.experiment_id if experiment else self._client.create_experiment(self._experiment)
        found = self._client.search_runs([place], f"tags.`{ID_TAG}` = '{run.id}'")
        created = found[0] if found else self._client.create_run(place, run_name=run.name, tags={ID_TAG: run.id})
        self._id = created.info.run_id
        self._client.update_run(self._id, status="RUNNING")
        known = created.data.params  # MLflow refuses to change them
        params = [Param(key, str(value)) for key, value in run.parameters.items() if key not in known]
        for begin in range(0, len(params), MAX_PARAMETERS):
            self._client.log_batch(self._id, params=params[begin : begin + MAX_PARAMETERS])
        self._tag(run.tags)

    def log(self, rows: Sequence[Row]) -> None:
        metrics = [
            Metric(NOT_ALLOWED.sub("_", name), value, int(1000 * row.time), row.step)
            for row in rows
            for name, value in row.values.items()
        ]
        for begin in range(0, len(metrics), MAX_METRICS):
            self._client.log_batch(self._id, metrics=metrics[begin : begin + MAX_METRICS])

    def end(self, status: str, tags: Mapping[str, str], files: Sequence[Path]) -> None:
        self._tag(tags)
        for file in files:
            self._client.log_artifact(self._id, str(file))
        self._client.set_terminated(self._id, STATUSES.get(status, "FAILED"))

    def _tag(self, tags: Mapping[str, str]) -> None:
        self._client.log_batch(self._id, tags=[RunTag(name, value) for name, value in tags.items()])


create = MlflowTracker
