"""``doctor --batch_size auto``."""

import math
import re
from collections.abc import Callable

import pytest

from ringtrain.cli import main
from ringtrain.config import Config
from ringtrain.doctor.batch_size import Trial, advise, search
from ringtrain.doctor.judging import MIB


def device(limit: int, fixed: int, of_sample: float, *, samples: int | None, on_gpu: bool) -> Callable[[int], Trial]:
    def attempt(batch_size: int) -> Trial:
        assert 1 <= batch_size <= (samples or batch_size), "a trial with more samples than there are"
        assert batch_size not in tried, "a trial twice"
        tried.append(batch_size)
        peak = math.ceil(fixed + of_sample * batch_size)
        return Trial(True, peak, on_gpu, samples) if peak <= limit else Trial(False, is_on_gpu=on_gpu)

    tried: list[int] = []
    return attempt


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("first", [1, 32, 900])
@pytest.mark.parametrize("of_sample", [3, 0.4, 45, 400])
def test_the_largest_batch_is_found_in_few_trials(first: int, of_sample: float, on_gpu: bool) -> None:
    found = search(device(1000, 100, of_sample, samples=None, on_gpu=on_gpu), 1000, first)
    largest = int(900 / of_sample)
    assert found is not None
    assert 0.93 * largest - 1 <= found <= largest


def test_all_samples_may_fit_and_not_even_one() -> None:
    assert search(device(1000, 100, 0.1, samples=700, on_gpu=False), 1000, 32) == 700
    assert search(device(1000, 100, 1000, samples=700, on_gpu=False), 1000, 32) is None


def test_wrong_flags_are_named(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--batch_size", "3"]) == 2
    assert "batch_size is '3'; it must be one of none, auto" in capfd.readouterr().err
    assert main(["doctor", "--batch_size", "auto", "--epoch", "3"]) == 2
    assert "no flag --epoch. Did you mean --epochs?" in capfd.readouterr().err


@pytest.mark.slow  # half a minute: a dozen trainings
def test_digits_are_tried_in_little_memory() -> None:
    [fits, accumulated, sharded] = advise(["--workload=digits"], Config(workload="digits"), limit=670 * MIB)
    found = re.fullmatch(r"(\d+) samples per rank fit; they need (\d+) MiB of 670 MiB; (\d+) do not fit", fits)
    assert found, fits
    assert 32 <= int(found[1]) < int(found[3]) < 1347
    assert "--accumulate 2" in accumulated
    assert "by calculation: 0.465 MiB on 2 ranks, " in sharded
