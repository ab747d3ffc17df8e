"""A checkpoint knows no version: a run goes on under other releases of TensorFlow and Keras than it began with.

``recorded/run`` is a run of two ranks on this folder's workload ``lasting.py`` in float64, stopped after step 10 by
ringtrain's commit d558ef4 under TensorFlow 2.21.0 and Keras 3.15.1. ``recorded/step-000000048`` is what the same run
ends with under TensorFlow 2.18.1 and Keras 3.12.4, by eb9462f; its manifest was written anew in today's format.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ringtrain.run.checkpoint import read_checkpoint
from ringtrain.run.store import list_steps, step_name
from tests.world.processes import REPOSITORY, clean_environment
from tests.world.running import events, final_checkpoint, run_to_end

RECORDED = REPOSITORY / "tests/world/recorded"
WORKLOAD = "tests/world/workloads/lasting.py"  # as the record names it, from the root of the repository
FLAGS = ("--precision", "float64", "--keep", "100")
STEPS, BEGUN_STEPS = 48, 10
COMMAND_SECONDS = 1800
THIS_PYTHON = f"PYTHON={sys.base_prefix}/bin/python3"  # the one that was chosen for these tests
# A run directory that was begun under yet another version, to go on with in place of the recorded one.
BEGUN_ELSEWHERE = "RINGTRAIN_TEST_BEGUN_ELSEWHERE"

# What is tested under the oldest TensorFlow: all of ringtrain.keras, and of the rest what touches TensorFlow most.
SLICE = (
    "tests/keras", "tests/unit/test_fused.py", "tests/unit/test_setup.py", "tests/unit/test_workloads.py",
    "tests/world/test_other_versions.py", "tests/world/test_step.py", "tests/world/test_collectives.py",
    "tests/world/test_parallel.py", "tests/world/test_export.py", "tests/world/test_polynomial.py",
    "tests/world/test_sharding.py", "tests/world/test_jit.py",
)  # fmt: skip
# Between the oldest and the newest: what trains and sums, once without Horovod, and once with what is of its interface.
CORE = ("tests/world/test_other_versions.py", "tests/world/test_step.py", "tests/world/test_nonfinite.py")
WITHOUT_HOROVOD = (*CORE, "-k", "not gloo and not Gloo")
WITH_FIT = (*CORE, *(f"tests/keras/test_{name}.py" for name in ("run", "optimizers", "normalization", "saving")))


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_run_of_another_version_ends_as_recorded_there(
    ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    run = tmp_path / "run"
    shutil.copytree(os.environ.get(BEGUN_ELSEWHERE, RECORDED / "run"), run)
    run_to_end(run, *FLAGS, np=ranks, workload=WORKLOAD)
    assert [event["step"] for event in events(run, "train")] == list(range(1, STEPS + 1))
    assert events(run, "start")[-1]["first_step"] == BEGUN_STEPS
    assert_ends_as_recorded(run)


def assert_ends_as_recorded(run: Path) -> None:
    """Weights, slots and averages are those of the record, and no more nor fewer."""
    recorded = read_checkpoint(RECORDED / step_name(STEPS)).variables
    ended = read_checkpoint(final_checkpoint(run, STEPS)).variables
    assert list(ended) == list(recorded)
    for name, value in recorded.items():
        assert ended[name].dtype == value.dtype
        np.testing.assert_allclose(ended[name], value, rtol=0, atol=1e-10 * np.abs(value).max(), err_msg=name)


@pytest.mark.slow
@pytest.mark.timeout(4000)
@pytest.mark.parametrize(
    ("tensorflow", "horovod", "tests"),
    [("2.18", "1", SLICE), ("2.19", "0", WITHOUT_HOROVOD), ("2.20", "1", WITH_FIT)],
    ids=["2.18", "2.19", "2.20"],
)
def test_an_older_tensorflow_trains_and_resumes_a_current_run(
    tensorflow: str, horovod: str, tests: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    checkout = copy_of_checkout(tmp_path / "ringtrain")
    run_in(checkout, "make", "setup", f"TENSORFLOW={tensorflow}", f"HOROVOD={horovod}", THIS_PYTHON)
    pytest_there = [str(checkout / ".venv/bin/python"), "-m", "pytest"]
    run_in(checkout, *pytest_there, *tests)

    begun = begin_run(tmp_path / "begun")
    run_in(checkout, *pytest_there, "tests/world/test_other_versions.py", **{BEGUN_ELSEWHERE: str(begun)})
    shutil.rmtree(checkout)  # gigabytes, which pytest would keep


@pytest.mark.slow
@pytest.mark.timeout(4000)
def test_the_gpu_build_links_and_reduces_without_cuda(tmp_path: Path) -> None:
    """With CUDA's compiler from Python packages; its kernels do not run here."""
    checkout = copy_of_checkout(tmp_path / "ringtrain")
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "nvcc").symlink_to("/bin/false")  # before any that this machine may have
    env = {"CUDA_HOME": str(tmp_path / "none"), "PATH": f"{programs}:{os.environ['PATH']}"}
    run_in(checkout, "make", "setup", "GPU=1", THIS_PYTHON, **env)

    python = str(checkout / ".venv/bin/python")
    program = "import horovod.tensorflow as hvd; print('built:', hvd.nccl_built(), hvd.cuda_built(), hvd.mpi_built())"
    built = re.search(r"^built: (\d+) True True$", run_in(checkout, python, "-c", program, **env), re.MULTILINE)
    assert built is not None
    assert int(built[1]) > 22000, "the version of NCCL"
    [library] = (checkout / ".venv").glob("lib/python3*/site-packages/horovod/tensorflow/mpi_lib*.so")
    linked = run_in(checkout, "ldd", "-r", str(library), LD_LIBRARY_PATH=str(library.parents[2] / "tensorflow"))
    assert "undefined symbol" not in linked
    assert "not found" not in linked
    mpirun = ["mpirun", "-np", "2", "--oversubscribe", "--bind-to", "none"]
    run_in(checkout, *mpirun, python, "-m", "ringtrain", "--steps", "20", "--out", str(tmp_path / "run"))
    shutil.rmtree(checkout)


def copy_of_checkout(folder: Path) -> Path:
    """The files that git tracks here, as they are now."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    for name in names.rstrip("\0").split("\0"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(REPOSITORY / name, folder / name)
    return folder


def run_in(checkout: Path, *command: str, **variables: str) -> str:
    """What a command prints, which must end well, with nothing of this process's tests and set-up in its environment.

    Where it takes too long, it is told to stop, as by Ctrl-C: a test run then ends what it has started.
    """
    strange = ("PYTEST_", "RINGTRAIN_TEST_", "VIRTUAL_ENV", "PYTHON")
    env = {name: value for name, value in clean_environment().items() if not name.startswith(strange)} | variables
    log = checkout.with_name(f"{checkout.name}.log")
    with log.open("wb") as file:
        process = subprocess.Popen(command, cwd=checkout, env=env, stdout=file, stderr=subprocess.STDOUT)
        try:
            code = process.wait(COMMAND_SECONDS)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(60)
                process.kill()
    text = log.read_text(errors="replace")
    print(text[-3000:])
    assert code == 0, f"{' '.join(command)} ended with {code}:\n{text[-3000:]}"
    return text


def begin_run(run: Path) -> Path:
    """A run of this version, as it was after its first steps."""
    run_to_end(run, *FLAGS, workload=WORKLOAD)
    assert_ends_as_recorded(run)
    for step in list_steps(run / "checkpoints"):
        if step > BEGUN_STEPS:
            shutil.rmtree(run / "checkpoints" / step_name(step))
    return run
