"""stdout and stderr that go away: the run continues without them, and ends with the exit code that it earned."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from tests.world.processes import MarkedProcess, clean_environment
from tests.world.running import STAYING, events, running

SLOW_STEP = {"RINGTRAIN_TEST_STEP_SECONDS": "0.05"}
LOST = "stdout cannot be written any more ({}): the program continues without it."


@pytest.fixture
def broken_pipe() -> Iterator[IO[bytes]]:
    """The end of a pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb", buffering=0) as pipe:
        yield pipe


def ringtrain(*arguments: str, stdout: IO[bytes] | None, stderr: IO[bytes] | int, **env: str) -> tuple[int, str]:
    """Exit code and stderr of a command, started from a shell that gives it these streams; None: it is closed."""
    start = ["bash", "-c", '"$@" >&-', "bash"] if stdout is None else []
    process = MarkedProcess(
        [*start, sys.executable, "-m", "ringtrain", *arguments], clean_environment(**env), stdout=stdout, stderr=stderr
    )
    try:
        _, complaints = process.popen.communicate(timeout=60)
    finally:
        process.end()
    return process.popen.returncode, (complaints or b"").decode()


@pytest.mark.slow
def test_a_closed_pipe_does_not_end_a_run(tmp_path: Path) -> None:
    """As with ``| head -3`` behind it."""
    out = tmp_path / "run"
    reader = subprocess.Popen(["head", "-3"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    assert reader.stdin is not None
    arguments = ["--workload", f"{STAYING}:LastingTalker", "--out", str(out), "--epochs", "2"]
    code, complaints = ringtrain(*arguments, stdout=reader.stdin, stderr=subprocess.PIPE)
    reader.stdin.close()
    reader.wait()
    assert code == 0, complaints
    assert complaints == f"ringtrain: warning: {LOST.format('Broken pipe')}\n"
    assert [event["message"] for event in events(out, "warning")] == [LOST.format("Broken pipe")]
    assert events(out)[-1]["status"] == "completed"


@pytest.mark.slow
def test_a_full_disk_behind_the_log_does_not_end_a_run(tmp_path: Path) -> None:
    out = tmp_path / "run"
    arguments = ["--workload", f"{STAYING}:LastingTalker", "--out", str(out), "--epochs", "2"]
    with open("/dev/full", "wb", buffering=0) as full:
        code, complaints = ringtrain(*arguments, stdout=full, stderr=subprocess.PIPE)
    assert code == 0, complaints
    assert complaints == f"ringtrain: warning: {LOST.format('No space left on device')}\n"
    assert events(out)[-1]["status"] == "completed"


@pytest.mark.slow
@pytest.mark.cold  # a closed stream cannot be handed to the fork server
@pytest.mark.parametrize("stdout", ["broken", "closed"])
def test_with_no_stream_left_at_all_the_run_ends_as_it_would(
    stdout: str, broken_pipe: IO[bytes], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    arguments = ["--workload", f"{STAYING}:LastingTalker", "--out", str(out), "--epochs", "2"]
    code, _ = ringtrain(*arguments, stdout=None if stdout == "closed" else broken_pipe, stderr=broken_pipe)
    assert code == 0
    assert events(out)[-1]["status"] == "completed"
    assert all("cannot be written" in event["message"] for event in events(out, "warning"))


@pytest.mark.parametrize("arguments", [("workloads",), ("--epochs", "0")])
def test_a_short_command_has_its_own_exit_code_too(arguments: tuple[str, ...], broken_pipe: IO[bytes]) -> None:
    code, complaints = ringtrain(*arguments, stdout=broken_pipe, stderr=subprocess.PIPE)
    assert code == (2 if arguments[0] == "--epochs" else 0)
    assert "Exception" not in complaints
    assert "Traceback" not in complaints


RENDER = ["-m", "launch", "slurm", "render", "--nodes", "2", "--gpus_per_node", "4"]


@pytest.mark.parametrize(
    "command", [["-m", "ringtrain", "workloads"], ["-m", "ringtrain", "--print_config"], RENDER], ids=lambda c: c[-1]
)
def test_a_result_that_could_not_be_written_is_no_success(command: list[str]) -> None:
    with open("/dev/full", "wb", buffering=0) as full:
        finished = subprocess.run(
            [sys.executable, *command], stdout=full, stderr=subprocess.PIPE, text=True, env=clean_environment()
        )
    assert finished.returncode == 1
    assert finished.stderr.endswith(f"ringtrain: warning: {LOST.format('No space left on device')}\n")


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpirun", "launch"])
def test_a_closed_pipe_of_a_launcher_loses_nothing(launcher: str, tmp_path: Path) -> None:
    """mpirun itself ends then, and tells its ranks to."""
    mpirun = ["mpirun", "-np", "2", "--oversubscribe", "--bind-to", "none", sys.executable, "-m", "ringtrain"]
    start = mpirun if launcher == "mpirun" else [sys.executable, "-m", "launch", "local", "-np", "2", "--"]
    head = ["bash", "-c", '"$@" | head -12; exit ${PIPESTATUS[0]}', "bash"]  # it leaves before step 20
    with running(tmp_path / "run", "--checkpoint_every", "0", start=[*head, *start], env=SLOW_STEP) as run:
        code = run.wait(60)
    assert (code == 0) == (launcher == "launch"), run.text()
    assert events(tmp_path / "run", "end")[-1]["exit_code"] == (0 if launcher == "launch" else 75), run.text()
    last = events(tmp_path / "run", "train")[-1]["step"]
    assert (tmp_path / "run" / "checkpoints" / f"step-{last:09d}").is_dir()
