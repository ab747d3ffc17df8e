"""What is concluded from the end of a group: its exit code, whether it is started again, what the user reads."""

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch.decision import LOST_RANKS, SHOWN_LINES, Attempt, decide, explain
from launch.group import GroupEnd, RankEnd
from ringtrain.guard.causes import LostRanksError
from ringtrain.runtime.run_record import EndRecord
from ringtrain.training.ending import end_of

RUN = Path("/runs/digits")
SAVED = EndRecord(status="preempted", exit_code=75, message="stopped by SIGTERM: saved", stopped_by="signal")


def rank_end(rank: int, exit_code: int | None = 0, killed_by: str | None = None) -> RankEnd:
    return RankEnd(rank=rank, host="node7", pid=100 + rank, exit_code=exit_code, signal=killed_by)


def attempt(*ends: RankEnd, **values: Any) -> Attempt:
    """An attempt of two ranks from step 20 to step 40."""
    group: dict[str, Any] = {
        "num_ranks": 2,
        "num_started": 2,
        "ends": ends,
        "last_errors": [["a warning"], ["a warning", "ringtrain: error: no such file", "more of it"]],
        "launcher": "mpirun",
        "launcher_code": 1,
        "launcher_lines": ["not enough slots"],
        "not_ended": [],
    }
    group |= {name: values.pop(name) for name in list(values) if name in group}
    rest: dict[str, Any] = {"end": None, "run": RUN, "first_step": 20, "last_step": 40}
    return Attempt(group=GroupEnd(**group), **(rest | values))


def end_told(status: str, exit_code: int, message: str | None = None, stopped_by: str | None = None) -> EndRecord:
    return EndRecord(status=status, exit_code=exit_code, message=message, stopped_by=stopped_by)


@pytest.mark.parametrize(
    ("ended", "exit_code"),
    [
        (attempt(rank_end(0), rank_end(1)), 0),
        (attempt(rank_end(1, 3), rank_end(0, 1)), 3),
        (attempt(rank_end(1, None, "SIGKILL"), rank_end(0, 1)), 1),
        (attempt(rank_end(1, 137), rank_end(0, 1)), 1),
        (attempt(replace(rank_end(1), has_quit=True), rank_end(0, 1), end=end_told(LOST_RANKS, 1)), 1),
        (attempt(replace(rank_end(1), has_quit=True), rank_end(0, None, "SIGTERM")), 1),
        (attempt(rank_end(1, 1), end=end_told("data", 3)), 3),
        (attempt(rank_end(1, None, "SIGKILL"), end=end_told("failed", 1)), 1),
        (attempt(rank_end(0), rank_end(1, None, "SIGKILL"), end=end_told("completed", 0)), 0),
        (attempt(end=SAVED, signals=[signal.SIGTERM]), 75),
        (attempt(rank_end(0, 75), rank_end(1, 75), end=SAVED), 75),
        (attempt(rank_end(1, None, "SIGKILL"), rank_end(0, 75), end=SAVED), 1),
        (attempt(rank_end(1, 3), rank_end(0, 75), end=SAVED), 3),
        (attempt(launcher_code=-9), 1),
        (attempt(rank_end(0), launcher_code=-9), 1),
        (attempt(num_started=0, signals=[signal.SIGTERM], launcher_code=None), 75),
        (attempt(rank_end(0, None, "SIGTERM"), signals=[signal.SIGTERM]), 75),
        (attempt(rank_end(0, None, "SIGTERM")), 1),
        (attempt(signals=[signal.SIGINT], is_cut_short=True, launcher_code=None), 1),
    ],
)
def test_the_exit_code_is_the_run_s_or_the_first_failed_rank_s(ended: Attempt, exit_code: int) -> None:
    assert ended.exit_code == exit_code


@pytest.mark.parametrize(
    "ended",
    [
        attempt(rank_end(1, None, "SIGKILL")),
        attempt(rank_end(1, 1), rank_end(0, 1)),
        attempt(rank_end(1, 6), end=end_told("hang", 6)),
        attempt(launcher_code=-9),
        attempt(rank_end(0, 75), rank_end(1, 75), end=SAVED),
        attempt(rank_end(1, None, "SIGKILL"), first_step=0),
    ],
)
def test_a_crash_restarts_from_the_latest_checkpoint(ended: Attempt) -> None:
    restart = "restart 2 of 2, from the checkpoint of step 40"
    assert decide(ended, num_restarts=1, max_restarts=2) == (True, restart)
    assert decide(ended, num_restarts=0, max_restarts=0) == (False, "")
    assert decide(ended, num_restarts=2, max_restarts=2) == (False, "all 2 restarts are used up")


@pytest.mark.parametrize(
    "ended",
    [
        attempt(rank_end(0), rank_end(1)),
        *(attempt(rank_end(1, code), end=end_told("x", code)) for code in (2, 3, 4, 5)),
        attempt(end=SAVED, signals=[signal.SIGTERM]),
        attempt(rank_end(1, None, "SIGKILL"), signals=[signal.SIGTERM]),
        attempt(end=end_told("preempted", 75, "saved", "file")),
        attempt(end=end_told("preempted", 75, "saved", "time")),
        attempt(num_started=0),
    ],
)
def test_completed_requested_and_permanent_ends_do_not_restart(ended: Attempt) -> None:
    assert not decide(ended, num_restarts=0, max_restarts=5)[0]


