"""The output of rank 0: a progress bar on a terminal, plain lines elsewhere. Other ranks print nothing."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from typing import IO, TYPE_CHECKING

from ringtrain.messages.escaping import escape, escape_message
from ringtrain.runtime.launched import find_supervisor
from ringtrain.runtime.processes import find_launcher
from ringtrain.runtime.streams import LastingFile

if TYPE_CHECKING:
    from ringtrain.terminal.progress_bar import ProgressBar


class Console:
    """The lines and the progress of a run.

    Each line is written whole, by one call: a launcher that labels its ranks' output then never puts a label inside it.
    """

    def __init__(self, stream: IO[str] | None, *, is_terminal: bool) -> None:
        """``stream`` is None if nothing is to be shown."""
        self._stream = stream
        self._progress: ProgressBar | None = None
        self.is_terminal = is_terminal

    def line(self, text: str) -> None:
        """Show one line, or a message whose other lines are indented."""
        self.block(escape_message(text))

    def block(self, text: str) -> None:
        """Show text in which nothing is left to be escaped, perhaps coloured."""
        if self._progress is not None:
            self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)
            return
        if self._stream is not None:
            self._stream.write(text + "\n")
            self._stream.flush()

    def start_progress(self, total_steps: int, first_step: int, last_saved_step: Callable[[], int] = lambda: 0) -> None:
        """Show a progress bar, if there is a terminal; it asks ``last_saved_step`` from a thread of its own."""
        if self._stream is None or not self.is_terminal:
            return
        from ringtrain.terminal.progress_bar import ProgressBar

        self._progress = ProgressBar(
            self._stream, total_steps=total_steps, first_step=first_step, last_saved_step=last_saved_step
        )
        self._progress.start()

    def loss(self, value: float) -> None:
        """Show the loss of a step in the progress bar, if there is one."""
        if self._progress is not None:
            self._progress.loss = value

    def progress(self, step: int, values: list[str]) -> None:
        """Move the progress bar, and show these values below it."""
        if self._progress is not None:
            self._progress.show(step, [escape(value) for value in values])

    def stop_progress(self) -> None:
        """Leave the progress bar as it stands."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def open_console(*, is_rank0: bool) -> Console:
    """The console of this rank."""
    if not is_rank0:
        return Console(None, is_terminal=False)
    launcher = find_supervisor() or find_launcher()
    if launcher is None:
        return Console(sys.stdout, is_terminal=sys.stdout.isatty())
    terminal = launcher_terminal(launcher)
    return Console(terminal or sys.stdout, is_terminal=terminal is not None)


def launcher_terminal(pid: int) -> IO[str] | None:
    """The terminal that the launcher writes to, opened, or None.

    A rank's own stdout says nothing: under mpirun it is a pseudo-terminal even where mpirun writes to a file. Going to
    the launcher's terminal directly also keeps labels such as ``[1,0]<stdout>`` out of the progress bar.
    """
    try:
        # Neither truncated, as the launcher may write to a file, nor taken as this process's controlling terminal.
        descriptor = os.open(f"/proc/{pid}/fd/1", os.O_WRONLY | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return None
    if os.isatty(descriptor):
        terminal = LastingFile(descriptor, "the terminal", closefd=True)  # open until the process ends
        return io.TextIOWrapper(io.BufferedWriter(terminal))
    os.close(descriptor)
    return None
