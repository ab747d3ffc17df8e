"""Current phase of this process: set by the training thread, read by ``ringtrain.watchdog.thread``.

Global, since a process runs one training; setting it costs about a microsecond. A new note object is progress.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

# For joining up to the end of the first step, compilation, and reads or writes of everything.
LONG_SECONDS = 600.0


class Phase(enum.Enum):
    """Words after "ranks 0, 1", and the point at which a rank waits for others (None: they wait for it)."""

    JOIN = ("wait for the other ranks to join", "")
    MEET = ("wait for the other ranks", "")
    OPEN = ("open the run directory", None)
    PREPARE = ("prepare the data", None)
    COMPILE = ("create the model and compile its step", None)
    RESTORE = ("set the first weights", None)
    DATA = ("wait for data of step {step}", None)
    STEP = ("are in step {step}", "in step {step}")
    GRADIENTS = ("wait for data or gradients of step {step}", None)  # of a step that reads its own data
    CALLBACKS = ("run the callbacks after step {step}", None)
    EVALUATION_DATA = ("wait for data of batch {step} of the evaluation", None)
    EVALUATION_STEP = ("are in batch {step} of the evaluation", "in batch {step} of the evaluation")
    CHECK = ("compare the weights of step {step}", None)
    LOG = ("write the log of step {step}", None)
    SAVE = ("save step {step}", None)
    LEAVE = ("exit", "at the end")


class Note(NamedTuple):
    doing: Phase
    step: int = 0  # from 1, also for batches of an evaluation; else 0
    takes_long: bool = False  # may take ten minutes, such as compilation

    @property
    def words(self) -> str:
        """Words after "ranks 0, 1"."""
        return self.doing.value[0].format(step=self.step)

    @property
    def words_of_one(self) -> str:
        """Words after "rank 0"."""
        verb, _, rest = self.words.partition(" ")
        return f"{'is' if verb == 'are' else f'{verb}s'} {rest}"

    @property
    def may_hold_lock(self) -> bool:
        """The GIL, for example by unpickling."""
        return self.doing in (Phase.JOIN, Phase.PREPARE, Phase.COMPILE)

    @property
    def place(self) -> str | None:
        place = self.doing.value[1]
        return place and place.format(step=self.step)


_note = Note(Phase.JOIN, takes_long=True)
_moves = itertools.count(1)
_last_move = 0
_tell_at_once: Callable[[], None] | None = None
_find_phase: Callable[[], tuple[Phase, int]] | None = None
_step_times = (0.0, 0.0)
_phase_lock = threading.Lock()


def set_phase(doing: Phase, step: int = 0, *, takes_long: bool = False) -> None:
    """Set the phase; a repeated call is progress."""
    global _note
    was_long, _note = _note.takes_long, Note(doing, step, takes_long)
    if was_long and not takes_long and _tell_at_once is not None:
        _tell_at_once()


def when_it_may_not_take_long(tell_at_once: Callable[[], None] | None) -> None:
    """Set a callback for the end of a long phase: other ranks would apply its limit to a rank stopped meanwhile."""
    global _tell_at_once
    _tell_at_once = tell_at_once


def move() -> None:
    """Record progress from any thread."""
    global _last_move
    _last_move = next(_moves)


def set_step_times(steps_sec: float, own_sec: float) -> None:
    """Set the seconds of all steps so far, and those without waits for other ranks; 0: not timed."""
    global _step_times
    _step_times = (steps_sec, own_sec)


def step_times() -> tuple[float, float]:
    return _step_times


def current() -> tuple[Note, int]:
    """Return identical objects while there was no progress."""
    global _note
    with _phase_lock:
        if _find_phase is not None and (now := _find_phase()) != (_note.doing, _note.step):
            _note = Note(*now, takes_long=_note.takes_long and now[1] == _note.step)
    return _note, _last_move


@contextlib.contextmanager
def phase_from(find_phase: Callable[[], tuple[Phase, int]]) -> Iterator[None]:
    """Ask for the phase during a call that trains many steps; any thread asks."""
    global _find_phase
    _find_phase = find_phase
    try:
        yield
    finally:
        try:
            current()  # the phase in which the call failed, if it did
        finally:
            with _phase_lock:
                _find_phase = None


@contextlib.contextmanager
def meeting() -> Iterator[None]:
    global _note
    before = _note
    set_phase(Phase.MEET, before.step, takes_long=before.takes_long)
    try:
        yield
    finally:
        _note = before
        move()


def limit_seconds(hang_timeout: float, *, takes_long: bool) -> float:
    return max(hang_timeout, LONG_SECONDS) if takes_long else hang_timeout
