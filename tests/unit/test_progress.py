"""What a run remembers: which evaluation was the best, and how long ago."""

import json
import math
from dataclasses import asdict
from typing import Literal
from unittest import mock

import pytest

from ringtrain.run.resume import Progress

Direction = Literal["min", "max"]


@pytest.mark.parametrize(
    ("direction", "values", "is_best"),
    [
        ("min", [3.0, 2.0, 2.5, 2.0, -1.0], [True, True, False, False, True]),
        ("max", [3.0, 2.0, 3.5, 3.5, 4.0], [True, False, True, False, True]),
        ("max", [-2.0, -3.0, -1.0], [True, False, True]),
        ("max", [-math.inf, -math.inf, 0.0, 1e300, math.inf], [True, False, True, True, True]),
        ("min", [1e300, 0.0, -1.0], [True, True, True]),
        ("min", [math.inf, 1.0, -math.inf, -math.inf], [True, True, True, False]),
        ("min", [math.nan, 1.0, math.nan, 0.5], [False, True, False, True]),
        ("max", [math.nan, math.nan, -5.0, math.nan], [False, False, True, False]),
    ],
)
def test_a_new_best_is_better_by_the_direction_and_nan_never_is(
    direction: Direction, values: list[float], is_best: list[bool]
) -> None:
    progress = Progress()
    assert [progress.note_evaluation(step, value, direction) for step, value in enumerate(values)] == is_best
    last = max(step for step, best in enumerate(is_best) if best)
    assert (progress.best, progress.best_step) == (values[last], last)


def test_evaluations_since_the_best_are_counted() -> None:
    progress = Progress()
    counts = []
    for step, value in enumerate([math.nan, 3.0, 4.0, 3.0, math.nan, 2.0, 2.0]):
        progress.note_evaluation(step, value, "min")
        assert progress.evaluated_step == step
        counts.append(progress.evaluations_without_best)
    assert counts == [1, 0, 1, 2, 3, 0, 1]


@pytest.mark.parametrize(("evaluated_step", "evaluations"), [(8, 3), (8, 2), (4, 3)])
def test_a_run_killed_between_its_last_evaluation_and_its_end_stops_early(
    evaluated_step: int, evaluations: int
) -> None:
    """Its checkpoint holds the evaluation; not where more may follow, or where that of this step is missing."""
    from ringtrain.training.actions import Ending
    from ringtrain.training.loop import catch_up

    progress = Progress(evaluated_step=evaluated_step, evaluations_without_best=evaluations)
    job = mock.Mock(plan=mock.Mock(first_step=8), config=mock.Mock(stop_after=3))
    found = catch_up(job, mock.Mock(progress=progress), [])
    assert found is (Ending.EARLY if (evaluated_step, evaluations) == (8, 3) else None)


def test_an_evaluation_keeps_the_other_counters() -> None:
    progress = Progress(skipped_in_a_row=3)
    progress.note_evaluation(1, 1.0, "min")
    assert (progress.skipped_in_a_row, progress.finished) == (3, None)


def test_progress_resumes_from_json_unchanged() -> None:
    values = [5.0, 0.1, 0.3, math.inf, 0.1, 0.1 / 3]
    whole, parts = Progress(), Progress()
    for step, value in enumerate(values):
        parts = Progress(**json.loads(json.dumps(asdict(parts))))
        assert whole.note_evaluation(step, value, "min") == parts.note_evaluation(step, value, "min")
        assert whole == parts


def test_states_of_pipelines_are_read_back() -> None:
    progress = Progress(places=[(50, "AAE=", "/data"), (50, "AAI=", "")])
    read = Progress.from_plain(json.loads(json.dumps(asdict(progress)))).places
    assert [tuple(place) for place in read] == progress.places
    for wrong in (
        "AAE=",
        [50, "AAE=", ""],
        [[50, "<>", ""]],
        [["50", "AAE=", ""]],
        [[-1, "AAE=", ""]],
        [[50, "AAE=", 1]],
    ):
        with pytest.raises(ValueError, match="its places are no list of a step, a state and a directory for each rank"):
            Progress.from_plain({"places": wrong})
