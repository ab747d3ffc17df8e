"""Lines of a rank, labelled and never broken."""

from __future__ import annotations

import io

from hypothesis import given
from hypothesis import strategies as st

from launch.lines import KEPT_LINES, LONGEST_LINE_BYTES, LabelledLines


class Writes(io.RawIOBase):
    """A stream that keeps each write."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []

    def write(self, data: bytes) -> int:  # type: ignore[override]
        self.writes.append(bytes(data))
        return len(data)


def label(pieces: list[bytes]) -> list[bytes]:
    stream = Writes()
    lines = LabelledLines("[1] ", stream)  # type: ignore[arg-type]
    for piece in pieces:
        lines.feed(piece)
    lines.end()
    return stream.writes


@given(st.lists(st.text("ab\n").map(str.encode)))
def test_whatever_the_pieces_each_line_has_one_label_and_nothing_is_lost(pieces: list[bytes]) -> None:
    writes = label(pieces)
    whole = b"".join(pieces)
    expected = whole.split(b"\n")[:-1] + ([last] if (last := whole.rpartition(b"\n")[2]) else [])
    assert b"".join(writes) == b"".join(b"[1] " + line + b"\n" for line in expected)
    assert all(write.endswith(b"\n") for write in writes)


def test_a_line_without_an_end_is_shown_in_pieces_before_it_fills_the_memory() -> None:
    writes = label([b"x" * 2**16] * 40)
    assert sum(write.count(b"x") for write in writes) == 40 * 2**16
    assert max(map(len, writes)) <= LONGEST_LINE_BYTES + 2**16 + len(b"[1] \n")


def test_the_last_lines_are_kept() -> None:
    lines = LabelledLines("", Writes())  # type: ignore[arg-type]
    lines.feed(b"".join(b"%d\n" % number for number in range(100)) + b"\xff\n")
    assert list(lines.last) == [*map(str, range(101 - KEPT_LINES, 100)), "\ufffd"]
