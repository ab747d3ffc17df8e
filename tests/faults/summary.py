"""What became of the injected faults: counts by kind, and tables of them. As a program: where their tests are."""

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
    "test_foreign_files": "files of a run that ringtrain did not write",
}
# What strangers broke, and its kin: the tests that hold it lie with their subjects.
PROMISES = {
    "a rank leaves, whatever the user's code has left behind": ("world/test_end.py",),
    "a signal, a terminal, a pipe or a launcher that goes loses nothing": (
        "world/test_stop.py", "world/test_streams.py",
    ),
    "ranks with other data, code, settings or versions are told apart": (
        "world/test_sources.py", "world/test_preflight.py", "unit/test_contents.py", "unit/test_code.py",
    ),
    "a run that was copied, mixed up or has vanished is seen for what it is": (
        "unit/test_best.py", "unit/test_identity.py",
    ),
    "what a workload gives, and what the environment says, is known before the first step": (
        "unit/test_refused_workloads.py", "unit/test_environment.py",
    ),
    "strangers run no code, forge no line and shut nobody out": (
        "unit/test_security.py", "unit/test_escaping.py", "unit/test_hub.py", "world/test_listening.py",
    ),
    "`verify` accepts correct workloads, and reports planted defects": ("world/test_verify.py",),
}  # fmt: skip
TESTS = ("tests/faults", *(f"tests/{module}" for modules in PROMISES.values() for module in modules))


def kind_of(nodeid: str) -> str | None:
    """Of which kind a test is; None: of none."""
    module = nodeid.partition("::")[0].partition("tests/")[2]
    if module.startswith("faults/"):
        return module.removeprefix("faults/").removesuffix(".py")
    return next((promise for promise, modules in PROMISES.items() if module in modules), None)


def summarize(cases: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The content of the result file, from the outcome of each case."""
    faults = {kind: [case for case in cases.values() if case["kind"] == kind] for kind in KINDS}
    promises = {promise: [case for case in cases.values() if case["kind"] == promise] for promise in PROMISES}
    return {
        "command": "make test-faults",
        "commits": sorted({case["commit"] for case in cases.values()}),
        "kinds": {kind: count(of_kind) for kind, of_kind in faults.items()},
        "all": count([case for of_kind in faults.values() for case in of_kind]),
        "promises": {
            promise: {"tried": len(of_kind), "held": sum(case["held"] for case in of_kind)}
            for promise, of_kind in promises.items()
        },
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
    """The table of the faults."""
    titles = ("what happens", "tried", "answered as documented", "went on", "not answered", "longest answer")
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    rows = [*((KINDS[kind], counts) for kind, counts in result["kinds"].items()), ("**all**", result["all"])]
    for what, counts in rows:
        longest = counts["longest_answer_seconds"]
        cells = [what, *(str(counts[name]) for name in ("tried", "named", "survived", "lost"))]
        lines.append(f"| {' | '.join(cells)} | {f'{longest:.0f} s' if longest is not None else 'none timed'} |")
    return "\n".join(lines)


def markdown_promises(result: Mapping[str, Any]) -> str:
    """The table of the promises."""
    rows = [f"| {promise} | {of['tried']} | {of['held']} |" for promise, of in result["promises"].items()]
    return "\n".join(["| what must hold | tried | held |", "|---|---|---|", *rows])


def describe_commit() -> str:
    """The commit that was tried, ``-dirty`` where files besides the results have changed since."""
    name = _git("rev-parse", "--short=12", "HEAD")
    return name + ("-dirty" if _git("status", "--porcelain", "--", ".", f":!{RESULTS}") else "")


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    print(" ".join(TESTS))
