"""What is told and kept of a step that was not finite."""

import io

import numpy as np
import tensorflow as tf

from ringtrain.data.pipeline import Batch
from ringtrain.training.nonfinite import MAX_NAMED, RankReport, describe_findings, pack_batch


def finding(**values: object) -> RankReport:
    usual: dict[str, object] = {"node": "n", "device": "GPU 1", "loss": 0.5, "samples": [], "gradients": []}
    return RankReport(**{**usual, **values})  # type: ignore[arg-type]


def test_the_report_names_rank_device_samples_and_gradient() -> None:
    bad = finding(node="node7", loss="nan", samples=[9, 4], gradients=["conv1/kernel", "conv1/bias"])
    text = describe_findings(7, [finding(), bad, finding(loss=None)])
    assert text == (
        "step 7: loss or gradient is not finite; seen in the loss of rank 1 on node7, GPU 1 (samples 4, 9). Mean "
        "losses from rank 0 on: 0.5, nan, none. At rank 1 the gradient of conv1/kernel and of 1 more was not finite."
    )


def test_an_overflow_in_the_sum_alone_is_reported_as_such() -> None:
    text = describe_findings(7, [finding(), finding()])
    assert "every rank's loss is finite" in text
    assert text.endswith("No rank's own gradient was not finite, only the sum of all.")


def test_weights_that_were_not_finite_before_are_named() -> None:
    text = describe_findings(7, [finding(), finding(loss="nan", weights=["conv1/kernel", "conv1/bias"])])
    assert text.endswith(" Weights of rank 1 were not finite before the step: conv1/kernel, conv1/bias.")


def test_of_many_ranks_some_are_named() -> None:
    text = describe_findings(7, [finding(loss="nan") for _ in range(1000)])
    assert text.count("GPU 1") == MAX_NAMED
    assert f"{1000 - MAX_NAMED} more" in text


def test_a_batch_of_any_structure_is_kept_without_pickle() -> None:
    x = {"image": tf.ones([2, 3]), "words": tf.constant(["a", "bcd"])}
    y = (tf.constant([1, 2]), [tf.zeros([2], tf.float16)])
    batch = Batch(x, y, tf.constant([5, 6], tf.int64), tf.constant(3, tf.int64), tf.constant(4, tf.int64))
    with np.load(io.BytesIO(pack_batch(batch)), allow_pickle=False) as kept:
        assert set(kept.files) == {"indices", "step", "global_count", "x/image", "x/words", "y/0", "y/1/0"}
        assert kept["x/words"].tolist() == [b"a", b"bcd"]
        assert kept["indices"].tolist() == [5, 6]
        assert kept["x/image"].dtype == np.float32
