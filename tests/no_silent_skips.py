"""A pytest plugin: a test that is skipped or expected to fail, and is not listed with a reason, fails the run.

The list is `.ci/allowed-skips.txt`, one `NODE ID # REASON` a line. An entry whose test is neither skipped nor expected
to fail any more, or is gone, fails the run too: the list holds no more than it must. `FOLDER/ # REASON` lets the
tests of a folder be skipped where the machine lacks something; on another they run.
"""

from pathlib import Path
from typing import Any

import pytest

ALLOWED_SKIPS = Path(".ci", "allowed-skips.txt")


def parse_allowed_skips(text: str) -> dict[str, str]:
    """Return the reason for each node id; raise ValueError where one has none."""
    reason_for_test = {}
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        node_id, _, reason = (part.strip() for part in line.partition(" # "))
        if not reason:
            raise ValueError(f"{ALLOWED_SKIPS}: {node_id!r} has no reason; write NODE ID # REASON")
        reason_for_test[node_id] = reason
    return reason_for_test


class NoSilentSkips:
    """Notes what became of each test, and judges at the end of the session."""

    def __init__(self, allowed: set[str]) -> None:
        self.allowed = {entry for entry in allowed if not entry.endswith("/")}
        self.allowed_folders = tuple(allowed - self.allowed)
        self.collected: set[str] = set()  # with those deselected afterwards
        self.ran: set[str] = set()
        self.reason_for_skip: dict[str, str] = {}
        self.whole_suite = False

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        self.collected.add(item.nodeid)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Collect the tests and skips of a worker of pytest-xdist, which sends only the reports of tests itself."""
        self.collected.update(getattr(node, "workeroutput", {}).get("collected", ()))
        self.reason_for_skip.update(getattr(node, "workeroutput", {}).get("skips", {}))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:  # a module as a whole: importorskip, or skip(allow_module_level=True)
            self._note_skip(report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.ran.add(report.nodeid)
        if report.skipped or hasattr(report, "wasxfail"):
            self._note_skip(report)

    def _note_skip(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        self.collected.add(report.nodeid)
        skip_message = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
        reason = getattr(report, "wasxfail", skip_message)
        self.reason_for_skip[report.nodeid] = reason.removeprefix("reason: ").removeprefix("Skipped: ") or "no reason"

    def complaints(self) -> list[str]:
        stale = self.allowed & (self.ran - self.reason_for_skip.keys())
        gone = self.allowed - self.collected if self.whole_suite else set()
        return [
            *(
                f"{test} was skipped or expected to fail ({reason}), and {ALLOWED_SKIPS} does not list it"
                for test, reason in sorted(self.reason_for_skip.items())
                if test not in self.allowed and not test.startswith(self.allowed_folders)
            ),
            *(f"{test} is listed in {ALLOWED_SKIPS} and ran: remove it there" for test in sorted(stale)),
            *(f"{test} is listed in {ALLOWED_SKIPS} and does not exist: remove it there" for test in sorted(gone)),
        ]

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        self.whole_suite = session.config.args_source is not pytest.Config.ArgsSource.ARGS
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput.update(collected=sorted(self.collected), skips=self.reason_for_skip)
            return
        if exitstatus == pytest.ExitCode.OK and self.complaints():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        complaints = self.complaints()
        if complaints:
            terminalreporter.section("skipped without leave", red=True, bold=True)
            for complaint in complaints:
                terminalreporter.write_line(complaint, red=True)


def pytest_configure(config: pytest.Config) -> None:
    try:
        allowed = parse_allowed_skips((config.rootpath / ALLOWED_SKIPS).read_text())
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None
    config.pluginmanager.register(NoSilentSkips(set(allowed)))
