"""Ranks' output in whole lines, labelled by rank."""

from __future__ import annotations

import collections
import contextlib
import os
import select
import sys

from ringtrain.messages.escaping import escape

LONGEST_LINE_BYTES = 2**20  # longer lines are split
KEPT_LINES = 200  # TensorFlow's tracebacks are long


class LabelledLines:
    def __init__(self, label: str, descriptor: int | None) -> None:
        """``descriptor`` None: only keep the last lines."""
        self.last: collections.deque[str] = collections.deque(maxlen=KEPT_LINES)
        self._label, self._descriptor = label.encode(), descriptor
        self._rest = b""

    def feed(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LONGEST_LINE_BYTES:
            lines.append(self._rest)
            self._rest = b""
        self._show(lines)

    def end(self) -> None:
        rest, self._rest = self._rest, b""
        self._show([rest] if rest else [])

    def _show(self, lines: list[bytes]) -> None:
        if lines:
            self.last.extend(line.decode(errors="replace") for line in lines)
            if self._descriptor is not None:
                write(self._descriptor, b"".join(self._label + line + b"\n" for line in lines))


def print_line(*lines: str) -> None:
    write(sys.stderr.fileno(), "".join(f"launch: {escape(line)}\n" for line in lines).encode())


def write(descriptor: int, data: bytes) -> None:
    """Stop silently if the reader has gone (a closed terminal): the run continues."""
    with contextlib.suppress(OSError):
        while data:
            try:
                data = data[os.write(descriptor, data) :]
            except BlockingIOError:
                select.select([], [descriptor], [])
