"""A workload of a user's own with all that one may have."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringtrain.collectives import Collective
from ringtrain.run.checkpoint import read_checkpoint
from ringtrain.runtime.machine import CLAIMS_VARIABLE
from tests.world.conftest import RunRingtrain
from tests.world.group import on_ranks
from tests.world.processes import REPOSITORY
from tests.world.running import events

OWN = REPOSITORY / "tests/world/workloads/own.py"
EVERYTHING = ["--workload", f"{OWN}:Everything"]
CALLS_PYTHON = ["--workload", f"{OWN}:CallsPython"]
HIDDEN = """
import tensorflow as tf
from tests.world.workloads.small import Small


class Hidden(Small):
    def loss(self, y, outputs):
        nothing = getattr(tf, "py_" + "function")(lambda: 0.0, [], tf.float32)
        return super().loss(y, outputs) + tf.ensure_shape(nothing, [])
"""


@on_ranks(2)
def test_two_ranks_train_it_as_one_does(collective: Collective) -> None:
    from tests.world.test_verify import findings_of
    from tests.world.workloads.own import Everything

    findings, _ = findings_of(Everything(), collective, global_batch_size=25, steps=2)
    assert bool(findings) == collective.world.is_rank0
    assert all(finding.passes for finding in findings), findings


@pytest.mark.parametrize("precision", ["float32", pytest.param("mixed_bfloat16", marks=pytest.mark.slow)])
def test_losses_and_metrics_are_logged_and_frozen_weights_kept(
    run_ringtrain: RunRingtrain, tmp_path: Path, precision: str
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = tmp_path / "run"
    arguments = [*EVERYTHING, "--out", out, "--precision", precision, "--options.weight_of_number", "2"]
    arguments += ["--optimizer.lr", "0.02", "--checkpoint_every", "1"]
    assert run_ringtrain(arguments, launcher="mpirun").rc == 0
    tolerance = 1e-6 if precision == "float32" else 2e-2
    for event in [*events(out, "train"), *events(out, "eval")]:
        parts = event["class_loss"] + 2 * event["number_loss"]
        assert event["data_loss"] == pytest.approx(parts, rel=tolerance)
        assert 0 <= event["within_one"] <= 1
    shown = EventAccumulator(str(out / "tensorboard")).Reload().Tags()
    assert {"train/class_loss", "eval/number_loss", "eval/within_one"} <= {*shown["tensors"], *shown["scalars"]}
    assert any("numbers" in tag for tag in [*shown["tensors"], *shown["histograms"]])
    first, last = (
        read_checkpoint(out / f"checkpoints/{name}").variables for name in ("step-000000006", "step-000000008")
    )
    assert (first["weights/frozen/kernel"] == last["weights/frozen/kernel"]).all()
    assert (first["weights/hidden/kernel"] != last["weights/hidden/kernel"]).any()
    evaluated = run_ringtrain(["eval", out, "--checkpoint", "newest", "--workload", f"{OWN}:Everything"])
    assert f"within_one = {events(out, 'eval')[-1]['within_one']:.4f}" in evaluated.stdout, evaluated.stderr


@pytest.fixture
def _two_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One for each of two ranks, whatever other ranks run on them."""
    monkeypatch.setenv(CLAIMS_VARIABLE, f"{os.environ[CLAIMS_VARIABLE]}-{os.getpid()}")
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(cores)[:2])
    yield
    os.sched_setaffinity(0, cores)


@pytest.mark.slow
@pytest.mark.usefixtures("_two_cores")
def test_python_in_a_step_may_call_tensorflow_on_one_core(run_ringtrain: RunRingtrain, tmp_path: Path) -> None:
    """It needs a second inter-op thread; and the workload's defaults count before TensorFlow and Horovod start."""
    finished = run_ringtrain([*CALLS_PYTHON, "--steps", "3", "--out", tmp_path / "run"], launcher="mpirun")
    assert finished.rc == 0, finished.stdout + finished.stderr
    assert "HOROVOD_DISABLE_GROUP_FUSION=1 (ringtrain)" in finished.stdout
    assert "warning" not in finished.stdout


@pytest.mark.native
@pytest.mark.usefixtures("_two_cores")
def test_python_in_a_step_that_could_deadlock_gives_a_warning(run_ringtrain: RunRingtrain, tmp_path: Path) -> None:
    path = tmp_path / "hidden.py"
    path.write_text(HIDDEN)
    arguments = ["--workload", path, "--steps", "3", "--out", tmp_path / "run"]
    finished = run_ringtrain(arguments, launcher="mpirun", env={"PYTHONPATH": str(REPOSITORY)})
    assert finished.rc == 0, finished.stdout + finished.stderr
    [warning] = [line for line in finished.stdout.splitlines() if line.startswith("warning")]
    assert "the step calls Python code (EagerPyFunc)" in warning
    assert "set TF_NUM_INTEROP_THREADS=2" in warning


CHANGES_ITS_PROCESS = """
import os
import sys
from tests.world.workloads.small import Small


class ChangesItsProcess(Small):
    def create_model(self):
        os.chdir("/")
        sys.stdout.close()
        return super().create_model()
"""


@pytest.mark.cold  # the interpreter, at its exit, flushes a closed stdout
def test_a_workload_may_change_directory_and_close_stdout(run_ringtrain: RunRingtrain, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(CHANGES_ITS_PROCESS)
    arguments = ["--workload", "mine.py:ChangesItsProcess", "--steps", "2", "--out", "run"]
    finished = run_ringtrain(arguments, cwd=tmp_path, env={"PYTHONPATH": str(REPOSITORY)})
    assert finished.rc == 0, finished.stdout + finished.stderr
    assert events(tmp_path / "run")[-1]["status"] == "completed"
    assert finished.stdout.splitlines()[-1].split() == ["see", "its", "curves:", "run/report.html"]


UNSHOWN = """
from ringtrain.workloads.digits import Digits


class Unshown(Digits):
    def summaries(self, model, x, y):
        return [x[0]][1]
"""


@pytest.mark.slow
def test_summaries_that_fail_end_no_run(run_ringtrain: RunRingtrain, tmp_path: Path) -> None:
    file, out = tmp_path / "unshown.py", tmp_path / "run"
    file.write_text(UNSHOWN)
    finished = run_ringtrain(["--workload", file, "--out", out, "--steps", "2"])
    assert finished.rc == 0, finished.stderr
    message = "Unshown.summaries is not shown: IndexError: list index out of range"
    assert f"warning: {message}\n" in finished.stdout
    assert [event["message"] for event in events(out, "warning")] == [message]


def test_a_function_that_autograph_cannot_convert_is_named_once(run_ringtrain: RunRingtrain, tmp_path: Path) -> None:
    (tmp_path / "matching.py").write_text(
        "import tensorflow as tf\n"
        "from tests.world.workloads.small import Small\n"
        "@tf.function\n"
        "def scaled(x):\n"
        "    match x.shape.rank:\n"
        "        case _: return x\n"
        "class Matching(Small):\n"
        "    def loss(self, y, outputs):\n"
        "        return scaled(super().loss(y, outputs))\n"
    )
    flags = ["--workload", tmp_path / "matching.py", "--steps", "1", "--out", tmp_path / "run"]
    finished = run_ringtrain(flags, launcher="mpirun")
    assert finished.rc == 0, finished.stderr
    [line] = [line for line in (finished.stdout + finished.stderr).splitlines() if "AutoGraph" in line]
    assert "AutoGraph cannot convert scaled (matching.py:" in line