def test_the_first_restart_may_come_before_the_first_checkpoint() -> None:
    decision = decide(attempt(rank_end(1, 1), first_step=0, last_step=0), num_restarts=0, max_restarts=5)
    assert decision == (True, "restart 1 of 5, from the beginning")


def test_a_restart_without_progress_ends_the_loop() -> None:
    restarts, reason = decide(attempt(rank_end(1, 1), last_step=20), num_restarts=1, max_restarts=5)
    assert not restarts
    assert reason == (
        "restart 1 saved no checkpoint after that of step 20: another one would end so as well. A smaller "
        "--checkpoint_every saves more often"
    )


LAST_LINES = ["its last lines:", "not enough slots"]
EXPLAINED: dict[str, tuple[Attempt, list[str]]] = {
    "a rank without words of its own": (
        attempt(rank_end(0, None, "SIGKILL")),
        ["rank 0 on node7 (pid 100) was killed by SIGKILL, the first to end", "  [0] a warning"],
    ),
    "a run that saved": (attempt(rank_end(1, 75), end=SAVED), ["stopped by SIGTERM: saved"]),
    "no rank started": (
        attempt(num_started=0), ["mpirun ended with exit code 1 and had started no rank", *LAST_LINES]
    ),
    "a killed launcher": (
        attempt(launcher_code=-9, launcher_lines=[]), ["mpirun was killed by SIGKILL before its ranks had ended"]
    ),
    "not all ranks started": (
        attempt(launcher_code=213, num_started=1),
        ["mpirun ended with exit code 213 before its ranks had ended", *LAST_LINES],
    ),
    "stopped before the first step": (
        attempt(rank_end(0, None, "SIGINT"), signals=[signal.SIGINT]),
        ["stopped before the first step; there was nothing to save"],
    ),
    "cut short": (
        attempt(signals=[signal.SIGINT], is_cut_short=True, launcher_code=None),
        ["mpirun and its ranks were ended without saving"],
    ),
    "completed": (attempt(rank_end(0), rank_end(1)), []),
}  # fmt: skip


@pytest.mark.parametrize("how", EXPLAINED)
def test_an_end_is_explained_in_a_few_lines(how: str) -> None:
    ended, lines = EXPLAINED[how]
    assert explain(ended) == lines


def test_the_first_failed_rank_and_its_error_precede_the_end() -> None:
    ended = attempt(rank_end(1, 3), rank_end(0, 1), end=end_told("data", 3, "rank 1 on node7: no such file"))
    assert explain(ended) == [
        "rank 1 on node7 (pid 101) ended with exit code 3, the first to end",
        "  [1] ringtrain: error: no such file",
        "  [1] more of it",
        "rank 1 on node7: no such file",
    ]


def test_an_end_that_the_rank_reported_is_not_repeated() -> None:
    ended = attempt(rank_end(1, 3), end=end_told("data", 3, "no such file"))
    assert explain(ended)[-1] == "  [1] more of it"


def test_a_rank_ended_by_the_watchdog_is_not_the_first_to_fail() -> None:
    hang = "nothing has moved for 10 s: rank 0 waits for data of step 20"
    ended = attempt(rank_end(1, 6), rank_end(0, 6), end=end_told("hang", 6, hang))
    assert explain(ended) == [hang]
    assert "exit code 6" in explain(attempt(rank_end(1, 6)))[0]  # where no rank could say why


def test_of_an_end_of_many_lines_the_first_few_are_shown() -> None:
    """Such as the differences that the ranks found before the first step."""
    lines = ["the ranks differ", *(f"  {number}" for number in range(9))]
    ended = attempt(rank_end(1, 1), end=end_told("usage", 2, "\n".join(lines)))
    assert explain(ended)[-SHOWN_LINES:] == lines[:SHOWN_LINES]


def test_a_rank_that_lost_the_others_is_not_given_as_the_cause() -> None:
    message = "lost the other ranks"
    ended = attempt(rank_end(0, None, "SIGKILL"), rank_end(1, 1), end=end_told(LOST_RANKS, 1, message))
    assert explain(ended)[0] == "rank 0 on node7 (pid 100) was killed by SIGKILL, the first to end"
    assert message not in "".join(explain(ended))
    assert end_of(LostRanksError(message))["status"] == LOST_RANKS
    assert explain(attempt(end=end_told(LOST_RANKS, 1, message)))[-1] == message


def test_an_out_of_memory_kill_is_reported_with_a_remedy() -> None:
    end = replace(rank_end(1, None, "SIGKILL"), memory_limit="the limit of 2.5 GiB of its cgroup")
    named, reason, *_ = explain(attempt(end))
    assert named.endswith("was killed by SIGKILL, the first to end")
    assert reason.startswith(
        "the kernel killed a process there for want of memory (the limit of 2.5 GiB of its cgroup). What"
    )


def test_processes_that_cannot_be_ended_are_named() -> None:
    assert "processes 7, 8 could not be ended" in explain(attempt(rank_end(1, 1), not_ended=[7, 8]))[-1]
