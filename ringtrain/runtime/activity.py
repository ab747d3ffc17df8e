"""The current phase of this process: set by the thread that runs it, read by ``ringtrain.watchdog.thread``.

One training goes on in a process, and what it is doing is a fact about the process, like a line of a log: it is noted
where it happens, without an object that would have to be handed to every function on the way. A note is an assignment
and costs about a microsecond. Whoever reads it tells by the note's identity whether anything has moved meanwhile.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

# From joining to the end of the first step, and wherever else something is compiled, read or written as a whole.
LONG_SECONDS = 600.0


class Phase(enum.Enum):
    """The phases of a rank: words that follow "ranks 0, 1", and the place where it waits for the others.

    A rank whose place is None is busy with something of its own, for which the others wait.
    """

    JOIN = ("wait for the other ranks to join", "")
    MEET = ("wait for the other ranks", "")
    OPEN = ("open the run directory", None)
    PREPARE = ("prepare the data", None)
    COMPILE = ("create the model and compile its step", None)
    RESTORE = ("set the first weights", None)
    DATA = ("wait for data of step {step}", None)
    STEP = ("are in step {step}", "in step {step}")
    GRADIENTS = ("wait for data or gradients of step {step}", None)  # of a step that reads its data itself
    CALLBACKS = ("run the callbacks after step {step}", None)
    EVALUATION_DATA = ("wait for data of batch {step} of the evaluation", None)
    EVALUATION_STEP = ("are in batch {step} of the evaluation", "in batch {step} of the evaluation")
    CHECK = ("compare the weights of step {step}", None)
    LOG = ("write the log of step {step}", None)
    SAVE = ("save step {step}", None)
    LEAVE = ("take leave", "at the end")


class Note(NamedTuple):
    """The current phase of a process."""

    doing: Phase
    step: int = 0  # from 1, or a batch of an evaluation; 0 outside of both
    takes_long: bool = False  # it may well take ten minutes, such as what compiles

    @property
    def words(self) -> str:
        """The phase in words, after "ranks 0, 1"."""
        return self.doing.value[0].format(step=self.step)

    @property
    def words_of_one(self) -> str:
        """The phase in words, after "rank 0"."""
        verb, _, rest = self.words.partition(" ")
        return f"{'is' if verb == 'are' else f'{verb}s'} {rest}"

    @property
    def may_hold_lock(self) -> bool:
        """True if a single call may hold Python's lock for long, as unpickling does, so that no thread can run."""
        return self.doing in (Phase.JOIN, Phase.PREPARE, Phase.COMPILE)

    @property
    def place(self) -> str | None:
        """The place at which the other ranks are awaited; None if they wait for this one."""
        place = self.doing.value[1]
        return place and place.format(step=self.step)


_note = Note(Phase.JOIN, takes_long=True)
_moves = itertools.count(1)
_last_move = 0
_tell_at_once: Callable[[], None] | None = None


def note(doing: Phase, step: int = 0, *, takes_long: bool = False) -> None:
    """From now on the training thread does this; called again with the same, it does the next piece of it."""
    global _note
    was_long, _note = _note.takes_long, Note(doing, step, takes_long)
    if was_long and not takes_long and _tell_at_once is not None:
        _tell_at_once()


def when_it_may_not_take_long(tell_at_once: Callable[[], None] | None) -> None:
    """Have this called, by the thread that notes, whenever what takes long is followed by what does not.

    The others hear of a note with the watchdog's next word. Were this one left to wait, a rank that is stopped
    meanwhile would be waited for as if it were still at what takes long.
    """
    global _tell_at_once
    _tell_at_once = tell_at_once


def move() -> None:
    """Record progress outside the training thread; any thread may call it."""
    global _last_move
    _last_move = next(_moves)


def current() -> tuple[Note, int]:
    """The last note, and a number that each ``move`` changes. Nothing has moved while both are the same objects."""
    return _note, _last_move


@contextlib.contextmanager
def meeting() -> Iterator[None]:
    """Within it the training thread waits for the other ranks."""
    global _note
    before = _note
    note(Phase.MEET, before.step, takes_long=before.takes_long)
    try:
        yield
    finally:
        _note = before
        move()


def limit_seconds(hang_timeout: float, *, takes_long: bool) -> float:
    """For how long something may not move."""
    return max(hang_timeout, LONG_SECONDS) if takes_long else hang_timeout
