"""Lines of a rank, labelled and never broken."""

import os
import tempfile

from hypothesis import given
from hypothesis import strategies as st

from launch.lines import KEPT_LINES, LONGEST_LINE_BYTES, LabelledLines


def label(pieces: list[bytes]) -> bytes:
    """What is shown of these pieces."""
    with tempfile.TemporaryFile() as file:
        lines = LabelledLines("[1] ", file.fileno())
        for piece in pieces:
            lines.feed(piece)
        lines.end()
        file.seek(0)
        return file.read()


@given(st.lists(st.text("ab\n").map(str.encode)))
def test_lines_read_in_any_pieces_get_one_label_and_are_complete(pieces: list[bytes]) -> None:
    shown = label(pieces)
    whole = b"".join(pieces)
    expected = whole.split(b"\n")[:-1] + ([last] if (last := whole.rpartition(b"\n")[2]) else [])
    assert shown == b"".join(b"[1] " + line + b"\n" for line in expected)


def test_an_endless_line_is_shown_in_pieces() -> None:
    shown = label([b"x" * 2**16] * 40)
    assert shown.count(b"x") == 40 * 2**16
    assert max(map(len, shown.split(b"\n"))) <= LONGEST_LINE_BYTES + 2**16 + len(b"[1] ")


def test_the_last_lines_are_kept() -> None:
    lines = LabelledLines("", None)
    lines.feed(b"".join(b"%d\n" % number for number in range(1000)) + b"\xff\n")
    assert list(lines.last) == [*map(str, range(1001 - KEPT_LINES, 1000)), "\ufffd"]


def test_a_terminal_that_was_closed_does_not_end_the_run() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    lines = LabelledLines("", writer)
    lines.feed(b"one\ntwo\n")
    os.close(writer)
    assert list(lines.last) == ["one", "two"]
