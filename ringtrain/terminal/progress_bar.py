"""Progress bar in the last two lines of a terminal."""

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
    """Steps and time left; below, the latest loss and logged values. Its own thread reads the current step."""

    def __init__(
        self, stream: IO[str], *, total_steps: int | None, first_step: int, last_saved_step: Callable[[], int]
    ) -> None:
        self._terminal = stream.fileno()
        self._last_saved_step = last_saved_step
        self._values: list[str] = []
        self.loss: float | None = None
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
        """Keep the cursor visible, in case the process is killed."""
        super().start()
        self.console.show_cursor(True)

    def show(self, step: int, values: list[str]) -> None:
        """If the line is full, the last values are omitted."""
        self._values = values
        self.update(self._task, completed=step)

    def get_renderables(self) -> Iterable[RenderableType]:
        if not self.tasks:  # rich calls this during construction
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
        except OSError:  # closed terminal
            return USUAL_COLUMNS
