"""The watchdog thread of each rank, which ends hung runs.

Rank 0 hears all ranks and judges; if it is missing, each rank does. Time is counted in ticks: a stopped process detects
no hang.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import os
import secrets
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ringtrain.errors import HangError, RingtrainError
from ringtrain.guard.causes import note_lost
from ringtrain.messages.ranks import name_ranks
from ringtrain.runtime import activity
from ringtrain.runtime.activity import Note, Phase, limit_seconds
from ringtrain.runtime.processes import list_threads
from ringtrain.runtime.run_record import record_end
from ringtrain.runtime.world import World
from ringtrain.watchdog.hub import Message, Star, listen
from ringtrain.watchdog.outside import Outside
from ringtrain.watchdog.stacks import find_user_frame, group_stacks, read_stacks, write_stacks
from ringtrain.watchdog.states import RankState, find_hang, find_long_wait, read_state
from ringtrain.watchdog.stragglers import Looks, RankTotals, Stragglers, describe_slow

if TYPE_CHECKING:
    from ringtrain.collectives import Collective

# Any process may send it; the rank writes its stacks, even if no thread can run.
STACKS_SIGNAL = signal.SIGRTMIN + 6
LONGEST_TICK_SECONDS = 1.0
STACKS_SECONDS = 3.0
LEAVE_SECONDS = 20.0  # for Horovod's and MPI's shutdown, which waits for other ranks
RECORD_SECONDS = 5.0  # for last records; the file system may hang
ENDING_SECONDS = 30.0
UNHEARD_SECONDS = 60.0
REFINE_SECONDS = 1.0
DEBUGGERS = ("pdb.py", "bdb.py", "pydevd.py")

Report = Callable[[RingtrainError], None]


class Watchdog:
    """Watches this rank and, once connected, all ranks. ``hang_timeout`` 0 disables it."""

    def __init__(self, world: World, hang_timeout: float, *, report: Report, warn: Callable[[str], None]) -> None:
        """The thread calls ``report`` with the reason for the end, and ``warn``."""
        self._world, self._hang_timeout = world, hang_timeout
        self._report, self._warn = report, warn
        self._write_end: Report = lambda error: None
        self._tick = min(LONGEST_TICK_SECONDS, hang_timeout / 8)
        self._nodes: Sequence[str] = [world.node] * world.size
        self._has_met = False
        self._states: dict[int, RankState] = {}  # of other ranks, from their first report until they leave
        self._unheard: set[int] = set()
        self._stacks: dict[int, str] = {}  # of other ranks, sent before they end
        self._unheard_seconds = 0.0
        self._looks, self._threads_before = Looks(), set[int]()
        self._totals: dict[int, RankTotals] = {}
        self._stragglers = Stragglers()
        self._seen: tuple[Any, ...] = ()
        self._still = 0.0
        self.refine: Callable[[Note], Note] | None = None  # the thread waits briefly for it
        self._refining: threading.Thread | None = None
        self._refined: Note | None = None
        self._where = ""
        self._has_said_wait = False
        self._star = Star(world.rank)
        self._to_do: list[Callable[[], None]] = []  # by the thread, which alone uses the star
        self._seconds_to_leave: float | None = None
        self._leave_at_once: Callable[[], None] = lambda: None
        self._is_stopped = False
        self._outside = Outside()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        """Start before the rank joins."""
        if self._hang_timeout:
            faulthandler.register(STACKS_SIGNAL, file=2, all_threads=True)
            self._outside.start(f"rank {self._world.rank} on {self._world.node}", STACKS_SIGNAL)
            activity.set_phase(Phase.JOIN, takes_long=True)
            activity.when_it_may_not_take_long(self._star.wake)
            self._thread.start()
            self._threads_before = list_threads()

    def meet(self, collective: Collective) -> None:
        """Connect the watchdogs. Collective."""
        from ringtrain.collectives import all_gather_object

        world = self._world
        if not self._hang_timeout or world.size == 1:
            return
        mine: dict[str, Any] = {"node": world.node}
        listener = None
        if world.is_rank0:
            listener, addresses = listen(world)
            mine |= {"addresses": addresses, "port": listener.getsockname()[1], "token": secrets.token_hex(16)}
        self._looks.leave_out(list_threads() - self._threads_before)
        ranks = all_gather_object(collective, mine, name="watchdog")
        first = ranks[0]

        def connect() -> None:
            self._nodes = [rank["node"] for rank in ranks]
            self._has_met = True
            self._unheard = set(range(1, world.size)) if world.is_rank0 else {0}
            if listener is not None:
                self._star.accept_from(listener, token=first["token"], size=world.size)
                return
            with contextlib.suppress(OSError):  # rank 0 reports ranks that it does not hear
                self._star.connect_to(first["addresses"], first["port"], token=first["token"])

        self._to_do.append(connect)
        self._star.wake()

    def write_by(self, *, write_end: Report, warn: Callable[[str], None] | None) -> None:
        """None: unchanged."""
        self._write_end = write_end
        self._warn = warn or self._warn

    def record_end(self, error: RingtrainError) -> None:
        """For a lost rank 0, in bounded time."""
        run_bounded(lambda: self._write_end(error), RECORD_SECONDS)

    def begin_leaving(self, exit_code: int, last_words: Callable[[], None] = lambda: None) -> None:
        """Bound the time to leave. Does not return if the watchdog has begun to end the process."""
        if not self._hang_timeout:
            return
        activity.set_phase(Phase.LEAVE)
        has_begun = threading.Event()

        def leave_at_once() -> None:
            self._outside.tell(ENDING_SECONDS, "ends")
            run_bounded(last_words, RECORD_SECONDS)
            os._exit(exit_code)

        def begin() -> None:
            self._seconds_to_leave, self._leave_at_once = LEAVE_SECONDS, leave_at_once
            has_begun.set()

        self._to_do.append(begin)
        self._star.wake()
        while self._thread.is_alive() and not has_begun.wait(1.0):
            pass

    def stop(self) -> None:
        if self._hang_timeout:
            self._is_stopped = True
            activity.when_it_may_not_take_long(None)
            self._star.wake()
            self._thread.join()
            faulthandler.unregister(STACKS_SIGNAL)
        self._outside.close()
        self._star.close()

    def _run(self) -> None:
        try:
            last = time.monotonic()
            next_look = last + self._tick
            while not self._is_stopped:
                came = self._star.receive(max(0.0, next_look - time.monotonic()))
                now = time.monotonic()
                seconds, last = min(now - last, 2 * self._tick), now
                while self._to_do:
                    self._to_do.pop(0)()
                self._count(seconds)
                for rank, message in came:
                    self._take(rank, message)
                if now >= next_look:  # biased if the training thread woke this one
                    next_look = now + self._tick
                    self._find_refined()
                    if self._world.size > 1:
                        self._looks.look()
                mine = self._my_state
                totals = RankTotals(self._looks.times, self._looks.times_runnable, *activity.step_times())
                self._totals[self._world.rank] = totals
                self._star.send({**mine.to_message(), "totals": totals})
                self._outside.tell(mine.max_silence, mine.note.words_of_one)
                self._judge(seconds)
            self._star.send({"bye": True})
        except Exception:  # a defect of the watchdog must not end the run
            failed = f"the watchdog of rank {self._world.rank} has failed:"
            with contextlib.suppress(Exception):
                self._warn("\n  ".join([failed, *traceback.format_exc().rstrip().split("\n")]))
            self._outside.close()
            with contextlib.suppress(Exception):
                self._star.send({"bye": True})

    def _count(self, seconds: float) -> None:
        self._states = {rank: state.later(seconds) for rank, state in self._states.items()}
        seen = activity.current()
        is_same = len(self._seen) == len(seen) and all(a is b for a, b in zip(seen, self._seen, strict=True))
        self._seen = seen
        self._still = self._still + seconds if is_same else 0.0
        if self._still >= self._my_state.limit / 2 and is_debugged():
            self._still = 0.0
        if not self._still:
            self._where, self._refined = "", None

    def _find_refined(self) -> None:
        if self._still < self._hang_timeout / 2:
            return
        self._where = find_user_frame()
        if self.refine is not None and not (self._refining and self._refining.is_alive()):
            refine, found = self.refine, list[Note]()
            self._refining = start_bounded(lambda: found.append(refine(activity.current()[0])))
            self._refining.join(REFINE_SECONDS)
            self._refined = found[0] if found else None

    @property
    def _my_state(self) -> RankState:
        note = self._refined or activity.current()[0]
        return RankState(
            note=note,
            still=round(self._still, 3),
            limit=limit_seconds(self._hang_timeout, takes_long=note.takes_long),
            max_silence=limit_seconds(self._hang_timeout, takes_long=note.takes_long and note.may_hold_lock),
            where=self._where,
        )

    def _take(self, rank: int, message: Message | None) -> None:
        """Handle a message; None: the rank is lost without notice."""
        if message is None:
            note_lost(name_ranks([rank], self._nodes))
            if rank in self._states:
                self._states[rank] = dataclasses.replace(self._states[rank], is_gone=True)
        elif "bye" in message:
            self._states.pop(rank, None)
        elif "hang" in message:
            self._end(str(message["hang"]), judges=False)
        else:
            with contextlib.suppress(KeyError, TypeError, ValueError):
                self._states[rank] = read_state(message)
                self._totals[rank] = RankTotals(*map(float, message["totals"]))
                self._unheard.discard(rank)

    def _judge(self, seconds: float) -> None:
        if self._seconds_to_leave is not None:
            self._seconds_to_leave -= seconds
            if self._seconds_to_leave <= 0:
                self._leave_at_once()
            return
        states = dict(sorted({**self._states, self._world.rank: self._my_state}.items()))
        is_alone = 0 in self._unheard  # rank 0 is unreachable, or has sent nothing yet
        if is_alone:
            limit = limit_seconds(self._hang_timeout, takes_long=True)
            states = {self._world.rank: dataclasses.replace(self._my_state, limit=limit)}
        hang = find_hang(states, self._nodes, sees_all=self._world.is_rank0 or not self._has_met or is_alone)
        if hang is not None:
            unheard = (
                f"; nothing was heard of {name_ranks(sorted(self._unheard), self._nodes)}." if self._unheard else "."
            )
            self._end(hang.removesuffix(".") + unheard, judges=True)
        if self._world.is_rank0:
            wait = find_long_wait(states, self._nodes, self._hang_timeout)
            if wait is not None and not self._has_said_wait:
                self._print_line(wait)
            self._has_said_wait = wait is not None
        if self._world.is_rank0 and self._states:
            self._look_for_stragglers()
        if self._unheard and self._world.is_rank0:
            before, self._unheard_seconds = self._unheard_seconds, self._unheard_seconds + seconds
            if before < UNHEARD_SECONDS <= self._unheard_seconds:
                who = name_ranks(sorted(self._unheard), self._nodes)
                self._print_line(
                    f"the watchdog hears nothing of {who}; a hang is found without them, but not as well named."
                )

    def _look_for_stragglers(self) -> None:
        notes = [activity.current()[0], *(state.note for state in self._states.values())]
        ranks = [self._world.rank, *self._states] if all(note.step for note in notes) else []
        totals = {rank: self._totals[rank] for rank in ranks if rank in self._totals}
        for rank, why in self._stragglers.compare(totals).items():
            self._print_line(describe_slow(rank, why, self._nodes))

    def _print_line(self, warning: str) -> None:
        """Print in a thread: the output may hang."""
        start_bounded(lambda: self._warn(warning))

    def _end(self, hang: str, *, judges: bool) -> None:
        """End this process and, as the judge, all ranks. Does not return."""
        is_rank0 = self._world.is_rank0
        error = HangError(
            f"{hang} Each rank that could has written its stacks to its error stream. If something may take so long, "
            f"raise --hang_timeout ({self._hang_timeout:g} s).",
            reach="run" if is_rank0 else "rank",
        )
        self._outside.tell(ENDING_SECONDS, "ends")
        # Rank 0 first waits for all stacks.
        if judges and is_rank0:
            told = {"event": "end", "status": error.status(), "exit_code": error.exit_code, "message": str(error)}
            start_bounded(lambda: record_end(told))
        record = start_bounded(lambda: self._write_end(error)) if judges and not is_rank0 else None
        if is_rank0 or judges:
            self._star.send({"hang": hang})
        else:
            self._star.send({"stacks": read_stacks()})
        if judges or not is_rank0:  # else only this rank was missing, and the others have left
            run_bounded(lambda: write_stacks(self._world), STACKS_SECONDS)
        if is_rank0:
            self._wait_for(set(self._star.peers), STACKS_SECONDS)  # the launcher ends them after this process
            error.stacks = group_stacks({**self._stacks, self._world.rank: read_stacks()})
            record = start_bounded(lambda: self._write_end(error)) if judges else None
        elif judges:
            self._wait_for({0}, 2 * self._tick)  # others that judge need time for their stacks
        else:
            self._star.send({"hang": hang})
            self._wait_for({0}, STACKS_SECONDS + RECORD_SECONDS)
        if record is not None:
            record.join(RECORD_SECONDS)
        # If all ranks judge, one report per node suffices.
        if judges and (is_rank0 or self._world.rank == 1 or self._world.local_rank == 0):
            run_bounded(lambda: self._report(error), RECORD_SECONDS)
        elif judges:  # the launcher then ends the others, maybe before they judge
            time.sleep(STACKS_SECONDS)
        os._exit(HangError.exit_code)

    def _wait_for(self, ranks: set[int], seconds: float) -> None:
        end = time.monotonic() + seconds
        waited = {rank for rank in ranks if rank in self._states and not self._states[rank].is_missing}
        if not self._world.is_rank0:
            waited = set(ranks)
        while waited and time.monotonic() < end:
            for rank, message in self._star.receive(min(0.1, seconds)):
                if message is not None and "stacks" in message:
                    self._stacks[rank] = str(message["stacks"])
                if message is None or (self._world.is_rank0 and "hang" in message):
                    waited.discard(rank)


def is_debugged() -> bool:
    innermost = sys._current_frames().get(threading.main_thread().ident or 0)
    frames = traceback.walk_stack(innermost) if innermost else ()
    return any(os.path.basename(frame.f_code.co_filename) in DEBUGGERS for frame, _ in frames)


def start_bounded(action: Callable[[], None]) -> threading.Thread:
    """Run it in a thread that may hang."""

    def act() -> None:
        with contextlib.suppress(Exception):
            action()

    thread = threading.Thread(target=act, name="last words", daemon=True)
    thread.start()
    return thread


def run_bounded(action: Callable[[], None], seconds: float) -> None:
    start_bounded(action).join(seconds)
