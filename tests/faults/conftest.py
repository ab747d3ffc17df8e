"""``--faults-table FILE`` writes what the tests of this directory found, as a table that README shows."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

KINDS = {
    "test_matrix": "a rank is killed, stopped, raises, leaves, waits, diverges or drifts",
    "test_launchers": "a launcher is ended; the kernel kills for want of memory",
    "test_disk": "the run directory is full, read-only, away or gone",
    "test_data": "data are damaged, vanish or differ; a feed ends early",
    "test_watchdog": "the watchdog: hangs, long starts, slow ranks",
    "test_fuzz": "any configuration, any run directory",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--faults-table", type=Path, help="JSON file to write the table of the faults to")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--faults-table", default=None)
    if path:
        config.pluginmanager.register(FaultsTable(path), "faults-table")


class FaultsTable:
    """Collects the outcome of each case."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._cases: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        module, _, name = report.nodeid.partition("::")
        if "faults/" not in module or (report.when != "call" and report.passed):
            return
        properties = dict(report.user_properties)
        self._cases[report.nodeid] = {
            "kind": Path(module).stem,
            "case": name,
            "held": report.passed,
            "answer_seconds": properties.get("answer_seconds"),
            "resumed": properties.get("resumed"),
        }

    def pytest_sessionfinish(self) -> None:
        cases = list(self._cases.values())
        kinds = {kind: summary([case for case in cases if case["kind"] == kind]) for kind in KINDS}
        result = {
            "command": "make test-faults",
            "commit": commit(),
            "kinds": {kind: {"what": KINDS[kind], **kinds[kind]} for kind in KINDS},
            "all": summary(cases),
            "cases": cases,
        }
        self._path.write_text(json.dumps(result, indent=1) + "\n")


def summary(cases: list[dict[str, Any]]) -> dict[str, Any]:
    """Tried; answered as documented, with who or what is named; gone on from; lost; the longest time to an answer."""
    answers = [case["answer_seconds"] for case in cases if case["answer_seconds"] is not None]
    return {
        "tried": len(cases),
        "named": sum(case["held"] for case in cases),
        "survived": sum(bool(case["held"] and case["resumed"]) for case in cases),
        "lost": sum(not case["held"] for case in cases),
        "longest_answer_seconds": max(answers, default=None),
    }


def commit() -> str:
    finished = subprocess.run(["git", "describe", "--always", "--dirty", "--abbrev=12"], capture_output=True, text=True)
    return finished.stdout.strip()
