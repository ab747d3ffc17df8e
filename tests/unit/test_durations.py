"""The report of how long tests take."""

import pytest

from tests.durations import find_grown, sum_by_directory


@pytest.mark.parametrize(("before", "now", "has_grown"), [(2.0, 3.6, True), (2.0, 2.9, False), (0.2, 0.6, False)])
def test_only_tests_above_both_growth_thresholds_are_named(before: float, now: float, has_grown: bool) -> None:
    assert find_grown({"a": now}, {"a": before}) == ({"a": (before, now)} if has_grown else {})


def test_the_most_grown_come_first_without_short_new_tests() -> None:
    assert list(find_grown({"a": 3.0, "b": 9.0, "new": 1.0, "short": 0.2}, {"a": 1.0, "b": 1.0})) == ["b", "a", "new"]


def test_cases_are_added_up_by_directory() -> None:
    cases = {
        "tests/unit/test_a.py::test_b[x/y]": 1.0,
        "tests/unit/test_c.py::test_d": 2.0,
        "tests/world/test_e.py::test_f": 4.0,
    }
    assert sum_by_directory(cases) == {"tests/world": 4.0, "tests/unit": 3.0}
