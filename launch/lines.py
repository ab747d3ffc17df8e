"""The ranks' output, line by line: each labelled with its rank, none broken, whatever pieces it arrives in."""

from __future__ import annotations

import collections
from typing import IO

LONGEST_LINE_BYTES = 2**20  # what has no end by then is shown in pieces
KEPT_LINES = 40


class LabelledLines:
    """One stream of one rank. Whole lines go to ``stream``, each by one write; the last ones are kept."""

    def __init__(self, label: str, stream: IO[bytes]) -> None:
        self.last: collections.deque[str] = collections.deque(maxlen=KEPT_LINES)
        self._label, self._stream = label.encode(), stream
        self._rest = b""

    def feed(self, data: bytes) -> None:
        """Take what has arrived, and show the lines that are whole by now."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LONGEST_LINE_BYTES:
            lines.append(self._rest)
            self._rest = b""
        self._show(lines)

    def end(self) -> None:
        """Show what is left without an end of line."""
        rest, self._rest = self._rest, b""
        self._show([rest] if rest else [])

    def _show(self, lines: list[bytes]) -> None:
        if lines:
            self.last.extend(line.decode(errors="replace") for line in lines)
            self._stream.write(b"".join(self._label + line + b"\n" for line in lines))
            self._stream.flush()
