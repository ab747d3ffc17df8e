"""A short benchmark, for real: every contender trains the same, and the file says so."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ringtrain.bench.steps import FIT_CONTENDERS, STEP_CONTENDERS
from tests.world.conftest import RunRingtrain
from tests.world.processes import REPOSITORY, clean_environment
from tests.world.running import events

CONTENDERS = {
    "step": ("ringtrain", "bound", "minimal", "tf_distribute"),
    "fit": ("ringtrain", "horovod", "kept", "bound"),
}
PIPELINES = ("OneDataset", "ShardedDataset", "KerasPyDataset")


@pytest.mark.slow
@pytest.mark.parametrize("mode", CONTENDERS)
def test_every_contender_trains_what_one_process_trains(tmp_path: Path, mode: str) -> None:
    output = tmp_path / "bench.json"
    flags = ["--models", "TINY", "--rounds", "1", "--steps", "40", "--log_every", "20", "--timeout", "100"]
    finished = subprocess.run(
        [
            sys.executable, "-m", "ringtrain", "bench", mode, *flags,
            "--contenders", ",".join(CONTENDERS[mode]), "--output", str(output),
        ],
        cwd=REPOSITORY,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=280,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stdout + finished.stderr
    result = json.loads(output.read_text())
    [experiment] = result["experiments"]
    assert set(CONTENDERS[mode]) < set(STEP_CONTENDERS if mode == "step" else FIT_CONTENDERS)
    assert not experiment["reference"]["fault"]
    [only] = experiment["rounds"]
    assert sorted(only["order"]) == sorted(only["runs"]) == sorted(CONTENDERS[mode])
    for name, run in only["runs"].items():
        assert not run["fault"], name
        assert run["figures"]["step"] > 0
        assert "a bound" in run["checked"] if name == "bound" else "from one process; weights" in run["checked"]
    assert "all 4 runs ended well and were checked" in finished.stdout
    assert output.with_suffix(".svg").exists()
    assert str(REPOSITORY) not in output.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("workload", PIPELINES)
def test_the_pipelines_of_bench_input_train(run_ringtrain: RunRingtrain, tmp_path: Path, workload: str) -> None:
    flags = ["--workload", f"ringtrain.bench.pipelines:{workload}", "--synthetic", "true", "--steps", "2"]
    finished = run_ringtrain([*flags, "--out", tmp_path / "run"], launcher="mpirun")
    assert finished.rc == 0, finished.stdout + finished.stderr
    assert events(tmp_path / "run", "train")[-1]["step"] == 2
