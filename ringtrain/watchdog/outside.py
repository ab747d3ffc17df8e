"""A process that watches its parent, a rank: ``main``.

If a call holds the GIL, the watchdog thread cannot run. So it reports by a pipe how long it may be silent.
``faulthandler.dump_traceback_later(exit=True)`` would also end a rank that a debugger or Slurm had stopped: this
process counts ticks, except while its parent is stopped.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import threading

from ringtrain.errors import HangError
from ringtrain.runtime.processes import read_process, start_aside
from ringtrain.runtime.run_record import record_end

# Of the permitted silence; at 1 the others leave, and the launcher ends this rank.
STACKS_FACTOR, KILL_FACTOR = 0.9, 1.5
CLOSE_SECONDS, RECORD_SECONDS = 2.0, 5.0


class Outside:
    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe = -1

    def start(self, name: str, stacks_signal: int) -> None:
        """``stacks_signal`` must make this rank write its stacks."""
        # Otherwise only other ranks detect that threads cannot run.
        with contextlib.suppress(OSError):
            arguments = [name, str(int(stacks_signal))]
            self._process = start_aside(__name__, *arguments, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
            self._pipe = self._process.stdin.fileno()  # type: ignore[union-attr]
            os.set_blocking(self._pipe, False)

    def tell(self, limit: float, doing: str) -> None:
        """``limit`` of silence, in seconds."""
        with contextlib.suppress(OSError):
            os.write(self._pipe, f"{limit} {doing}\n".encode())

    def close(self) -> None:
        if self._process is not None:
            self._pipe = -1
            with contextlib.suppress(OSError):
                self._process.stdin.close()  # type: ignore[union-attr]
            try:
                self._process.wait(CLOSE_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def main(name: str, stacks_signal: str) -> None:
    """Watch until the parent ends or closes the pipe."""
    parent = os.getppid()
    silent, limit, doing = 0.0, float("inf"), ""
    while os.getppid() == parent:
        tick = min(1.0, limit / 8)
        ready, _, _ = select.select([0], [], [], tick)
        if ready:
            data = os.read(0, 65536)
            if not data:
                return
            silent = 0.0
            limit_text, _, doing = data.decode(errors="replace").splitlines()[-1].partition(" ")
            limit = float(limit_text)
            continue
        process = read_process(parent)
        if process and process.state in "Tt":  # stopped by a signal or a debugger
            continue
        before, silent = silent, silent + tick
        if before < STACKS_FACTOR * limit <= silent:
            print_line(f"ringtrain: {name} {doing}; no other thread of it has run for {silent:.0f} s. Its threads:\n")
            send(parent, int(stacks_signal))
        if silent >= KILL_FACTOR * limit:
            message = (
                f"{name} {doing}; no other thread of it has run for {silent:.0f} s: a call holds Python's lock, or the "
                "process cannot run at all. It was killed."
            )
            print_line(f"ringtrain: error: {message}\n")
            record = {"event": "end", "status": "hang", "exit_code": HangError.exit_code, "message": message}
            recorder = threading.Thread(target=record_end, args=[record], daemon=True)
            recorder.start()
            recorder.join(RECORD_SECONDS)  # its file system may hang, too
            send(parent, signal.SIGKILL)
            return


def send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def print_line(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, text.encode())
