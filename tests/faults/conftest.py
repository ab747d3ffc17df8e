"""``--faults-table FILE`` writes what these tests and those of the promises found, and shows tables of it.

What the file holds of other cases stays, with the commit that each was tried at: parts may be run one after the other.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.faults.summary import describe_commit, kind_of, markdown, markdown_promises, summarize


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--faults-table", type=Path, help="JSON file to write the table of the faults to")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--faults-table", default=None)
    if path:
        config.pluginmanager.register(FaultsTable(path), "faults-table")


class FaultsTable:
    """Collects the outcome of each case."""

    def __init__(self, path: Path) -> None:
        self._path, self._commit = path, describe_commit()
        self._cases: dict[str, dict[str, Any]] = {}
        self._result: dict[str, Any] | None = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        kind = kind_of(report.nodeid)
        if kind is None or (report.when != "call" and report.passed):
            return
        properties = dict(report.user_properties)
        self._cases[report.nodeid] = {
            "kind": kind,
            "commit": self._commit,
            "held": report.passed,
            "answer_seconds": properties.get("answer_seconds"),
            "resumed": properties.get("resumed"),
        }
        self._write()  # now: a run of hours may be cut off

    def _write(self) -> None:
        kept = json.loads(self._path.read_text())["cases"] if self._path.exists() else {}
        self._result = summarize(dict(sorted({**kept, **self._cases}.items())))
        self._path.write_text(json.dumps(self._result, indent=1) + "\n")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._result is not None:
            terminalreporter.section("injected faults")
            terminalreporter.write_line(f"{markdown(self._result)}\n\n{markdown_promises(self._result)}")
