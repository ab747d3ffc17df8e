"""Checkpoints of a rank's input pipeline."""

from __future__ import annotations

import collections

from ringtrain.data.sources import Feed

MAX_STATE_BYTES = 4 * 2**20  # of all ranks; large shuffle buffers are refilled instead
EVERY_STEPS = 50
MOST_READ_AHEAD = 16  # by a pipeline that tunes itself; rarely more
NUM_KEPT = 3  # pipelines run a few batches ahead of training
IteratorState = tuple[int, bytes]  # step, and the pipeline's state before it
NO_STATE: IteratorState = (0, b"")


class IteratorStates:
    def __init__(self, feed: Feed, steps_per_pass: int, begin: IteratorState, *, rank: int, size: int) -> None:
        """``begin``: a state from a checkpoint, or NO_STATE."""
        self._read_state, self._steps_per_pass = feed.read_state, steps_per_pass
        self._limit = MAX_STATE_BYTES // (1 if feed.is_shared else size)
        self._is_off = feed.is_shared and rank != 0  # rank 0's state serves all ranks
        self._states = collections.deque([begin] if begin[1] and not self._is_off else [], NUM_KEPT)

    @property
    def are_kept(self) -> bool:
        """The same answer on all ranks."""
        return self._read_state is not None

    def note(self, step: int) -> None:
        """Save the state if due, before a step's batch is read."""
        # A shuffle that has read to its end, ahead of the steps, saves no seeds for the next passes (see _OneDataset).
        is_near_first_end = 0 <= self._steps_per_pass - step <= MOST_READ_AHEAD
        is_due = step % self._steps_per_pass == 0 or (step % EVERY_STEPS == 0 and not is_near_first_end)
        if self._read_state is None or self._is_off or not is_due:
            return
        state = self._read_state()
        if len(state) > self._limit:  # reading it would cost as much as producing many samples
            self._is_off = True
            self._states.clear()
        elif state:
            self._states.append((step, state))

    def before(self, step: int) -> IteratorState:
        return next((kept for kept in reversed(list(self._states)) if kept[0] <= step), NO_STATE)
