"""Whole runs of the program under each launcher."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ringtrain.data.order import SampleOrder
from tests.world.conftest import RunRingtrain
from tests.world.processes import REPOSITORY, TERMINAL_COLUMNS, Finished

WORKLOADS = REPOSITORY / "tests/world/workloads/endings.py"
HOROVODRUN_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2"}  # for horovodrun's own process, which imports TensorFlow as well

# Every line that a run may write, in the order in which it does.
NUMBER = r"-?[\d.]+(?:e[-+]\d+)?"
STEP_LINE = rf"step \d+, loss = {NUMBER} \({NUMBER} examples/sec; {NUMBER} sec/batch\)"
LINES = [
    r"ringtrain \S+: TensorFlow \S+, Keras \S+, Horovod \S+",
    r"\d ranks?, started by .+; communication: .+",
    r" +rank \d on \S+ \(pid \d+\): cores? [\d,-]+( \([^)]*\))?, \d+ threads?",
    r"  [A-Za-z_]+=\S+ \((ringtrain|environment)\)",
    r"\S+: .* parameters; .* samples.*",
    r"global batch .*",
    STEP_LINE,
    rf"epoch {NUMBER}, step \d+: eval loss = {NUMBER}(, accuracy = {NUMBER})? \(\d+ samples\)",
    rf"done(: accuracy {NUMBER} after the last step(, best \w+ {NUMBER} at step \d+)?)?",
    r"  the run is in:      \S+",
    r"  evaluate the best:  python -m ringtrain eval \S+( --workload \S+)?",
    r"  see its curves:     \S+/report\.html",
]


def events(out: Path, event: str = "") -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if not event or line["event"] == event]


def assert_clean(text: str) -> None:
    """Nothing but the lines of a run, each whole."""
    strange = [line for line in text.splitlines() if not any(re.fullmatch(pattern, line) for pattern in LINES)]
    assert not strange, f"strange lines: {strange}"


def error_lines(finished: Finished) -> list[str]:
    """Our own error messages, without the labels of launchers."""
    text = finished.stderr + finished.stdout
    return [
        re.sub(r"^\[\d+(,\d+)?\]<std(err|out)>:", "", line) for line in text.splitlines() if "ringtrain: error" in line
    ]


LAUNCHERS = ["horovodrun", pytest.param("horovodrun --gloo", marks=pytest.mark.slow), "mpirun", None]


@pytest.fixture(scope="module")
def digits_runs() -> dict[str | None, tuple[Finished, Path, set[str]]]:
    return {}


@pytest.mark.cold  # nothing but the lines of a run is printed, also at import
@pytest.mark.parametrize("launcher", LAUNCHERS, ids=str)
def test_digits_trains_under_each_launcher(
    launcher: str | None,
    run_ringtrain: RunRingtrain,
    tmp_path: Path,
    digits_runs: dict[str | None, tuple[Finished, Path, set[str]]],
) -> None:
    arguments = ["--workload", f"{WORKLOADS}:DigitsWithDigest", "--steps", "6", "--log_every", "2"]
    arguments += ["--global_batch_size", "64", "--deterministic", "true", "--out", str(tmp_path / "out")]
    digests = tmp_path / "digests"
    digests.mkdir()
    env = {"RINGTRAIN_TEST_DIGESTS": str(digests)}
    if launcher and launcher.startswith("horovodrun"):
        env |= HOROVODRUN_QUIET
    finished = run_ringtrain(arguments, launcher=launcher, env=env)
    assert finished.rc == 0, finished.stderr
    shown = finished.stdout
    if launcher and launcher.startswith("horovodrun"):
        label = r"^\[(1,)?0\]<stdout>:"
        assert all(re.match(label, line) for line in shown.splitlines()), shown
        shown = re.sub(label, "", shown, flags=re.MULTILINE)
        assert not re.search(r"<std(out|err)>", shown), "a label inside a line"
        # what horovodrun's own process prints is not ours: only labelled lines come from a rank
        assert not re.search(r"^\[(1,)?\d\]<stderr>", finished.stderr, re.MULTILINE), finished.stderr
    else:
        assert finished.stderr == ""
    assert_clean(shown)
    assert len(re.findall(STEP_LINE, shown)) == 3
    left = [path.read_text() for path in digests.iterdir()]
    assert len(left) == (2 if launcher else 1)
    assert len(set(left)) == 1, "ranks ended with different weights"
    assert [(line["event"], line.get("step")) for line in events(tmp_path / "out")] == [
        ("start", None), ("train", 2), ("train", 4), ("train", 6), ("eval", 6),
        ("checkpoint", 6), ("checkpoint", 6), ("end", None)
    ]  # fmt: skip
    digits_runs[launcher] = (finished, tmp_path / "out", set(left))


def test_all_launchers_train_equal_weights(digits_runs: dict[str | None, tuple[Finished, Path, set[str]]]) -> None:
    assert {"horovodrun", "mpirun", None} <= set(digits_runs), "runs after test_digits_trains_under_each_launcher"
    assert len({weights for launcher, (_, _, left) in digits_runs.items() if launcher for weights in left}) == 1
    first, *others = [events(out) for _, out, _ in digits_runs.values()]
    for other in others:
        for line, expected in zip(other, first, strict=True):
            assert ("loss" in line) == ("loss" in expected)
            if "loss" in line:
                assert line["loss"] == pytest.approx(expected["loss"], rel=1e-3)
            assert line.get("samples_seen") == expected.get("samples_seen")
    assert {events(out, "start")[0]["size"] for _, out, _ in digits_runs.values()} == {1, 2}
    assert not any(events(out, "start")[0]["jit_compile"] for _, out, _ in digits_runs.values())  # on cores, by itself
    assert all(events(out, "eval")[0]["samples"] == 450 for _, out, _ in digits_runs.values())
    for lines in (first, *others):
        start, end = lines[0], lines[-1]
        assert len({rank["pid"] for rank in start["ranks"]}) == len(end["ranks"]) == start["size"]
        assert all(rank["peak_memory_mib"] > 100 and rank["input_sec"] > 0 for rank in end["ranks"])


@pytest.mark.slow
def test_the_log_splits_the_time_of_a_step(run_ringtrain: RunRingtrain, tmp_path: Path) -> None:
    """Rank 1 waits 50 ms for each batch; rank 0, whose clock counts, has its data at once and waits for rank 1."""
    env = {"RINGTRAIN_TEST_HANG": "idle", "RINGTRAIN_TEST_HANG_RANK": "1"}
    lasting = f"{WORKLOADS.with_name('lasting.py')}:Lasting"
    flags = ["--workload", lasting, "--steps", "24", "--log_every", "8", "--out", str(tmp_path / "out")]
    finished = run_ringtrain(flags, launcher="mpirun", env=env)
    assert finished.rc == 0, finished.stderr
    lines = events(tmp_path / "out", "train")
    assert len(lines) == 3
    for line in lines:
        parts = [line[f"{part}_sec"] for part in ("input", "compute", "communication", "other")]
        assert min(parts) >= 0
        assert sum(parts) == pytest.approx(line["sec_per_step"], abs=1e-5)
    assert lines[-1]["communication_sec"] > lines[-1]["sec_per_step"] / 2
    assert lines[-1]["communication_sec"] > 0.02  # under load, rank 0 may begin its step later
    assert lines[-1]["input_sec"] < lines[-1]["sec_per_step"] / 4
    [end] = events(tmp_path / "out", "end")
    assert end["ranks"][1]["input_sec"] > 2 * end["ranks"][0]["input_sec"]


@pytest.fixture
def occupied_cores() -> Iterator[None]:
    """Another run that has all cores of this machine for itself."""
    script = (
        "import os, sys; from ringtrain.runtime.machine import claim_cores; "
        "[claim_cores((core,)) for core in os.sched_getaffinity(0)]; print(flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    holder.stdout.readline()
    yield
    holder.communicate()


@pytest.mark.slow
def test_shared_cores_are_unpinned_and_a_terminal_shows_progress(
    run_ringtrain: RunRingtrain, tmp_path: Path, occupied_cores: None
) -> None:
    arguments = ["--workload", f"{WORKLOADS}:Line", "--global_batch_size", "4", "--out", str(tmp_path / "out")]
    finished = run_ringtrain(arguments, launcher="mpirun", terminal=True)
    assert finished.rc == 0, finished.stdout
    cores = re.findall(r"rank \d on .*\(pid \d+\): (.*), \d+ threads?", finished.stdout)
    assert len(cores) == 2
    assert all("(not pinned: another run holds some of " in item for item in cores)
    assert "6/6" in finished.stdout, "no progress bar"
    assert "\x1b[" in finished.stdout
    assert re.search(rf"loss {NUMBER}  [\d,]+ examples/s", finished.stdout)
    bars = [
        re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", line) for line in re.split(r"[\r\n]+", finished.stdout) if "ETA" in line
    ]
    assert {len(bar) for bar in bars} == {TERMINAL_COLUMNS}
    assert re.search(r"done(: best loss .*)?\r?\n  the run is in:      ", finished.stdout)
    assert f"{tmp_path / 'out'}/report.html" in finished.stdout.splitlines()[-1]
    assert "<stdout>" not in finished.stdout


def test_of_runs_that_start_together_one_has_the_directory(run_ringtrain: RunRingtrain, tmp_path: Path) -> None:
    arguments, env = ["--workload", f"{WORKLOADS}:Line", "--steps", "1"], {"PYTHONPATH": str(REPOSITORY)}
    with ThreadPoolExecutor(2) as threads:
        finished = list(threads.map(lambda _: run_ringtrain(arguments, env=env, cwd=tmp_path), range(2)))
    trained, refused = sorted(finished, key=lambda item: "done" not in item.stdout)
    assert trained.rc == 0
    # The other came while the first was training, or after it had ended.
    assert "is being written by process" in refused.stderr if refused.rc else "is complete" in refused.stdout
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["line"]
    assert len(events(tmp_path / "runs/line", "start")) == 1
    end = events(tmp_path / "runs/line")[-1]
    assert (end["event"], end["status"], end["exit_code"]) == ("end", "completed", 0)


def step_and_rank_of(sample: int, size: int) -> tuple[int, int]:
    """When a sample comes first, from 1, and to which rank."""
    order = SampleOrder(num_samples=12, global_batch_size=6)
    for step in range(order.steps_per_epoch):
        for rank in range(size):
            if sample in order.local_batch(step, rank=rank, size=size).indices:
                return step + 1, rank
    raise AssertionError(f"no step has sample {sample}")


def sample_of_rank(rank: int, size: int) -> int:
    return next(sample for sample in range(12) if step_and_rank_of(sample, size)[1] == rank)


def nan_arguments(out: Path, sample: int, *more: str) -> list[str]:
    arguments = ["--workload", f"{WORKLOADS}:LineWithNaN", "--options.sample", str(sample), "--global_batch_size", "6"]
    return [*arguments, "--out", str(out), *more]


@pytest.mark.parametrize(
    ("rank", "size"),
    [
        pytest.param(0, 2, id="first", marks=pytest.mark.slow),
        pytest.param(1, 2, id="last", marks=pytest.mark.slow),
        pytest.param(1, 3, id="middle"),
    ],
)
def test_a_nan_loss_stops_all_ranks_and_is_reported_once(
    run_ringtrain: RunRingtrain, tmp_path: Path, rank: int, size: int
) -> None:
    sample = sample_of_rank(rank, size)
    step, _ = step_and_rank_of(sample, size)
    finished = run_ringtrain(nan_arguments(tmp_path / "out", sample), launcher="mpirun", np=size)
    assert finished.rc == 4
    [message] = error_lines(finished)
    assert re.search(rf"step {step}: .*loss of rank {rank} on", message)
    assert f"(sample {sample})." in message
    assert re.findall(r"rank (\d) on \S+, its cores", message) == [str(rank)], "no other rank is named"
    losses = re.search(r"Mean losses from rank 0 on: ([\d., na]+)\.", message)
    assert losses is not None
    assert [number for number, loss in enumerate(losses[1].split(", ")) if loss == "nan"] == [rank]
    assert re.search(rf"rank {rank} the gradient of sequential/dense/kernel .*1 more", message)
    with np.load(tmp_path / f"out/nonfinite/step-{step:09d}-rank-{rank}.npz", allow_pickle=False) as batch:
        assert sample in batch["indices"]
        assert np.isnan(batch["x"][batch["indices"] == sample]).any()
        assert set(batch.files) == {"x", "y", "indices", "step", "global_count"}
    assert "diverged, exit code 4" in (tmp_path / "out/report.html").read_text()
    assert "Traceback" not in finished.stderr + finished.stdout
    end = events(tmp_path / "out")[-1]
    assert (end["event"], end["status"], end["exit_code"]) == ("end", "diverged", 4)


def test_a_nan_loss_is_skipped_on_request(run_ringtrain: RunRingtrain, tmp_path: Path) -> None:
    step, _ = step_and_rank_of(5, 2)
    finished = run_ringtrain(nan_arguments(tmp_path / "out", 5, "--on_nonfinite", "skip"), launcher="mpirun")
    assert finished.rc == 0
    assert finished.stderr == ""
    assert finished.stdout.count("warning:") == 2, "one for each epoch"
    losses = [line["loss"] for line in events(tmp_path / "out", "train")]
    assert losses.index("nan") + 1 == step
    assert sum(loss == "nan" for loss in losses) == 2
    assert events(tmp_path / "out")[-1]["status"] == "completed"


@pytest.mark.slow
def test_a_weight_that_the_loss_does_not_use_lets_no_rank_wait(run_ringtrain: RunRingtrain, tmp_path: Path) -> None:
    """In the last step of an epoch rank 0 has 7 samples, for which it compiles another step, and rank 1 its usual 8."""
    arguments = ["--workload", f"{WORKLOADS}:LineWithUnusedWeight", "--global_batch_size", "16"]
    arguments += ["--out", str(tmp_path / "out")]
    env = {"RINGTRAIN_TEST_SAMPLES": "31"}
    finished = run_ringtrain(arguments, launcher="mpirun", env=env, timeout=60)
    assert finished.rc == 0, finished.stderr
    assert [line["step"] for line in events(tmp_path / "out", "train")] == [1, 2, 3, 4]


def test_a_bug_on_one_rank_ends_all_and_shows_its_traceback(run_ringtrain: RunRingtrain, tmp_path: Path) -> None:
    arguments = ["--workload", f"{WORKLOADS}:LineThatBreaks", "--out", str(tmp_path / "out")]
    finished = run_ringtrain(arguments, launcher="mpirun", timeout=60)
    assert finished.rc == 1
    [message] = error_lines(finished)
    assert re.search(r"rank 1 on \S+ failed", message)
    assert "ZeroDivisionError: the bug of rank 1" in finished.stderr
    assert finished.stderr.count("Traceback") == 1


@pytest.mark.parametrize("backend", ["native", pytest.param("horovod", marks=pytest.mark.slow)])
def test_a_bug_of_all_ranks_is_shown_once(run_ringtrain: RunRingtrain, tmp_path: Path, backend: str) -> None:
    """Ended by rank 0, another may have no time to say that it failed likewise."""
    arguments = ["--workload", f"{WORKLOADS}:LineThatBreaks", "--backend", backend, "--out", str(tmp_path / "out")]
    finished = run_ringtrain(arguments, launcher="mpirun", np=3, env={"RINGTRAIN_TEST_ALL": "1"}, timeout=60)
    assert finished.rc == 1
    assert finished.stderr.count("Traceback") == 1
    assert len(re.findall(r"rank 0 on \S+ failed: ZeroDivisionError: the bug of rank 1", finished.stderr)) == 1
    assert all(re.search(r"rank (0|[12] .* failed as rank 0 did)", line) for line in error_lines(finished))


@pytest.mark.parametrize("launcher", ["mpirun", pytest.param("horovodrun --gloo", marks=pytest.mark.slow)])
def test_a_wrong_setting_is_reported_once_and_ends_all_ranks(run_ringtrain: RunRingtrain, launcher: str) -> None:
    cases = [["--workload", "digit"], ["--data_dir", "/no/such/place"]]
    for arguments in cases if launcher == "mpirun" else cases[:1]:
        finished = run_ringtrain(arguments, launcher=launcher, env=HOROVODRUN_QUIET, timeout=30)
        assert finished.rc == (2 if launcher == "mpirun" else 1)  # Gloo's launcher knows no other
        assert len(error_lines(finished)) == 1, finished.stderr
        assert "Traceback" not in "\n".join(error_lines(finished))


def test_a_launcher_of_another_mpi_is_reported_with_libraries(run_ringtrain: RunRingtrain, tmp_path: Path) -> None:
    """A lone process that believes a launcher's variables is what a foreign mpirun makes of each rank."""
    variables = {"RANK": "0", "SIZE": "2", "LOCAL_RANK": "0", "LOCAL_SIZE": "2"}
    env = {f"OMPI_COMM_WORLD_{name}": value for name, value in variables.items()}
    finished = run_ringtrain(["--out", str(tmp_path / "out")], env=env, timeout=60)
    assert finished.rc == 2
    [message] = error_lines(finished)
    assert "started 2 processes, but Horovod sees 1" in message
    assert "libmpi" in message
    assert "mpi4py was built for: Open MPI" in message
    assert not (tmp_path / "out").exists()
    assert os.linesep not in message
