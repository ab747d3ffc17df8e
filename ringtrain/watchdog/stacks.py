"""Python stacks of this process, and the running line of user code."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

from ringtrain.messages.defects import is_users_own
from ringtrain.messages.escaping import escape
from ringtrain.messages.ranks import group_ranks
from ringtrain.runtime.world import World

OUR_THREADS = frozenset({"watchdog", "last words", "stop requests", "lease", "failing", "end"})
MAX_FRAME_LENGTH = 300
MAX_STACKS_BYTES = 6000  # per rank in a record; a message of the hub has at most 8192
MAX_GROUPS = 8


def write_stacks(world: World) -> None:
    who = f"ringtrain: rank {world.rank} on {world.node}"
    data = "\n".join([f"{who} is here:", *_describe_stacks(), f"{who} ends.", ""])
    os.write(2, data.encode(errors="backslashreplace"))


def read_stacks() -> str:
    lines: list[str] = []
    size = 0
    for line in map(escape, _describe_stacks()):
        size += len(json.dumps(line))
        if size > MAX_STACKS_BYTES:
            return "\n".join([*lines, "  ..."])
        lines.append(line)
    return "\n".join(lines)


def group_stacks(stacks: Mapping[int, str]) -> list[dict[str, Any]]:
    ranks = sorted(stacks)
    groups = group_ranks([stacks[rank] for rank in ranks], ranks)
    return [{"ranks": of_text, "text": text} for text, of_text in reversed(groups.items())][:MAX_GROUPS]


def find_user_frame() -> str:
    """``FILE:LINE (FUNCTION)`` or ""; a callback precedes the script's call of ``fit``."""
    found = ""
    for _, frame in _threads():
        own, is_called_back = None, False
        for part, number in traceback.walk_stack(frame):
            if not is_users_own(part.f_code.co_filename):
                is_called_back |= own is not None and "/site-packages/" in part.f_code.co_filename
            elif own is None:
                own = part.f_code, number
        if own is not None and (is_called_back or not found):
            code, number = own
            found = f"{_shorten(code.co_filename)}:{number} ({code.co_name})"[:MAX_FRAME_LENGTH]
            if is_called_back:
                break
    return found


def _describe_stacks() -> Iterator[str]:
    """Omit source lines: reading them may hang."""
    for name, frame in _threads():
        yield f"Thread {name} (most recent call first):"
        for part, number in traceback.walk_stack(frame):
            yield f'  File "{part.f_code.co_filename}", line {number} in {part.f_code.co_name}'


def _threads() -> Iterator[tuple[str, FrameType]]:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = {ident: frame for ident, frame in sys._current_frames().items() if names.get(ident) not in OUR_THREADS}
    main = threading.main_thread().ident
    for ident in sorted(frames, key=lambda ident: ident != main):
        yield names.get(ident, f"{ident:#x}"), frames[ident]


def _shorten(file: str) -> str:
    with contextlib.suppress(OSError):  # the working directory was moved or removed
        return file.removeprefix(os.getcwd() + os.sep)
    return file
