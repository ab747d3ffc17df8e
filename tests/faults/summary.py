"""What became of the injected faults: counts by kind, and a table of them."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

RESULTS = "results"  # what is written there is no change of the code

KINDS = {
    "test_matrix": "a rank is killed, stopped, raises, leaves, waits, diverges, drifts or runs out of memory",
    "test_launchers": "a launcher is ended; the kernel kills for want of memory",
    "test_disk": "the run directory is full, read-only, away or gone",
    "test_data": "data are damaged, vanish or differ; a feed ends early",
    "test_watchdog": "hangs, long starts and slow ranks, as the watchdog sees them",
    "test_fuzz": "any configuration, any run directory",
}


def summarize(cases: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The content of the result file, from the outcome of each case."""
    by_kind = {kind: [case for case in cases.values() if case["kind"] == kind] for kind in KINDS}
    return {
        "command": "make test-faults",
        "commits": sorted({case["commit"] for case in cases.values()}),
        "kinds": {kind: count(of_kind) for kind, of_kind in by_kind.items()},
        "all": count(list(cases.values())),
        "cases": dict(cases),
    }


def count(cases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Tried; named: answered as documented; survived: the run, or the same command, went on; lost; longest answer."""
    answers = [case["answer_seconds"] for case in cases if case["answer_seconds"] is not None]
    return {
        "tried": len(cases),
        "named": sum(case["held"] for case in cases),
        "survived": sum(bool(case["held"] and case["resumed"]) for case in cases),
        "lost": sum(not case["held"] for case in cases),
        "longest_answer_seconds": max(answers, default=None),
    }


def markdown(result: Mapping[str, Any]) -> str:
    """The table."""
    lines = ["| what happens | tried | named | survived | lost | longest answer |", "|---|---|---|---|---|---|"]
    rows = [*((KINDS[kind], counts) for kind, counts in result["kinds"].items()), ("**all**", result["all"])]
    for what, counts in rows:
        longest = counts["longest_answer_seconds"]
        cells = [what, *(str(counts[name]) for name in ("tried", "named", "survived", "lost"))]
        lines.append(f"| {' | '.join(cells)} | {f'{longest:.0f} s' if longest is not None else 'none timed'} |")
    return "\n".join(lines)


def describe_commit() -> str:
    """The commit that was tried, ``-dirty`` where files besides the results have changed since."""
    name = _git("rev-parse", "--short=12", "HEAD")
    return name + ("-dirty" if _git("status", "--porcelain", "--", ".", f":!{RESULTS}") else "")


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True).stdout.strip()
