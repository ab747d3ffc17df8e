"""Runs that are killed, or go on with another number of ranks, end as if nothing had happened."""

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from ringtrain.run.checkpoint import digest_of, read_checkpoint
from ringtrain.run.store import step_name
from tests.world.conftest import RunRingtrain
from tests.world.running import (
    WORKLOAD,
    assert_history_is_whole,
    digest,
    events,
    final_checkpoint,
    ledger,
    read_tensorboard,
    run_to_end,
    running,
)

EPOCHS, STEPS = 6, 48  # 50 samples, 7 in a batch: 8 steps an epoch
SLOW_SAVE = {"RINGTRAIN_TEST_SAVE_SECONDS": "0.3"}
SLOW_STEP = {"RINGTRAIN_TEST_STEP_SECONDS": "0.03"}


@pytest.mark.parametrize("kills", [2, pytest.param(10, marks=pytest.mark.slow)])
@pytest.mark.timeout(600)
def test_a_run_killed_at_random_moments_ends_bit_equal(kills: int, undisturbed: Path, tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed of the moments: {seed}")
    generator = random.Random(seed)
    moments = sorted(generator.sample(range(1, STEPS), kills))
    saves = set(generator.sample(range(kills), max(1, kills // 3)))
    out = tmp_path / "run"
    killed_at = []
    for number, moment in enumerate(moments):
        with running(out, "--deterministic", "true", env=SLOW_SAVE if number in saves else SLOW_STEP) as run:
            run.wait_for_step(min(moment, STEPS - 8))
            if number in saves:
                run.wait_for_save()
            run.kill()
        killed_at.append(len(events(out, "train")))
    run_to_end(out, "--deterministic", "true")
    print(f"killed with {killed_at} steps logged")
    assert digest(final_checkpoint(out, STEPS)) == digest(final_checkpoint(undisturbed, STEPS)), f"seed {seed}"
    assert_history_is_whole(out, epochs=EPOCHS, steps=STEPS)
    assert [e["step"] for e in events(out, "eval")] == [e["step"] for e in events(undisturbed, "eval")]
    assert ledger(out) == ledger(undisturbed)
    for mine, other in zip(events(out, "train"), events(undisturbed, "train"), strict=True):
        assert (mine["step"], mine["loss"], mine["lr"]) == (other["step"], other["loss"], other["lr"])
    assert not list((out / "checkpoints").glob(".*")), "something half written is left"
    assert_tensorboard_holds_each_step_once(out)


def assert_tensorboard_holds_each_step_once(out: Path) -> None:
    reader = read_tensorboard(out)
    assert {"input", "weights", "train/lr", "train/accuracy", "eval/accuracy"} <= set(reader.Tags()["tensors"])
    assert [event.step for event in reader.Tensors("weights")] == [e["step"] for e in events(out, "eval")]


@pytest.mark.slow
def test_two_ranks_become_three_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    flags = ("--precision", "float64")
    one, out = tmp_path / "one", tmp_path / "run"
    run_to_end(one, *flags, np=1)
    with running(out, *flags, env=SLOW_STEP) as run:
        run.wait_for_step(14)
        run.kill()
    run_to_end(out, *flags, np=3)
    first, second = events(out, "start")
    assert (first["size"], first["first_step"]) == (2, 0)
    assert second["size"] == 3
    assert second["first_step"] % 8 != 0, "not in the middle of an epoch"
    assert second["global_batch_size"] == 7
    assert_history_is_whole(out, epochs=EPOCHS, steps=STEPS)
    assert ledger(out) == ledger(one)
    mine, other = (read_checkpoint(final_checkpoint(path, STEPS)).variables for path in (out, one))
    for name, value in other.items():
        np.testing.assert_allclose(mine[name], value, rtol=0, atol=1e-10 * max(1.0, np.abs(value).max()), err_msg=name)


def test_a_finished_run_reports_it_and_changes_nothing(undisturbed: Path) -> None:
    before = contents(undisturbed)
    run = run_to_end(undisturbed, "--deterministic", "true", np=1)
    assert f"the run in {undisturbed} is complete: {STEPS} steps" in run.text()
    assert contents(undisturbed) == before


def contents(out: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in out.rglob("*") if path.is_file() and ".lease" not in path.parts}


def test_other_settings_are_refused_with_both_values(undisturbed: Path) -> None:
    with running(undisturbed, "--seed", "1", log=undisturbed.with_name("refused.log")) as run:
        assert run.wait() == 2
    [message] = [line for line in run.text().splitlines() if "ringtrain: error" in line]
    assert "deterministic True -> False; seed 0 -> 1" in message
    assert "--resume never" in message


@pytest.mark.slow
@pytest.mark.parametrize("sharded", ["false", "true"])  # the optimizer is Adam
def test_a_damaged_checkpoint_gives_way_to_the_one_before(undisturbed: Path, tmp_path: Path, sharded: str) -> None:
    out, flags = tmp_path / "run", ("--deterministic", "true", "--shard_optimizer", sharded)
    with running(out, *flags, env=SLOW_STEP) as run:
        run.wait_for("two checkpoints", lambda: len(events(out, "checkpoint")) >= 3)
        run.kill()
    steps = sorted(path.name for path in (out / "checkpoints").glob("step-*"))
    newest = out / "checkpoints" / steps[-1] / "variables.bin"
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data)
    finished = run_to_end(out, *flags)
    assert "does not have the checksum" in finished.text()
    assert events(out, "start")[-1]["first_step"] == int(steps[-2].removeprefix("step-"))
    assert (out / "checkpoints" / f"{steps[-1]}.damaged-1").is_dir()
    # In a file of shards slots come last.
    mine, others = (read_checkpoint(final_checkpoint(path, STEPS)).variables for path in (out, undisturbed))
    assert {name: value.tobytes() for name, value in mine.items()} == {n: v.tobytes() for n, v in others.items()}


@pytest.mark.slow
def test_foreign_and_missing_checkpoints_are_refused(tmp_path: Path) -> None:
    out, other = tmp_path / "run", tmp_path / "other"
    run_to_end(out, "--steps", "2", np=1)
    run_to_end(other, "--steps", "4", "--seed", "7", np=1)
    names = {path: json.loads((path / "run.json").read_text())["id"][:8] for path in (out, other)}
    shutil.copytree(final_checkpoint(other, 4), final_checkpoint(out, 4))
    history = (out / "metrics.jsonl").read_bytes()
    with running(out, "--steps", "6", np=1, log=tmp_path / "foreign.log") as run:
        assert run.wait() == 2
    assert "is of another run" in run.text()
    assert all(f"run {name}" in run.text() for name in names.values())

    (out / "checkpoints").rename(tmp_path / "elsewhere")
    (out / "checkpoints").symlink_to("gone")
    with running(out, "--steps", "6", np=1, log=tmp_path / "gone.log") as run:
        assert run.wait() == 3
    assert "has saved checkpoints, the newest of step 2" in run.text()
    assert (out / "metrics.jsonl").read_bytes() == history


READING = """
import keras, numpy as np
from ringtrain import Sources, Workload, from_arrays

class Reading(Workload):
    def create_model(self):
        return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])

    def create_sources(self, data_dir, *, synthetic):
        x = np.load(data_dir / "x.npy")
        return Sources(train=from_arrays(x, x[:, :1]))

    def loss(self, y, outputs):
        return (y - outputs)[:, 0] ** 2
"""


@pytest.mark.slow
def test_a_resume_with_other_data_of_equal_size_gives_a_warning(tmp_path: Path) -> None:
    out, workload = tmp_path / "run", tmp_path / "reading.py"
    workload.write_text(READING)
    x = np.ones((8, 2), np.float32)
    for steps, scale in ((1, 1), (2, 1), (3, 2)):
        np.save(tmp_path / "x.npy", scale * x)
        flags = ("--data_dir", str(tmp_path), "--batch_size", "4", "--steps", str(steps))
        text = run_to_end(out, *flags, np=1, workload=str(workload)).text()
        assert ("warning: train x, train y: not what this run has used up to step 2" in text) == (scale == 2)
    [warning] = events(out, "warning")
    assert warning["message"].startswith("train x, train y")
    first, second, third = (event["data"] for event in events(out, "start"))
    assert first == second
    assert first.keys() == third.keys() == {"train x", "train y"}


@pytest.mark.slow
def test_another_workloads_checkpoint_is_refused(undisturbed: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(undisturbed, out, symlinks=True)
    manifest = final_checkpoint(out, STEPS) / "manifest.json"
    content = json.loads(manifest.read_text())["content"]
    content["run"]["workload"], content["progress"]["finished"] = "another.py:Model", None
    manifest.write_text(json.dumps({"sha256": digest_of(content), "content": content}))
    with running(out, "--deterministic", "true", np=1) as run:
        assert run.wait() == 2
    assert "its workload is another.py:Model, not" in run.text()
    assert manifest.exists()


@pytest.mark.slow
def test_an_exported_model_gives_a_run_its_first_weights(
    undisturbed: Path, tmp_path: Path, run_ringtrain: RunRingtrain
) -> None:
    exported = tmp_path / "model.keras"
    arguments = ["export", undisturbed, "--workload", f"{WORKLOAD}:Lasting", "--output", exported]
    assert run_ringtrain(arguments).rc == 0
    run = run_to_end(tmp_path / "run", "--init_from", str(exported), "--steps", "1", np=1)
    assert "4 of 4 variables taken" in run.text()


def test_matching_weights_of_another_run_are_loaded(undisturbed: Path, tmp_path: Path) -> None:
    run = run_to_end(tmp_path / "run", "--init_from", str(undisturbed), "--steps", "1", np=1)
    assert "4 of 4 variables taken" in run.text()
    assert events(tmp_path / "run", "start")[0]["first_step"] == 0


@pytest.mark.slow
def test_keep_retains_the_newest_and_the_best(undisturbed: Path) -> None:
    names = sorted(path.name for path in (undisturbed / "checkpoints").iterdir())
    [best, *steps] = names
    assert steps == [step_name(step) for step in (40, 45, 48)]
    evals = events(undisturbed, "eval")
    highest = max(evals, key=lambda e: e["accuracy"])  # the first of several
    assert best == f"best-{step_name(highest['step'])}"
