"""What is concluded from the states of the ranks: a table."""

import json
from typing import Any

import pytest

from ringtrain.runtime.activity import Note, Phase
from ringtrain.watchdog.states import RankState, find_hang, find_long_wait, read_state

NODES = ["node6", "node7", "node7", "node8"]


def state(doing: Phase, step: int = 412, **more: Any) -> RankState:
    ten = dict.fromkeys(("still", "limit", "max_silence"), 10.0)
    more = {**ten, "silent": 0.0, "where": "", "is_gone": False, **more}
    return RankState(note=Note(doing, step), **more)


def stands(step: int = 412, **more: float) -> RankState:
    return state(Phase.STEP, step, **more)


REPORTS = {
    "one rank waits for data": (
        {0: stands(), 1: state(Phase.DATA, still=11.0, where="train.py:42 (load)"), 2: stands(), 3: stands()},
        "nothing has moved for 10 s: rank 1 on node7 waits for data of step 412 (11 s), in train.py:42 (load); "
        "ranks 0, 2, 3 wait for it in step 412.",
    ),
    "all wait for data": (
        dict.fromkeys(range(4), state(Phase.DATA)),
        "nothing has moved for 10 s: rank 0 on node6, ranks 1, 2 on node7 and rank 3 on node8 wait for data of step "
        "412 (10 s).",
    ),
    "nobody stands out": (
        {0: stands(), 1: stands()},
        "nothing has moved for 10 s: rank 0 on node6 and rank 1 on node7 are in step 412 (10 s).",
    ),
    "a callback of one reduces alone, and another saves": (
        {0: state(Phase.MEET, limit=600.0), 1: state(Phase.CALLBACKS)},
        "nothing has moved for 10 s: rank 1 on node7 runs the callbacks after step 412 (10 s); rank 0 waits for it.",
    ),
    "one is a step behind": (
        {0: stands(), 1: stands(411), 2: stands()},
        "nothing has moved for 10 s: rank 1 on node7 is in step 411 (10 s); ranks 0, 2 wait for it in step 412.",
    ),
    "one is silent": (
        {0: stands(), 1: stands(still=0.0, silent=10.5), 2: state(Phase.DATA, 413)},
        "nothing has moved for 10 s: rank 1 on node7 has been silent for 10 s (before: is in step 412); rank 0 "
        "waits for it in step 412; rank 2 waits for it.",
    ),
    "one was stopped in a save": (
        {0: stands(), 1: state(Phase.SAVE, still=0.0, silent=10.5, limit=600.0)},
        "nothing has moved for 10 s: rank 1 on node7 has been silent for 10 s (before: saves step 412); rank 0 waits "
        "for it in step 412.",
    ),
    "one was stopped in a save, in which another waits for it": (
        {0: state(Phase.MEET, limit=600.0), 1: state(Phase.SAVE, still=0.0, silent=10.5, limit=600.0)},
        "nothing has moved for 10 s: rank 1 on node7 has been silent for 10 s (before: saves step 412); rank 0 waits "
        "for it.",
    ),
    "one is gone": (
        {
            0: stands(still=20.0, limit=300.0, max_silence=300.0),
            1: stands(still=0.0, silent=20.4, limit=300.0, max_silence=300.0, is_gone=True),
        },
        "nothing has moved for 20 s: rank 1 on node7 has been gone for 20 s (before: is in step 412); rank 0 waits "
        "for it in step 412.",
    ),
    "two do different things": (
        {0: state(Phase.SAVE), 1: state(Phase.DATA, 413, still=12.0), 2: state(Phase.MEET)},
        "nothing has moved for 10 s: rank 1 on node7 waits for data of step 413 (12 s); rank 0 on node6 saves step "
        "412 (10 s); rank 2 waits for them.",
    ),
    "one process alone": (
        {0: state(Phase.PREPARE, 0, still=600.0, limit=600.0)},
        "nothing has moved for 600 s: rank 0 on node6 prepares the data (600 s).",
    ),
}


