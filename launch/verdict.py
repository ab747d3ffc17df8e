"""What to conclude from the end of a group: pure functions."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.group import GroupEnd, RankEnd
from ringtrain.errors import EXIT_CODES, PreemptedError
from ringtrain.launched import EndTold

ERROR_MARK = "ringtrain: "
SHOWN_LINES = 5
# The same would happen again: wrong settings, damaged data, a loss that is not finite, replicas that differ.
FINAL_CODES = {2, 3, 4, 5}


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One start of the group, ended.

    Attributes:
        group: what became of the processes.
        end: what the run told of its end.
        run: the run directory; None where none was opened.
        first_step, last_step: the newest checkpoint's before and after; 0 where there was none.
        was_told_to_stop: the user told this program to stop the run.
    """

    group: GroupEnd
    end: EndTold | None
    run: Path | None
    first_step: int
    last_step: int
    was_told_to_stop: bool

    @property
    def word(self) -> EndTold | None:
        """What the run says of its end, but for a rank that the launcher told to stop because another had failed."""
        first = self.group.first_failure
        is_consequence = (
            self.end is not None
            and self.end.stopped_by == "signal"
            and not self.was_told_to_stop
            and first is not None
            and first.exit_code != PreemptedError.exit_code
        )
        return None if is_consequence else self.end

    @property
    def exit_code(self) -> int:
        """Of the documented ones; what the run told of its end counts before what became of its processes."""
        if self.word is not None:
            return self.word.exit_code
        first = self.group.first_failure
        if first is not None:
            return first.exit_code if first.exit_code in EXIT_CODES else 1
        if self.group.is_complete:
            return 0
        return PreemptedError.exit_code if self.was_told_to_stop else 1


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Whether to start again, and why or why not, in words."""

    restarts: bool
    reason: str = ""


def decide(attempt: Attempt, *, num_restarts: int, max_restarts: int) -> Decision:
    """Whether the group is started again after ``num_restarts`` restarts."""
    if attempt.exit_code == 0 or attempt.was_told_to_stop or attempt.exit_code in FINAL_CODES or not max_restarts:
        return Decision(restarts=False)
    if attempt.word is not None and attempt.word.stopped_by in ("file", "time"):
        return Decision(restarts=False)
    if not attempt.group.num_started:
        return Decision(restarts=False, reason=f"{attempt.group.launcher} started no rank: no restart")
    if num_restarts and attempt.last_step <= attempt.first_step:
        return Decision(
            restarts=False,
            reason=f"restart {num_restarts} ended where it had begun, at step {attempt.first_step}: another one would "
            "end there as well",
        )
    if num_restarts >= max_restarts:
        return Decision(restarts=False, reason=f"all {max_restarts} restarts are used up")
    return Decision(
        restarts=True,
        reason=f"restart {num_restarts + 1} of {max_restarts}, from "
        + (f"the checkpoint of step {attempt.last_step}" if attempt.last_step else "the beginning"),
    )


def explain(attempt: Attempt) -> list[str]:
    """Why a group failed, in lines: the first rank that did, its last words, and what the run told of its end."""
    if attempt.exit_code == 0:
        return []
    group, end, first = attempt.group, attempt.word, attempt.group.first_failure
    lines = []
    if first is None and end is None:
        lines += describe_launcher(group)
    if first is not None and (first.signal or first.exit_code != PreemptedError.exit_code):
        lines.append(describe(first))
        lines += [f"  [{first.rank}] {line}" for line in last_words(group.last_errors[first.rank])]
    if end is not None and end.message and not any(end.message in line for line in lines):
        lines.append(end.message)
    if group.not_ended:
        pids = ", ".join(map(str, group.not_ended))
        lines.append(f"processes {pids} could not be ended: they wait for a device or a file system")
    return lines


def describe_launcher(group: GroupEnd) -> list[str]:
    """What a launcher did that ended before its ranks."""
    code = group.launcher_code
    if code is None:
        return [f"{group.launcher} and its ranks were ended without saving"]
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    if group.num_started:
        return [f"{group.launcher} {how} before its ranks had ended"]
    return [f"{group.launcher} {how} and had started no rank; its last lines:", *group.launcher_lines]


def describe(end: RankEnd) -> str:
    """The first rank that failed, in one line."""
    how = f"was killed by {end.signal}" if end.signal else f"ended with exit code {end.exit_code}"
    return f"rank {end.rank} on {end.host} (pid {end.pid}) {how}, the first to end"


def last_words(lines: Sequence[str]) -> Sequence[str]:
    """The last lines of a rank's stderr: from ringtrain's own error on, where there is one."""
    starts = [number for number, line in enumerate(lines) if line.startswith(ERROR_MARK)]
    return lines[starts[-1] :] if starts else lines[-SHOWN_LINES:]
