"""Tests on NVIDIA's GPUs, for `make test-gpu`. Where too few are seen, each is skipped by its name."""

import functools
import subprocess
import sys

import pytest

from ringtrain.runtime.machine import has_gpu_driver
from tests.world.processes import clean_environment


@functools.cache
def count_gpus() -> int:
    """The GPUs that TensorFlow sees, in a process of its own: this one would keep their memory."""
    program = "import tensorflow as tf; print(len(tf.config.list_physical_devices('GPU')))"
    command = [sys.executable, "-c", program]
    finished = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=120, check=True)
    count = int(finished.stdout)
    assert count or not has_gpu_driver(), f"there is NVIDIA's driver, but TensorFlow sees no GPU:\n{finished.stderr}"
    return count


def pytest_runtest_setup(item: pytest.Item) -> None:
    marker = item.get_closest_marker("gpu")
    assert marker is not None, "tests of this directory are marked gpu, or gpu(N)"
    needed = marker.args[0] if marker.args else 1
    if count_gpus() < needed:
        pytest.skip(f"needs {needed} GPUs; {count_gpus()} are seen")
