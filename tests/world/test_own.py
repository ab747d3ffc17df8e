"""A workload of a user's own with all that one may have."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringtrain.checkpoint import read_checkpoint
from tests.world.conftest import RunRingtrain
from tests.world.processes import REPOSITORY
from tests.world.running import events

EVERYTHING = ["--workload", f"{REPOSITORY / 'tests/world/workloads/own.py'}:Everything"]


def test_two_ranks_train_it_as_one_does(run_ringtrain: RunRingtrain) -> None:
    finished = run_ringtrain(["verify", *EVERYTHING, "--world_sizes", "1,2", "--global_batch_size", "25"])
    assert finished.rc == 0, finished.stdout + finished.stderr
    assert "the world sizes train the same" in finished.stdout


@pytest.mark.parametrize("precision", ["float32", pytest.param("mixed_bfloat16", marks=pytest.mark.slow)])
def test_its_losses_metrics_and_summaries_are_shown_and_its_frozen_part_stays(
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
    evaluated = run_ringtrain(["eval", out, "--checkpoint", "newest"])
    assert f"within_one = {events(out, 'eval')[-1]['within_one']:.4f}" in evaluated.stdout, evaluated.stderr
