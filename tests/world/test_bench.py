"""``ringtrain bench`` on real ranks, and a short benchmark: every contender trains the same, and the file says so."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from benchmarks.steps import FIT_CONTENDERS, STEP_CONTENDERS
from ringtrain.collectives import Totals
from tests.world.conftest import RunRingtrain
from tests.world.group import on_ranks
from tests.world.processes import REPOSITORY, clean_environment
from tests.world.running import events

CONTENDERS = {
    "step": ("ringtrain", "bound", "minimal", "tf_distribute"),
    "fit": ("ringtrain", "horovod", "kept", "bound"),
}
PIPELINES = ("OneDataset", "ShardedDataset", "KerasPyDataset")


def test_bench_times_sums_of_many_sizes(run_ringtrain: RunRingtrain) -> None:
    finished = run_ringtrain(["bench", "--max_bytes", "70000", "--factor", "8", "--calls", "2"], launcher="mpirun")
    assert finished.rc == 0, finished.stderr
    rows = [line.split() for line in finished.stdout.splitlines() if line.split()[0].isdigit()]
    assert [row[:2] for row in rows if len(row) == 6] == [["1024", "256"], ["8192", "2048"], ["65536", "16384"]]
    for num_bytes, _, microseconds, algorithm, bus, wrong in rows:
        assert float(algorithm) == pytest.approx(int(num_bytes) / float(microseconds) / 1e3, abs=2e-3)
        assert (bus, wrong) == (algorithm, "0")  # among two ranks each link of a ring carries the whole sum


@on_ranks(2)
def test_bench_counts_wrong_values_and_fails(collective: Any) -> None:
    import tensorflow as tf

    from ringtrain.commands.bench import Options, measure

    options = Options(max_bytes=1024, calls=1, warm_up=0)
    assert measure(collective, options, "core 0") == 0
    sum_in_order = collective.sum_in_order

    def reduce_wrongly(tensors: Any, **options: Any) -> Any:
        [total] = sum_in_order(tensors, **options).tensors
        return Totals([total + tf.one_hot(0, 256)])

    with patch.object(collective, "sum_in_order", reduce_wrongly):
        assert measure(collective, options, "core 0") == 1


@pytest.mark.slow
@pytest.mark.parametrize("mode", CONTENDERS)
def test_every_contender_equals_one_process(tmp_path: Path, mode: str) -> None:
    output = tmp_path / "bench.json"
    flags = ["--models", "TINY", "--rounds", "1", "--steps", "40", "--log_every", "20", "--timeout", "100"]
    finished = subprocess.run(
        [
            sys.executable, "-m", "benchmarks", mode, *flags,
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
    assert str(REPOSITORY) not in output.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("workload", PIPELINES)
def test_the_pipelines_of_bench_input_train(run_ringtrain: RunRingtrain, tmp_path: Path, workload: str) -> None:
    flags = ["--workload", f"benchmarks.pipelines:{workload}", "--synthetic", "true", "--steps", "2"]
    finished = run_ringtrain([*flags, "--out", tmp_path / "run"], launcher="mpirun")
    assert finished.rc == 0, finished.stdout + finished.stderr
    assert events(tmp_path / "run", "train")[-1]["step"] == 2
