"""Escaping of untrusted text (file names, metrics, settings, exceptions), so that it cannot imitate our messages."""

from __future__ import annotations

import re

# Control characters except the tab, Unicode's line and direction controls, and surrogates of invalid UTF-8 (PEP 383).
UNSAFE = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
COLOUR = re.compile(r"\x1b\[[\d;]*m")
OUR_MARKS = ("ringtrain: ", "launch: ")


def escape(text: str) -> str:
    r"""Return one line, with escapes such as ``\n`` or ``\x1b``."""
    return UNSAFE.sub(lambda found: repr(found[0])[1:-1], text)


def escape_message(text: str) -> str:
    """Keep our own line breaks, which are followed by two spaces."""
    return "\n  ".join(map(escape, text.split("\n  ")))


def escape_block(text: str) -> str:
    lines = map(escape, COLOUR.sub("", text).split("\n"))
    return "\n".join(f"  {line}" if line.startswith(OUR_MARKS) else line for line in lines)
