"""The shares of steps that overlap, of a made timeline."""

import json

import pytest

from benchmarks.overlap import STEPS, read_overlap

TENSORS = {1: "gradients/0_0", 2: "gradients/0_1", 3: "gradients/1_0", 4: "control"}
# The first group is ready, then reduced; the last one, and the control vector.
EARLY: dict[int, tuple[float, float]] = {1: (1, 4), 2: (2, 5), 3: (8, 12), 4: (0, 3)}
LATE: dict[int, tuple[float, float]] = {1: (1, 4), 2: (2, 9), 3: (8, 12), 4: (0, 13)}


def make_timeline(steps: list[dict[int, tuple[float, float]]]) -> str:
    events = [{"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}} for pid, name in TENSORS.items()]
    for number, step in enumerate(steps):
        for pid, (ready, reduced) in step.items():
            begin = 100 * number
            events += [
                {"ph": "B", "name": "NEGOTIATE_ALLREDUCE", "ts": begin + ready, "pid": pid},
                {"ph": "E", "ts": begin + ready + 0.1, "pid": pid},
                {"ph": "B", "name": "ALLREDUCE", "ts": begin + ready + 0.2, "pid": pid},
                {"ph": "E", "ts": begin + reduced, "pid": pid},
            ]
    return json.dumps(events)[:-1] + ",\n"  # Horovod leaves it open


def test_steps_that_overlap_are_counted() -> None:
    num_late = STEPS // 4
    overlap = read_overlap(make_timeline([LATE] * num_late + [EARLY] * (STEPS - num_late)))
    assert overlap == (0.75, 0.75)


def test_a_timeline_of_another_run_is_refused() -> None:
    with pytest.raises(ValueError, match="has 3 steps"):
        read_overlap(make_timeline([EARLY] * 3))
    one_group = [{pid: times for pid, times in EARLY.items() if pid in (1, 2, 4)}]
    with pytest.raises(ValueError, match="in one group"):
        read_overlap(make_timeline(one_group * STEPS))
