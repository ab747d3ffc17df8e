"""What rank 0 shows, and to whom."""

import fcntl
import io
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import IO

import pytest

from ringtrain.runtime import activity
from ringtrain.runtime.activity import Phase
from ringtrain.runtime.processes import LAUNCHERS, find_launcher
from ringtrain.terminal import console
from ringtrain.terminal.console import Console, launcher_terminal, open_console


class CountingStream(io.StringIO):
    def __init__(self) -> None:
        super().__init__()
        self.writes: list[str] = []

    def write(self, text: str) -> int:
        self.writes.append(text)
        return super().write(text)


def test_a_line_is_written_by_one_call() -> None:
    stream = CountingStream()
    shown = Console(stream, is_terminal=False)
    shown.start_progress(10, 0)
    shown.line("step 1, loss = 2 [b]")
    shown.progress(1, ["nothing of this"])
    shown.stop_progress()
    assert stream.writes == ["step 1, loss = 2 [b]\n"]


def test_other_ranks_show_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    shown = open_console(is_rank0=False)
    shown.start_progress(10, 0)
    shown.line("x")
    shown.progress(1, ["x"])
    shown.stop_progress()
    output = capfd.readouterr()
    assert (output.out, output.err) == ("", "")


def test_without_a_launcher_stdout_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "find_launcher", lambda: None)
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    assert not open_console(is_rank0=True).is_terminal


SHOW_CURSOR = b"\x1b[?25h"
FIND = """import sys
sys.path.insert(0, {root!r})
from ringtrain.runtime.processes import find_launcher
print(find_launcher())
"""

CALL = """#!{python}
import os, subprocess
print(os.getpid(), flush=True)
subprocess.run({command!r})
"""


@pytest.mark.parametrize("name", ["mpirun", "horovodrun", "mpiexec.hydra", "mympirun", "python"])
def test_the_outermost_launcher_is_found_by_its_name(tmp_path: Path, name: str) -> None:
    root = str(Path(console.__file__).parents[1])
    # the launcher, and within it what looks like a second one: horovodrun starts mpirun
    outer, inner = tmp_path / name, tmp_path / "inner" / name
    inner.parent.mkdir()
    inner.write_text(CALL.format(python=sys.executable, command=[sys.executable, "-c", FIND.format(root=root)]))
    outer.write_text(CALL.format(python=sys.executable, command=[str(inner)]))
    for path in (outer, inner):
        path.chmod(0o755)
    finished = subprocess.run([outer], capture_output=True, text=True, check=True)
    pid, _, found = finished.stdout.split()
    expected = pid if name in LAUNCHERS else "None"
    assert found == expected or (expected == "None" and found == str(find_launcher()))


def test_the_launcher_s_terminal_is_that_of_its_stdout() -> None:
    outside, inside = pty.openpty()
    process = subprocess.Popen(["sleep", "60"], stdout=inside)
    try:
        terminal = launcher_terminal(process.pid)
        assert terminal is not None
        terminal.write("hello\n")
        terminal.close()
        assert os.read(outside, 100) == b"hello\r\n"
    finally:
        process.kill()
        process.wait()
        os.close(outside)
        os.close(inside)


def test_a_launcher_that_writes_to_a_file_has_no_terminal(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log:
        print("what the script said before", file=log, flush=True)
        process = subprocess.Popen(["sleep", "60"], stdout=log)
        try:
            assert launcher_terminal(process.pid) is None
        finally:
            process.kill()
            process.wait()
    assert (tmp_path / "log").read_text() == "what the script said before\n"


def test_a_launcher_that_is_gone_has_no_terminal() -> None:
    assert launcher_terminal(2**22 + 1) is None


def read_until(descriptor: int, text: bytes) -> bytes:
    """What a terminal is sent, up to this text; without it where it does not come in ten seconds."""
    output, end = b"", time.monotonic() + 10
    while text not in output and time.monotonic() < end and select.select([descriptor], [], [], 10)[0]:
        output += os.read(descriptor, 4096)
    return output


def test_a_terminal_shows_a_progress_bar_below_the_lines() -> None:
    outside, inside = pty.openpty()
    fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
    stream: IO[str] = os.fdopen(inside, "w")
    shown = Console(stream, is_terminal=True)
    activity.set_phase(Phase.OPEN)  # else the bar shows the step that a test before has left
    shown.start_progress(10, 0, lambda: 4)
    assert SHOW_CURSOR in read_until(outside, SHOW_CURSOR), "it is gone for good where the process is killed"
    shown.loss(1.0)
    shown.progress(5, ["999 examples/s", "accuracy 0.5", *["more"] * 20])
    shown.line("eval loss = 2")
    shown.stop_progress()
    shown.line("done")
    stream.close()
    text = b""
    try:
        while data := os.read(outside, 4096):
            text += data
    except OSError:  # the other end is closed
        pass
    os.close(outside)
    output = text.decode()
    plain = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", output)
    assert "loss 1  999 examples/s  checkpoint: step 4  accuracy 0.5  more" in plain
    assert "5/10" in plain
    assert max(map(len, re.split(r"[\r\n]+", plain))) <= 80
    assert "eval loss = 2" in output
    assert output.rstrip().endswith("done")
