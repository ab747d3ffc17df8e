"""The workload polynomial finds the coefficients, in one process and in two."""

from pathlib import Path

import numpy as np
import pytest

from ringtrain.run.checkpoint import read_checkpoint
from tests.world.conftest import RunRingtrain


@pytest.mark.parametrize("launcher", [pytest.param(None, marks=pytest.mark.slow), "mpirun"])
def test_the_coefficients_are_found(run_ringtrain: RunRingtrain, tmp_path: Path, launcher: str | None) -> None:
    finished = run_ringtrain(["--workload", "polynomial", "--out", tmp_path / "run"], launcher=launcher)
    assert finished.rc == 0, finished.stdout + finished.stderr
    variables = read_checkpoint(tmp_path / "run/checkpoints/step-000001000").variables
    [coefficients] = [value for name, value in variables.items() if name == "weights/coefficients/kernel"]
    np.testing.assert_allclose(np.ravel(coefficients), [5, 0, 3], atol=0.05)