@pytest.mark.parametrize(("states", "report"), REPORTS.values(), ids=REPORTS.keys())
def test_a_hang_report_names_blocked_and_waiting_ranks(states: dict[int, RankState], report: str) -> None:
    assert find_hang(states, NODES, sees_all=True) == report


HEALTHY = {
    "one still moves": {0: stands(still=900.0), 1: state(Phase.DATA, still=9.0)},
    "one compiles, the others wait": {0: stands(still=500.0), 1: state(Phase.COMPILE, still=500.0, limit=600.0)},
    "a silent rank, while the others move": {0: stands(still=1.0), 1: stands(still=0.0, silent=900.0)},
    "a rank that is gone, while the others move": {0: stands(still=1.0), 1: stands(silent=900.0, is_gone=True)},
    "one is silent, another saves": {
        0: state(Phase.SAVE, still=500.0, limit=600.0),
        1: stands(still=0.0, silent=500.0),
    },
    "one compiles with Python's lock held": {
        0: stands(still=500.0, limit=600.0),
        1: state(Phase.COMPILE, still=0.0, silent=500.0, limit=600.0, max_silence=600.0),
    },
    "all are still, not for long": {0: stands(still=9.9), 1: stands(still=9.9)},
    "no rank is left": {},
}


@pytest.mark.parametrize("states", HEALTHY.values(), ids=HEALTHY.keys())
def test_progress_or_remaining_time_is_no_hang(states: dict[int, RankState]) -> None:
    assert find_hang(states, NODES, sees_all=True) is None


def test_a_long_wait_is_reported_with_its_end() -> None:
    states = {0: state(Phase.MEET, still=15.0, limit=600.0), 1: state(Phase.SAVE, still=16.0, limit=600.0)}
    assert find_hang(states, NODES, sees_all=True) is None
    report = find_long_wait(states, NODES, 15.0)
    assert report is not None
    assert report.startswith("no progress for 15 s: rank 1 on node7 saves step 412 (16 s); rank 0 waits for")
    assert report.endswith("if nothing moves for another 585 s.")
    assert find_long_wait({**states, 2: stands(still=1.0)}, NODES, 15.0) is None


def test_other_ranks_judge_only_if_rank_0_is_silent() -> None:
    mine = stands(still=50.0)
    assert find_hang({0: stands(still=50.0), 2: mine}, NODES, sees_all=False) is None
    assert find_hang({2: mine}, NODES, sees_all=False) is None
    report = find_hang({0: stands(still=0.0, silent=10.0), 2: mine}, NODES, sees_all=False)
    assert report is not None
    assert "rank 0 on node6 has been silent for 10 s" in report


def test_many_groups_are_not_all_named() -> None:
    states = {rank: state(Phase.DATA, rank) for rank in range(20)}
    report = find_hang(states, ["n"] * 20, sees_all=True)
    assert report is not None
    assert report.endswith("and 14 groups of ranks more.")


def test_a_state_travels_as_json() -> None:
    sent = state(Phase.DATA, still=3.25, limit=60.0, max_silence=20.0, where="train.py:42 (load)")
    assert read_state(json.loads(json.dumps(sent.to_message()))) == sent


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"doing": "__class__", "step": 1, "still": 0, "limit": 1, "max_silence": 1, "where": ""},
        {"doing": "STEP", "step": "x", "still": 0, "limit": 1, "max_silence": 1, "where": ""},
    ],
)
def test_an_invalid_state_is_refused(message: dict[str, object]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        read_state(message)


@pytest.mark.parametrize("doing", list(Phase))
def test_every_phase_has_a_singular_and_a_plural_form(doing: Phase) -> None:
    note = Note(doing, 7)
    assert "{" not in note.words + note.words_of_one + (note.place or "")
    verb = note.words.split()[0]
    assert note.words_of_one.split()[0] == ("is" if verb == "are" else verb + "s")
