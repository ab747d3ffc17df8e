"""Text of others (file names, metrics, settings, exceptions) as it may be shown: it passes for nothing of ours."""

from __future__ import annotations

import re

# What moves the cursor, ends a line or turns the direction of writing: control characters except the tab, and
# Unicode's own. Also what stands for bytes that are no UTF-8 (PEP 383), which not every stream can write.
UNSAFE = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
COLOUR = re.compile(r"\x1b\[[\d;]*m")
OUR_MARKS = ("ringtrain: ", "launch: ")


def escape(text: str) -> str:
    r"""A text as one line, with ``\n`` or ``\x1b`` in place of what is unsafe."""
    return UNSAFE.sub(lambda found: repr(found[0])[1:-1], text)


def escape_message(text: str) -> str:
    """The same of a message of ours, whose further lines begin with two spaces: other line breaks are not ours."""
    return "\n  ".join(map(escape, text.split("\n  ")))


def escape_block(text: str) -> str:
    """The same of many lines that are not ours, such as a traceback; none looks like an error of ours."""
    lines = map(escape, COLOUR.sub("", text).split("\n"))
    return "\n".join(f"  {line}" if line.startswith(OUR_MARKS) else line for line in lines)
