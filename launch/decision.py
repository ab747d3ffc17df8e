"""Restart decisions and failure messages: pure functions."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ringtrain.errors import EXIT_CODES, HangError, PreemptedError
from ringtrain.guard.causes import LostRanksError
from ringtrain.runtime.run_record import EndRecord

from .family import name_signal
from .group import GroupEnd, RankEnd

ERROR_MARK = "ringtrain: "
SHOWN_LINES = 5
LOST_RANKS = LostRanksError.status()
# The run is complete, or would fail again after a restart.
FINAL_CODES = {0, 2, 3, 4, 5}


@dataclass(frozen=True, kw_only=True)
class Attempt:
    group: GroupEnd
    end: EndRecord | None
    run: Path | None
    first_step: int  # of the latest checkpoint before the start
    last_step: int  # after the start
    signals: Sequence[signal.Signals] = ()  # from the user
    is_cut_short: bool = False  # second Ctrl-C: no wait for a save

    @property
    def was_told_to_stop(self) -> bool:
        return bool(self.signals) or self.is_cut_short

    @property
    def was_stopped_early(self) -> bool:
        """True if a signal ended the ranks before they handled it."""
        first = self.group.first_failure
        is_signal = first is not None and first.signal in [number.name for number in self.signals]
        nothing_started = not self.group.num_started and bool(self.signals)
        return self.end is None and not self.is_cut_short and (is_signal or nothing_started)

    @property
    def word(self) -> EndRecord | None:
        """The run's end record, except if another rank's failure caused the stop."""
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
        if self.word is not None:
            return self.word.exit_code
        if self.was_stopped_early:
            return PreemptedError.exit_code
        first = self.group.first_failure
        if first is not None:
            return first.exit_code if first.exit_code in EXIT_CODES else 1
        return 0 if self.group.is_complete else 1


def decide(attempt: Attempt, *, num_restarts: int, max_restarts: int) -> tuple[bool, str]:
    """Return whether the run is started again, and why or why not; empty if obvious."""
    stopped_by = attempt.word.stopped_by if attempt.word else None
    if (
        attempt.exit_code in FINAL_CODES
        or attempt.was_told_to_stop
        or stopped_by in ("file", "time")
        or not max_restarts
    ):
        return False, ""
    if not attempt.group.num_started:
        return False, f"{attempt.group.launcher} started no rank: no restart"
    if num_restarts and attempt.last_step <= attempt.first_step:
        return False, (
            f"restart {num_restarts} saved no checkpoint after that of step {attempt.first_step}: another one "
            "would end so as well. A smaller --checkpoint_every saves more often"
        )
    if num_restarts >= max_restarts:
        return False, f"all {max_restarts} restarts are used up"
    place = f"the checkpoint of step {attempt.last_step}" if attempt.last_step else "the beginning"
    return True, f"restart {num_restarts + 1} of {max_restarts}, from {place}"


def explain(attempt: Attempt) -> list[str]:
    if attempt.exit_code == 0:
        return []
    group, end, first = attempt.group, attempt.word, attempt.group.first_failure
    lines = []
    if attempt.was_stopped_early:
        return ["stopped before the first step; there was nothing to save"]
    if first is None and end is None:
        lines += describe_launcher(group)
    # The watchdog stops all ranks with HangError's code: the first to exit is not the cause.
    was_asked_to_end = first is not None and first.exit_code in (PreemptedError.exit_code, HangError.exit_code)
    if first is not None and (first.signal or not was_asked_to_end or end is None):
        lines += describe(first)
        lines += [f"  [{first.rank}] {line}" for line in last_words(group.last_errors[first.rank])]
    is_consequence = first is not None and end is not None and end.status == LOST_RANKS
    message = (end.message or "").splitlines() if end is not None and not is_consequence else []
    if message and not any(message[0] in line for line in lines):
        lines += message[:SHOWN_LINES]
    if group.not_ended:
        pids = ", ".join(map(str, group.not_ended))
        lines.append(f"processes {pids} could not be ended: they wait for a device or a file system")
    return lines


def describe_launcher(group: GroupEnd) -> list[str]:
    code = group.launcher_code
    if code is None:
        return [f"{group.launcher} and its ranks were ended without saving"]
    how = f"was killed by {name_signal(-code)}" if code < 0 else f"ended with exit code {code}"
    what = "before its ranks had ended" if group.num_started else "and had started no rank"
    words = ["its last lines:", *group.launcher_lines] if group.launcher_lines else []
    return [f"{group.launcher} {how} {what}", *words]


def describe(end: RankEnd) -> list[str]:
    how = f"was killed by {end.signal}" if end.signal else f"ended with exit code {end.exit_code}"
    how += " in mid-run, such as by sys.exit or os._exit in its code" if end.has_quit else ""
    memory = (
        f"the kernel killed a process there for want of memory ({end.memory_limit}). What helps: a smaller "
        "--batch_size, fewer ranks on a node, or more memory for the job"
    )
    who = f"rank {end.rank} on {end.host} (pid {end.pid}) {how}, the first to end"
    return [who, memory] if end.memory_limit else [who]


def last_words(lines: Sequence[str]) -> Sequence[str]:
    starts = [number for number, line in enumerate(lines) if line.startswith(ERROR_MARK)]
    return lines[starts[-1] :] if starts else lines[-SHOWN_LINES:]
