"""What a launcher said about the ranks, read from what the job has printed."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

TAIL_BYTES = 256 * 1024
START_LINE = re.compile(r"^launch: job \d+, restart \d+, on ", re.MULTILINE)
FAILED = (
    # srun: "srun: error: n1: task 3: Killed", "srun: error: n2: tasks 0-3: Exited with exit code 1"
    re.compile(r"^srun: error: (?P<node>\S+): (?P<who>tasks? [\d,-]+): (?P<how>.+)$", re.MULTILINE),
    # Open MPI: "mpirun noticed that process rank 1 with PID 7 on node n1 exited on signal 9 (Killed)."
    re.compile(r"process (?P<who>rank \d+) with PID \d+ on node (?P<node>\S+) exited on (?P<how>signal \d+ \(.*\))"),
)
# What a rank ends with that was told to stop, or was told so before it could listen.
ORDERLY = re.compile(r"exit code 75$|Terminated|User defined signal 1")


class FailedRank(NamedTuple):
    """The first rank that the launcher saw fail, in its words."""

    who: str
    node: str
    how: str

    def __str__(self) -> str:
        return f"{self.who} on {self.node}: {self.how}"

    @property
    def was_told_to_stop(self) -> bool:
        """Whether it ended as told to: after saving, or by the signal itself."""
        return ORDERLY.search(self.how) is not None


def find_failed_rank(output: str) -> FailedRank | None:
    """The first rank that the launcher named since the job's last start."""
    starts = [match.end() for match in START_LINE.finditer(output)]
    matches = [match for pattern in FAILED if (match := pattern.search(output, starts[-1] if starts else 0))]
    first = min(matches, key=lambda match: match.start(), default=None)
    return FailedRank(first["who"], first["node"], first["how"]) if first else None


def read_output() -> str:
    """The end of what this job has printed on stderr; empty where that goes into no file."""
    try:
        with open(os.readlink("/proc/self/fd/2"), "rb") as file:
            file.seek(-min(TAIL_BYTES, os.fstat(file.fileno()).st_size), os.SEEK_END)
            return file.read().decode(errors="replace")
    except OSError:
        return ""
