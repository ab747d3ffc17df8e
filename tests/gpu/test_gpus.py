"""A run on GPUs: which one a rank takes, what it trains there, and how fast."""

import json
import re
import shutil
import statistics
import sys
from pathlib import Path

import pytest

from ringtrain.runtime.devices import SHARED_GPUS
from tests.world.processes import Finished, clean_environment, run_command
from tests.world.running import digest, events, final_checkpoint, run_to_end, running

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]
STEPS = 48  # of the workload ``Lasting``
SUMS = Path(__file__).with_name("sums.py")
SHARED = {SHARED_GPUS: "1"}  # two ranks are tested where there is one GPU, too


def run_ringtrain(*arguments: str, ranks: int = 1, env: dict[str, str] | None = None) -> Finished:
    mpirun = ["mpirun", "-np", str(ranks), "--oversubscribe", "--bind-to", "none"] if ranks > 1 else []
    command = [*mpirun, sys.executable, "-m", "ringtrain", *arguments]
    return run_command(command, env=clean_environment(**(env or {})), timeout=300)


def test_one_process_takes_the_first_gpu(tmp_path: Path) -> None:
    finished = run_ringtrain("--steps", "20", "--out", str(tmp_path / "run"))
    assert finished.rc == 0, finished.stderr
    assert re.search(r"^  rank 0 on .*: GPU 0, \d+ thread", finished.stdout, re.MULTILINE)


def test_without_visible_gpus_a_run_uses_cores(tmp_path: Path) -> None:
    finished = run_ringtrain("--steps", "20", "--out", str(tmp_path / "run"), env={"CUDA_VISIBLE_DEVICES": ""})
    assert finished.rc == 0, finished.stderr
    assert re.search(r"^  rank 0 on .*: cores? ", finished.stdout, re.MULTILINE)


def test_two_ranks_that_see_one_gpu_are_refused(tmp_path: Path) -> None:
    finished = run_ringtrain("--out", str(tmp_path / "run"), ranks=2, env={"CUDA_VISIBLE_DEVICES": "0"})
    assert finished.rc == 2
    assert "ranks 0, 1 on " in finished.stderr
    assert "have the same GPU" in finished.stderr


@pytest.mark.gpu(2)
def test_each_rank_takes_the_gpu_of_its_local_rank(tmp_path: Path) -> None:
    finished = run_ringtrain("--steps", "20", "--out", str(tmp_path / "run"), ranks=2)
    assert finished.rc == 0, finished.stderr
    for rank in range(2):
        assert re.search(rf"^  rank {rank} on .*: GPU {rank}, ", finished.stdout, re.MULTILINE)


def test_two_ranks_equal_one() -> None:
    finished = run_ringtrain("verify", "--world_sizes", "1,2", "--workload", "digits", env=SHARED)
    assert finished.rc == 0, finished.stdout + finished.stderr


def test_two_ranks_may_share_a_gpu(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    flags = ("--steps", "20", "--log_every", "1", "--global_batch_size", "64")
    assert run_ringtrain(*flags, "--out", str(one)).rc == 0
    finished = run_ringtrain(*flags, "--out", str(two), ranks=2, env=SHARED)
    assert finished.rc == 0, finished.stderr
    losses = [[event["loss"] for event in events(out, "train")] for out in (one, two)]
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


@pytest.mark.parametrize("precision", ["float32", "mixed_float16", "mixed_bfloat16", "float64"])
def test_the_loss_falls_in_every_precision(precision: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    flags = ["--steps", "200", "--log_every", "10", "--precision", precision]
    finished = run_ringtrain(*flags, "--out", str(out))
    assert finished.rc == 0, finished.stderr
    losses = [event["loss"] for event in events(out, "train")]
    assert statistics.mean(losses[-5:]) < losses[0] / 3


def test_xla_compiles_a_step_that_trains_the_same(tmp_path: Path) -> None:
    losses: list[list[float]] = []
    for flags, compiles in (("--jit_compile false", False), ("--jit_compile true", True), ("", True)):
        out = tmp_path / str(len(losses))
        finished = run_ringtrain("--steps", "20", "--log_every", "1", "--out", str(out), *flags.split())
        assert finished.rc == 0, finished.stderr
        assert [event["jit_compile"] for event in events(out, "start")] == [compiles]
        losses.append([event["loss"] for event in events(out, "train")])
    assert losses[1] == pytest.approx(losses[0], rel=0.05)
    assert losses[2] == pytest.approx(losses[1], rel=0.05)  # by itself


def test_a_killed_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    flags = ("--deterministic", "true")
    run_to_end(whole, *flags, np=1)
    with running(killed, *flags, np=1, env={"RINGTRAIN_TEST_STEP_SECONDS": "0.05"}) as run:
        run.wait_for_checkpoint_after(10)
        run.kill()
    run_to_end(killed, *flags, np=1)
    assert digest(final_checkpoint(killed, STEPS)) == digest(final_checkpoint(whole, STEPS))


def test_a_checkpoint_of_a_gpu_is_read_on_cores(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert run_ringtrain("--steps", "20", "--out", str(run)).rc == 0
    finished = run_ringtrain("eval", str(run), env={"CUDA_VISIBLE_DEVICES": ""})
    assert finished.rc == 0, finished.stderr


@pytest.mark.parametrize("ranks", [1, 2])
def test_sums_of_every_size_are_right(ranks: int) -> None:
    command = ["mpirun", "-np", str(ranks), "--oversubscribe", "--bind-to", "none", sys.executable, str(SUMS)]
    finished = run_command(command, env=clean_environment(**SHARED), timeout=300)
    assert finished.rc == 0, finished.stdout + finished.stderr
    assert [f"rank {rank} of {ranks} on GPU" in finished.stdout for rank in range(ranks)] == ranks * [True]


def test_the_doctor_finds_no_fault() -> None:
    finished = run_ringtrain("doctor")
    assert finished.rc == 0, finished.stdout
    assert "NCCL" in finished.stdout
    if shutil.which("nvidia-smi"):
        assert "NVIDIA" in finished.stdout


def test_one_rank_is_as_fast_as_tensorflow_alone(tmp_path: Path) -> None:
    """Side by side, in rounds: of ringtrain's whole command and a bare loop on the same samples, at least 0.99."""
    output = tmp_path / "bench.json"
    contenders = "ringtrain,ringtrain_again,one_process"
    finished = run_command(
        [
            sys.executable, "-m", "benchmarks", "step", "--size", "1", "--models", "CNN",
            "--contenders", contenders, "--rounds", "7", "--output", str(output),
        ],
        env=clean_environment(),
        timeout=880,
    )  # fmt: skip
    assert finished.rc == 0, finished.stdout + finished.stderr
    print(finished.stdout)
    [experiment] = json.loads(output.read_text())["experiments"]
    runs = [each["runs"] for each in experiment["rounds"]]
    ratios = [run["one_process"]["figures"]["step"] / run["ringtrain"]["figures"]["step"] for run in runs]
    assert statistics.median(ratios) >= 0.99, ratios
