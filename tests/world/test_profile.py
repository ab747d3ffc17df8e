"""``--profile``: TensorFlow's profile of some steps of rank 0, and a timeline of the sums of all ranks."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.world.conftest import RunRingtrain
from tests.world.processes import REPOSITORY

LASTING = f"{REPOSITORY / 'tests/world/workloads/lasting.py'}:Lasting"
SUM = "native_all_reduce:RingtrainAllReduce"  # as TensorFlow's profile calls it
FLAGS = ["--workload", LASTING, "--log_every", "4", "--steps", "12"]


def read_profile(directory: Path) -> Any:
    """The one profile of a directory."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    [path] = directory.glob("plugins/profile/*/*.xplane.pb")
    return xplane_pb2.XSpace.FromString(path.read_bytes())


def count_events(directory: Path, name: str) -> int:
    """How often a profile holds an event."""
    return sum(
        plane.event_metadata[event.metadata_id].name == name
        for plane in read_profile(directory).planes
        for line in plane.lines
        for event in line.events
    )


def read_steps(directory: Path) -> set[int]:
    """The steps that a profile holds."""
    steps = set()
    for plane in read_profile(directory).planes:
        names = {number: stat.name for number, stat in plane.stat_metadata.items()}
        for line in plane.lines:
            for event in line.events:
                if plane.event_metadata[event.metadata_id].name.startswith("train"):
                    steps |= {s.int64_value for s in event.stats if names[s.metadata_id] == "step_num"}
    return steps


def test_profiled_steps_show_their_communication(run_ringtrain: RunRingtrain, tmp_path: Path) -> None:
    out = tmp_path / "out"
    config = tmp_path / "profile.yaml"
    config.write_text("profile: 3:5\n")  # in YAML a number to the base 60
    refused = run_ringtrain([*FLAGS, "--config", str(config), "--out", str(out)])
    assert refused.rc == 2
    assert "profile is '185'; it must be a text (in a YAML file put it in quotes)." in refused.stderr
    config.write_text("profile: '3:5'\n")
    by_horovod = ["--config", str(config), "--backend", "horovod"]
    finished = run_ringtrain([*FLAGS, *by_horovod, "--out", str(out)], launcher="mpirun")
    assert finished.rc == 0, finished.stderr
    assert f"the profile of steps 3 to 5 is in {out}/profile" in finished.stdout
    assert read_steps(out / "profile") == {3, 4, 5}
    timeline = json.loads((out / "profile/horovod-steps-3-5.json").read_text())
    tensors = {event["args"]["name"]: event["pid"] for event in timeline if "name" in event.get("args", {})}
    first = [event for event in timeline if event["pid"] == tensors["gradients/0"]]
    assert sum(event.get("name") == "NEGOTIATE_ALLREDUCE" for event in first) == 3
    assert sum(event.get("name") == "MPI_ALLREDUCE" for event in first) == 3


@pytest.mark.slow
def test_steps_that_are_done_are_not_profiled(run_ringtrain: RunRingtrain, tmp_path: Path) -> None:
    for steps, profile, expected in (
        ("12", "3:5", ""),
        ("14", "1:2", "step 12 is done already; no profile is written"),
    ):
        finished = run_ringtrain([*FLAGS, "--profile", profile, "--steps", steps, "--out", str(tmp_path)])
        assert expected in finished.stdout


@pytest.mark.alone  # compares moments of two ranks
def test_native_sums_are_in_the_profile(run_ringtrain: RunRingtrain, tmp_path: Path) -> None:
    finished = run_ringtrain([*FLAGS, "--profile", "3:5", "--out", str(tmp_path)], launcher="mpirun")
    assert finished.rc == 0, finished.stderr
    assert count_events(tmp_path / "profile", SUM) == 3
    assert "native-steps-3-5.json" in finished.stdout
    events = json.loads((tmp_path / "profile/native-steps-3-5.json").read_text())
    spans = [event for event in events if event["ph"] == "X" and event["args"]["sum"] == "gradients/0"]
    for rank in (0, 1):
        assert [span["name"] for span in spans if span["pid"] == rank] == ["wait", "gradients/0"] * 3
    for waits in zip(*(spans[rank * 6 : rank * 6 + 6 : 2] for rank in (0, 1)), strict=True):
        met = [span["ts"] + span["dur"] for span in waits]  # all ranks within a moment, whoever had waited
        assert max(met) - min(met) < 50_000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        pytest.param("1:1", {1}, id="first"),
        pytest.param("11:40", {11, 12}, id="last"),
        pytest.param("13:14", set(), id="none"),
    ],
)
def test_one_process_profiles_the_requested_steps(
    steps: str, expected: set[int], run_ringtrain: RunRingtrain, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    finished = run_ringtrain([*FLAGS, "--profile", steps, "--out", str(out)])
    assert finished.rc == 0, finished.stderr
    if expected:
        assert read_steps(out / "profile") == expected
    else:
        assert "warning: --profile 13:14: the run ends with step 12; no profile is written" in finished.stdout
        assert not (out / "profile").exists()
