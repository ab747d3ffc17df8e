"""The progress of a run, in two lines at the bottom of a terminal."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import IO

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from ringtrain.runtime import activity
from ringtrain.runtime.activity import Phase

REFRESHES_PER_SECOND = 4
USUAL_COLUMNS = 80


class ProgressBar(Progress):
    """Steps done and time left; below them the loss of the last step, and the values of the last log.

    It asks by itself, from its own thread, which step is under way: the training thread has nothing to do with it.
    """

    def __init__(
        self, stream: IO[str], *, total_steps: int, first_step: int, last_saved_step: Callable[[], int]
    ) -> None:
        self._terminal = stream.fileno()
        self._last_saved_step = last_saved_step
        self._values: list[str] = []
        self.loss: float | None = None  # of the last step
        super().__init__(
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.percentage:>3.0f}%  ETA"),
            TimeRemainingColumn(),
            console=Console(file=stream, force_terminal=True, width=self._read_width()),
            refresh_per_second=REFRESHES_PER_SECOND,
            expand=True,
        )
        self._task = self.add_task("", total=total_steps, completed=first_step)

    def start(self) -> None:
        """Show the bar and the cursor, which stays there where a launcher kills this process."""
        super().start()
        self.console.show_cursor(True)

    def show(self, step: int, values: list[str]) -> None:
        """Show the values of a step, besides its loss; if the line is full, the last ones are left out."""
        self._values = values
        self.update(self._task, completed=step)

    def get_renderables(self) -> Iterable[RenderableType]:
        """Both lines, as wide as the terminal is now."""
        if not self.tasks:  # rich asks before it is made
            return
        self.console.width = self._read_width()
        note, _ = activity.current()
        if note.doing in (Phase.DATA, Phase.STEP):
            self.update(self._task, completed=note.step - 1)
        yield self.make_tasks_table(self.tasks)
        saved = self._last_saved_step()
        checkpoint = [f"checkpoint: step {saved:,}"] if saved and not self.finished else []
        values = [*([] if self.loss is None else [f"loss {self.loss:.4g}"]), *self._values]
        shown = [*values[:2], *checkpoint, *values[2:]]
        if note.doing in (Phase.EVALUATION_DATA, Phase.EVALUATION_STEP):
            shown.insert(0, "evaluating")
        yield Text("  ".join(shown), no_wrap=True, overflow="ellipsis")

    def _read_width(self) -> int:
        try:
            return os.get_terminal_size(self._terminal).columns or USUAL_COLUMNS  # 0 if no size was set
        except OSError:  # the terminal was closed
            return USUAL_COLUMNS
