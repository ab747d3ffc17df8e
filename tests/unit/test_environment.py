"""What in the environment would end Horovod or TensorFlow in C++ is named before they start."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from ringtrain.errors import UsageError
from ringtrain.runtime.environment import MIN_ADDRESS_BYTES, check_address_space, check_environment

WRONG = {
    "HOROVOD_CACHE_CAPACITY": ["-5", "99999999999999999999", "many", "1.5", "\u0663"],
    "HOROVOD_CPU_OPERATIONS": ["nonsense"],
    "HOROVOD_CONTROLLER": ["nonsense"],
    "HOROVOD_CYCLE_TIME": ["fast", "-1", "inf"],
    "HOROVOD_GLOO_IFACE": ["none0"],
    "TF_NUM_INTRAOP_THREADS": ["-3", "abc"],
    "TF_XLA_FLAGS": ["nonsense"],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_wrong_value_is_named_with_its_variable_and_the_rule(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=f"^{name}=.*in the environment; it must be .* Unset it, or set it right"):
        check_environment({name: value})


def test_right_values_pass() -> None:
    check_environment(
        {
            "HOROVOD_CACHE_CAPACITY": "0", "HOROVOD_CPU_OPERATIONS": "MPI", "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CYCLE_TIME": "0.5", "HOROVOD_GLOO_IFACE": "lo", "HOROVOD_FUSION_THRESHOLD": "",
            "TF_XLA_FLAGS": "--tf_xla_auto_jit=2", "HOROVOD_LOG_LEVEL": "debug",
        }
    )  # fmt: skip


def run_with(tmp_path: Path, variables: dict[str, str], address_space: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ringtrain", "--workload", "polynomial", "--steps", "1", "--out", str(tmp_path / "run")],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (address_space, address_space)),
    )


def test_the_command_ends_in_one_line(tmp_path: Path) -> None:
    finished = run_with(tmp_path, {"TF_NUM_INTRAOP_THREADS": "-3"}, resource.RLIM_INFINITY)
    assert (finished.returncode, len(finished.stderr.splitlines())) == (2, 1), finished.stderr
    assert "TF_NUM_INTRAOP_THREADS='-3' in the environment" in finished.stderr


def test_memory_that_cannot_be_had_ends_in_one_line(tmp_path: Path) -> None:
    finished = run_with(tmp_path, {}, 1_500_000 * 1024)
    assert (finished.returncode, len(finished.stderr.splitlines())) == (2, 1), finished.stderr
    assert "1.4 GiB of address space (ulimit -v 1500000)" in finished.stderr
    assert "Raise the limit: ulimit -v unlimited" in finished.stderr
    check_address_space(resource.RLIM_INFINITY)
    check_address_space(int(MIN_ADDRESS_BYTES))
