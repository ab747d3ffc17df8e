"""Who runs out of memory reads what was too large, where, and what helps."""

import pytest
import tensorflow as tf

from ringtrain.config import Config
from ringtrain.errors import DataError
from ringtrain.guard.causes import OutOfMemoryError, explain, explaining_memory
from ringtrain.runtime import activity
from ringtrain.runtime.activity import Phase

# As TensorFlow 2.18 writes it on a GPU; there need not be one here.
ON_GPU = (
    "{{function_node __wrapped__Conv2D}} OOM when allocating tensor with shape[512,64,224,224] and type float on "
    "/job:localhost/replica:0/task:0/device:GPU:0 by allocator GPU_0_bfc [Op:Conv2D]"
)


def test_a_real_tensor_that_does_not_fit_is_explained() -> None:
    activity.set_phase(Phase.STEP, 12)
    with pytest.raises(OutOfMemoryError) as caught, explaining_memory(Config(batch_size=512)):
        tf.zeros([2**50])
    message = str(caught.value)
    assert message.startswith("out of memory on the host while it is in step 12, with 512 samples a rank")
    assert "OOM when allocating tensor with shape[1125899906842624]" in message
    assert "--batch_size 256 --accumulate 2, which trains the same global batch" in message
    assert "fewer ranks on a node" in message
    assert caught.value.exit_code == 1


def test_on_a_gpu_it_is_the_batch_and_the_precision_that_help() -> None:
    error = tf.errors.ResourceExhaustedError(None, None, ON_GPU)
    message = explain(error, Config(global_batch_size=1024))
    assert message is not None
    assert message.startswith("out of memory on the GPU")
    assert "with 1024 samples in the global batch (OOM when allocating tensor with shape[512,64,224,224]" in message
    assert "What helps: --accumulate 2, which trains the same global batch" in message
    assert "--precision mixed_bfloat16" in message
    assert "fewer ranks on a node" not in message


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("CUDA_ERROR_OUT_OF_MEMORY: out of memory"), tf.errors.InternalError(
        None, None, "Failed to allocate request for 8.00GiB (8589934592B) on device ordinal 0"
    )]
)  # fmt: skip
def test_pythons_and_the_drivers_words_are_recognised(error: Exception) -> None:
    assert "out of memory" in (explain(error, Config(batch_size=2)) or "")


@pytest.mark.parametrize("error", [ValueError("shapes differ"), DataError("the disk is out of memory")])
def test_other_errors_pass_as_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, explaining_memory(Config(batch_size=2)):
        raise error
    assert caught.value is error
