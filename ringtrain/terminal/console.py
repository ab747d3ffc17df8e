"""Output of rank 0: progress bar on a terminal, else plain lines. Other ranks print nothing."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from typing import IO, TYPE_CHECKING

from ringtrain.messages.escaping import escape, escape_message
from ringtrain.runtime.processes import find_launcher
from ringtrain.runtime.run_record import find_supervisor
from ringtrain.runtime.stdio import FaultTolerantStream

if TYPE_CHECKING:
    from ringtrain.terminal.progress_bar import ProgressBar


class Console:
    """A line is one write, so that launchers do not put labels inside."""

    def __init__(self, stream: IO[str] | None, *, is_terminal: bool) -> None:
        """``stream`` None: print nothing."""
        self._stream = stream
        self._progress: ProgressBar | None = None
        self.is_terminal = is_terminal

    def line(self, text: str) -> None:
        """Further lines of a message are indented."""
        self.block(escape_message(text))

    def block(self, text: str) -> None:
        progress = self._progress  # another thread's message may meet its end
        if progress is not None:
            progress.console.print(text, markup=False, highlight=False, soft_wrap=True)
            return
        if self._stream is not None:
            self._stream.write(text + "\n")
            self._stream.flush()

    def start_progress(
        self, total_steps: int | None, first_step: int, last_saved_step: Callable[[], int] = lambda: 0
    ) -> None:
        """``last_saved_step`` is called from another thread."""
        if self._stream is None or not self.is_terminal:
            return
        from ringtrain.terminal.progress_bar import ProgressBar

        self._progress = ProgressBar(
            self._stream, total_steps=total_steps, first_step=first_step, last_saved_step=last_saved_step
        )
        self._progress.start()

    def loss(self, value: float) -> None:
        if self._progress is not None:
            self._progress.loss = value

    def progress(self, step: int, values: list[str]) -> None:
        if self._progress is not None:
            self._progress.show(step, [escape(value) for value in values])

    def stop_progress(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def open_console(*, is_rank0: bool) -> Console:
    if not is_rank0:
        return Console(None, is_terminal=False)
    launcher = find_supervisor() or find_launcher()
    if launcher is None:
        return Console(sys.stdout, is_terminal=sys.stdout.isatty())
    terminal = launcher_terminal(launcher)
    return Console(terminal or sys.stdout, is_terminal=terminal is not None)


def launcher_terminal(pid: int) -> IO[str] | None:
    """Open the launcher's terminal, if any.

    A rank's stdout is a pseudo-terminal under mpirun even if mpirun writes to a file; labels such as ``[1,0]<stdout>``
    are avoided too.
    """
    try:
        # Do not truncate a file, nor take a controlling terminal.
        descriptor = os.open(f"/proc/{pid}/fd/1", os.O_WRONLY | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return None
    if os.isatty(descriptor):
        terminal = FaultTolerantStream(descriptor, "the terminal", closefd=True)  # until exit
        return io.TextIOWrapper(io.BufferedWriter(terminal))
    os.close(descriptor)
    return None
