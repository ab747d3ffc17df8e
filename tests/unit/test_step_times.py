"""Where the time of the steps goes: the parts and their sum."""

import time
from collections.abc import Iterator

import pytest

from ringtrain.step.times import StepTimes


def slow_items() -> Iterator[int]:
    for number in range(2):
        time.sleep(0.05)
        yield number


def test_the_parts_of_a_step_add_up_to_its_time() -> None:
    times = StepTimes(times_communication=True)
    for _ in times.waiting_for(slow_items()):
        with times.computing():
            time.sleep(0.04)
        times.note_communication(0.01)
    parts = times.take(2, sec_per_step=0.5)
    assert list(parts) == ["input_sec", "compute_sec", "communication_sec", "other_sec"]
    assert sum(parts.values()) == pytest.approx(0.5, abs=1e-5)
    assert parts["communication_sec"] == 0.01
    assert parts["input_sec"] >= 0.05
    assert parts["compute_sec"] >= 0.03
    assert times.take(1, sec_per_step=0.5)["other_sec"] == 0.5, "it begins anew"
    totals = times.totals()
    assert totals["communication_sec"] == pytest.approx(0.02)
    assert totals["input_sec"] >= 0.1


def test_an_asynchronous_device_times_only_the_wait_for_data() -> None:
    times = StepTimes(times_communication=False)
    with times.computing():
        pass
    assert times.take(1, sec_per_step=2.0) == {"input_sec": 0.0, "other_sec": 2.0}


def test_an_input_error_is_raised_unchanged() -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise OSError("gone")

    times = StepTimes(times_communication=True)
    with pytest.raises(OSError, match="gone"):
        list(times.waiting_for(broken()))
