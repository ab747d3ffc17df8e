"""When a run has to stop by itself."""

import datetime
import os
import time
from pathlib import Path

import pytest

from ringtrain.runtime.stopping import StopRequests
from ringtrain.runtime.time_limit import TimeLimit, ask_squeue, find_limits, plan_job_limit, read_job_end

JOB = {"SLURM_JOB_ID": "42"}
END = datetime.datetime(2026, 11, 21, 17, 3, 5).timestamp()


def test_max_hours_is_a_limit() -> None:
    assert find_limits(None, {}) == []
    assert find_limits(0.5, {}) == [TimeLimit(seconds_left=1800, reason="--max_hours 0.5")]


@pytest.mark.parametrize(("left", "margin"), [(7200, 120), (600, 60), (60, 10), (5, 10)])
def test_a_job_stops_two_minutes_early_and_a_short_one_a_tenth(left: float, margin: float) -> None:
    limit = plan_job_limit(END, now=END - left, job="42")
    assert limit == TimeLimit(seconds_left=left - margin, reason="the end of Slurm job 42 at 17:03:05")


def test_the_end_is_read_from_squeue_and_else_from_the_variables() -> None:
    variables = {**JOB, "SLURM_JOB_END_TIME": "1234"}
    assert read_job_end(variables, lambda job: {"42": "2026-11-21T17:03:05\n"}[job]) == END
    assert read_job_end(variables, lambda job: "") == 1234
    assert read_job_end(JOB, lambda job: "") is None


@pytest.mark.parametrize("answer", ["NONE\n", "N/A\n", "UNLIMITED\n", "slurm_load_jobs error"])
def test_a_job_without_a_limit_has_no_end_time(answer: str) -> None:
    assert read_job_end({**JOB, "SLURM_JOB_END_TIME": "0"}, lambda job: answer) is None


def test_outside_of_a_job_squeue_is_not_asked() -> None:
    assert read_job_end({"SLURM_JOB_END_TIME": "1234"}, lambda job: pytest.fail("asked")) is None


def test_squeue_is_asked_for_this_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    squeue = tmp_path / "squeue"
    squeue.write_text('#!/bin/sh\necho "$@"\n')
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert ask_squeue("42") == "--noheader --jobs 42 --format %e\n"
    monkeypatch.setenv("PATH", "")
    assert ask_squeue("42") == "", "without squeue it is unknown"


def test_the_first_limit_that_is_reached_stops_the_run() -> None:
    with StopRequests() as requests:
        requests.watch_time(
            [TimeLimit(seconds_left=3600, reason="later"), TimeLimit(seconds_left=0.1, reason="--max_hours 1")]
        )
        assert not requests.is_pending
        end = time.monotonic() + 10
        while not requests.is_pending and time.monotonic() < end:
            time.sleep(0.05)
        assert (requests.reason, requests.cause) == ("--max_hours 1", "time")
