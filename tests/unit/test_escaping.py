"""Text of others reaches the terminal and the log as text: it forges no line of ours, and moves no cursor."""

import contextlib
import io
import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.lines import print_line
from ringtrain.cli import main
from ringtrain.errors import DataError
from ringtrain.messages.escaping import escape, escape_block, escape_message
from ringtrain.runtime.world import read_world
from ringtrain.terminal.console import Console
from ringtrain.training.ending import report_error

FORGED = "a\nringtrain: error: all is lost\x1b[2J\x9b31m\r\u202e\x07"
ESCAPED = r"a\nringtrain: error: all is lost\x1b[2J\x9b31m\r\u202e\x07"


def is_safe(text: str) -> bool:
    return all(character >= " " and not "\x7f" <= character <= "\x9f" for character in text)


@given(st.text())
def test_of_any_text_comes_one_line_that_any_stream_takes(text: str) -> None:
    assert is_safe(escape(text).replace("\t", ""))
    assert len(escape(text).splitlines()) <= 1
    escape(text).encode()
    for line in escape_message(text).split("\n")[1:]:
        assert line.startswith("  ")
    for line in escape_block(text).split("\n"):
        assert is_safe(line.replace("\t", ""))
        assert not line.startswith(("ringtrain: ", "launch: "))


def test_harmless_text_is_unchanged() -> None:
    for text in ("", "größer: 5 µs, 模型\tC:\\new", "a 'quoted' \"text\""):
        assert (escape(text), escape_message(text), escape_block(text)) == (text, text, text)
    assert escape_message("two:\n  lines") == "two:\n  lines"
    assert escape_block("a\n\x1b[1mbold\x1b[0m\n") == "a\nbold\n"


def test_forged_text_in_an_error_is_escaped(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RINGTRAIN_LAUNCH_DIR", str(tmp_path))
    report_error(DataError(f"the images\n  {FORGED} differ.", reach="run"), read_world({}))
    assert capsys.readouterr().err == f"ringtrain: error: the images\n  {ESCAPED} differ.\n"
    assert "\x1b" not in (tmp_path / "end.json").read_text()


def test_an_exception_of_user_code_cannot_forge_a_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"raise ValueError({FORGED!r})\n")
    assert main(["--workload", str(file), "--print_config"]) == 2
    [line] = capfd.readouterr().err.splitlines()
    assert f"ValueError: {ESCAPED}" in line


@pytest.mark.parametrize("name", ["a\nb", "\x1b]0;x\x07"])
def test_the_log_and_the_bar_show_names_as_text(name: str) -> None:
    stream = io.StringIO()
    console = Console(stream, is_terminal=False)
    console.line(f"step 1, loss = 2, {name} = 3")
    assert stream.getvalue() == f"step 1, loss = 2, {escape(name)} = 3\n"

    reader, writer = os.openpty()
    with os.fdopen(writer, "w") as terminal:
        console = Console(terminal, is_terminal=True)
        console.start_progress(10, 0)
        console.progress(1, [f"{name} 3"])
        console.line(f"{name} 3")
        console.stop_progress()
    shown = b""
    with contextlib.suppress(OSError):  # at its end (pty(7))
        while data := os.read(reader, 65536):
            shown += data
    os.close(reader)
    assert shown.decode().count(f"{escape(name)} 3") >= 2
    assert name not in shown.decode()


def test_launch_escapes_the_lines_of_a_rank(capfd: pytest.CaptureFixture[str]) -> None:
    print_line(f"  [0] {FORGED}", "bytes that are no text: \udcff")
    sys.stderr.flush()
    assert capfd.readouterr().err == f"launch:   [0] {ESCAPED}\nlaunch: bytes that are no text: \\udcff\n"
