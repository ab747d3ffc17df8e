"""``python -m launch.rank LISTENER COMMAND...``: one rank between its launcher and ``launch local``.

Bypasses the launcher, which breaks lines and hides exit codes; kills the rank when the launcher dies.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ringtrain.runtime.machine import read_memory_limits
from ringtrain.runtime.run_record import LEFT_VARIABLE
from ringtrain.runtime.world import read_world

from .family import die_with_parent, is_ignored, name_signal

STATUS_FIFO = "status"
NODE = "the node's memory, or the limit of another job on it"
GIB = 2**30
ROOT = Path("/")
PASSED_ON = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


def fifo_names(rank: int) -> tuple[str, str]:
    return f"rank-{rank}.out", f"rank-{rank}.err"


def main(arguments: Sequence[str]) -> int:
    """Return the rank's exit code, or 128 plus the signal's number."""
    listener, command = Path(arguments[0]), list(arguments[1:])
    die_with_parent()
    rank = read_world(os.environ).rank
    output, error = (os.open(listener / name, os.O_WRONLY) for name in fifo_names(rank))
    status = os.open(listener / STATUS_FIFO, os.O_WRONLY)

    def tell(**values: Any) -> None:
        os.write(status, (json.dumps({"rank": rank, **values}) + "\n").encode())  # atomic: shorter than PIPE_BUF

    # ``launch local`` signals the rank itself. Signals from a launcher are passed on, except SIGINT, a second of which
    # ends a rank without saving.
    is_ours = command[1:3] == ["-m", "ringtrain"]  # user scripts have their own exit codes
    left = listener / f"rank-{rank}.left"
    left.unlink(missing_ok=True)
    pending: list[int] = []
    kills = count_kills(ROOT)
    passed_on = [number for number in PASSED_ON if not is_ignored(number)]
    for number in passed_on:
        signal.signal(number, lambda number, frame: pending.append(number))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=error,
        env={"PYTHONUNBUFFERED": "1", **os.environ, LEFT_VARIABLE: str(left)},
        preexec_fn=prepare_rank,
    )
    os.close(output)
    os.close(error)
    for number in passed_on:
        signal.signal(number, lambda number, frame: process.send_signal(number))
    for early in pending:
        process.send_signal(early)
    tell(event="started", pid=process.pid, host=os.uname().nodename)
    code = process.wait()
    tell(
        event="ended",
        exit_code=code if code >= 0 else None,
        signal=name_signal(-code) if code < 0 else None,
        has_quit=code == 0 and is_ours and not left.exists(),
        memory_limit=find_limit(kills, count_kills(ROOT)) if code == -signal.SIGKILL else None,
    )
    return code if code >= 0 else 128 - code


def prepare_rank() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    die_with_parent()


def count_kills(root: Path) -> dict[str, int]:
    """Return OOM kills so far by limit, the tightest first; /proc/vmstat counts those of all limits."""
    counts: dict[str, int] = {}
    for limit, file in read_memory_limits(root):
        if (killed := _read_kills(file)) is not None:
            counts.setdefault(f"the limit of {limit / GIB:.3g} GiB of its cgroup", killed)
    node = _read_kills(root / "proc/vmstat")
    return counts | ({NODE: node} if node is not None else {})


def find_limit(before: Mapping[str, int], after: Mapping[str, int]) -> str | None:
    return next((limit for limit, count in after.items() if count > before.get(limit, count)), None)


def _read_kills(file: Path) -> int | None:
    try:
        found = re.search(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) if found else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
