"""The workload autoencoder learns to give back images on two ranks, and TensorBoard shows it."""

import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ringtrain.run.checkpoint import read_checkpoint
from ringtrain.workloads import create_workload
from ringtrain.workloads.autoencoder import Autoencoder
from ringtrain.workloads.base import Workload
from tests.world.conftest import LAUNCHERS
from tests.world.processes import clean_environment, run_command
from tests.world.running import events

OPTIONS = {"data": "digits", "width": 16, "gradients": True}
EPOCHS, STEPS_PER_EPOCH = 8, 22  # 1,347 samples, 64 in a batch


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of two ranks that have trained."""
    out = tmp_path_factory.mktemp("autoencoder") / "run"
    options = [item for name, value in OPTIONS.items() for item in (f"--options.{name}", str(value))]
    flags = ["--epochs", str(EPOCHS), "--batch_size", "32", "--optimizer.lr", "0.004", "--out", str(out)]
    program = [sys.executable, "-m", "ringtrain", "--workload", "autoencoder", *options, *flags]
    finished = run_command([*LAUNCHERS["mpirun"], "2", *program], env=clean_environment(), timeout=120)
    assert finished.rc == 0, finished.stdout + finished.stderr
    assert "warn" not in finished.stderr.lower(), finished.stderr
    return out


def test_two_ranks_learn_to_give_back_the_digits(out: Path) -> None:
    losses = [event["loss"] for event in events(out, "eval")]
    assert len(losses) == EPOCHS
    assert losses[-1] < 0.4 * losses[0]


def test_tensorboard_shows_images_histograms_and_scalars(out: Path) -> None:
    reader = EventAccumulator(str(out / "tensorboard"), size_guidance={"tensors": 0})
    reader.Reload()
    layers = ("encoder1", "encoder2", "decoder2", "decoder1")
    weights = {f"{kind}/{layer}" for kind in ("weights", "biases") for layer in layers}
    histograms = {*weights, *(f"gradients/{tag}" for tag in weights), *(f"activations/{layer}" for layer in layers)}
    plugins = {tag: reader.SummaryMetadata(tag).plugin_data.plugin_name for tag in reader.Tags()["tensors"]}
    assert {tag for tag, plugin in plugins.items() if plugin == "histograms"} == histograms
    assert [tag for tag, plugin in plugins.items() if plugin == "images"] == ["images"]
    assert {"train/loss", "eval/loss"} <= {tag for tag, plugin in plugins.items() if plugin == "scalars"}
    steps = [STEPS_PER_EPOCH * epoch for epoch in range(1, EPOCHS + 1)]
    for tag in ("images", "eval/loss", *histograms):
        assert [event.step for event in reader.Tensors(tag)] == steps, tag


def test_the_right_half_of_an_image_reconstructs_the_left(out: Path) -> None:
    reader = EventAccumulator(str(out / "tensorboard"), size_guidance={"tensors": 0})
    reader.Reload()
    width, height, *images = tf.make_ndarray(reader.Tensors("images")[-1].tensor_proto)
    assert (width, height, len(images)) == (b"16", b"8", 8)
    shown = np.stack([tf.io.decode_png(image) for image in images]) / np.float32(255)  # [n, 8, 16, 1]
    originals, reconstructions = shown[:, :, :8], shown[:, :, 8:]

    workload = create_workload(Autoencoder, OPTIONS)
    evaluation = workload.create_sources(None, synthetic=False).evaluation
    assert evaluation is not None
    inputs, _ = evaluation.gather(tf.range(8, dtype=tf.int64))
    np.testing.assert_allclose(originals, inputs, atol=1 / 255)
    outputs = trained_model(workload, out)(inputs)
    np.testing.assert_allclose(reconstructions, outputs, atol=1.5 / 255)
    error = np.mean(np.square(reconstructions - originals))
    assert error < 0.5 * np.mean(np.square(originals - originals.mean(axis=0))), "no better than a mean digit"


def trained_model(workload: Workload, out: Path) -> keras.Model:
    """The model with the weights of the run's last checkpoint."""
    variables = read_checkpoint(out / f"checkpoints/step-{EPOCHS * STEPS_PER_EPOCH:09d}").variables
    model = workload.create_model()
    for weight in model.weights:
        weight.assign(variables[f"weights/{weight.path}"])
    return model
