"""The command that starts a group on this machine."""

from pathlib import Path

import pytest

from launch.local import parse, plan_group, plan_restart
from ringtrain.errors import UsageError

FLAGS = ["--out", "a run", "--workload", "digits"]
RANK = ["/env/python", "-m", "launch.rank", "/tmp/l", "/env/python", "-m", "ringtrain", *FLAGS]


def test_mpirun_gets_its_slots_and_does_not_bind() -> None:
    command = plan_group(3, "mpi", FLAGS, listener=Path("/tmp/l"), python="/env/python", is_root=False)
    assert command == ["mpirun", "-np", "3", "--host", "localhost:3", "--map-by", "slot", "--bind-to", "none", *RANK]


def test_mpirun_is_allowed_to_run_as_root() -> None:
    command = plan_group(3, "mpi", FLAGS, listener=Path("/tmp/l"), python="/env/python", is_root=True)
    assert command[:2] == ["mpirun", "--allow-run-as-root"]


def test_gloo_needs_no_mpi() -> None:
    command = plan_group(2, "gloo", FLAGS, listener=Path("/tmp/l"), python="/env/python", is_root=True)
    assert command[:3] == ["/env/python", "-m", "launch.gloo"]
    assert command[3:] == ["horovodrun", "--gloo", "-np", "2", "-H", "localhost:2", *RANK]


def test_a_user_script_runs_unchanged() -> None:
    words = ["my_fit.py", "--resume", "never"]
    command = plan_group(2, "mpi", words, listener=Path("/tmp/l"), python="/env/python", is_root=False)
    assert command[-4:] == ["/env/python", *words]
    assert plan_restart(words, Path("/runs/mine"), here=Path("/home")) == words


def test_a_script_that_is_not_there_is_named() -> None:
    with pytest.raises(UsageError, match=r"begins with 'gone\.py', and there is no such file here"):
        parse(["-np", "2", "--", "gone.py"])


def test_a_restart_resumes_in_the_directory_of_the_first_start() -> None:
    assert plan_restart(["--resume", "never"], Path("/runs/digits-2"), here=Path("/home")) == [
        "--resume", "never", "--out", "/runs/digits-2", "--resume", "auto"
    ]  # fmt: skip


def test_a_run_below_the_current_directory_is_named_from_there() -> None:
    assert plan_restart([], Path("/home/runs/digits"), here=Path("/home"))[:2] == ["--out", "runs/digits"]


def test_a_restart_without_a_run_repeats_the_command() -> None:
    assert plan_restart(["eval", "runs/digits"], None, here=Path("/home")) == ["eval", "runs/digits"]
