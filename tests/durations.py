"""A pytest plugin that measures each test, and the whole run, in imports of TensorFlow.

Machines differ, and so does one machine from day to day. The unit is therefore the time of one
``python -c "import tensorflow, keras"``, the median of three at the start of the run and three at its end.

    pytest --durations-file FILE [--most-imports N]

writes the durations of all cases to FILE, the longest first; shows the ten longest, the sum of each directory, and the
cases that have grown against results/test-durations.json; and warns of a run that takes more than N imports. A slow
machine fails no test. Copy FILE there to accept what has grown.
"""

import collections
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

ACCEPTED = Path("results", "test-durations.json")
LEAST_LISTED = 0.1  # imports; shorter cases are in no file
# A case has grown if it takes this many times as long as accepted, and this many imports more.
GROWTH, GROWTH_IMPORTS = 1.5, 0.5


def measure_imports() -> list[float]:
    """Seconds of three imports of TensorFlow and Keras."""
    seconds = []
    for _ in range(3):
        start = time.monotonic()
        subprocess.run([sys.executable, "-c", "import tensorflow, keras"], check=True, capture_output=True)
        seconds.append(time.monotonic() - start)
    return seconds


def find_grown(cases: Mapping[str, float], accepted: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """Cases that take much longer than accepted, as (accepted, now), in imports; the one that grew most first."""
    grown = {
        case: (before, now)
        for case, now in cases.items()
        for before in [accepted.get(case, LEAST_LISTED)]
        if now > GROWTH * before and now - before > GROWTH_IMPORTS
    }
    return dict(sorted(grown.items(), key=lambda item: item[1][0] - item[1][1]))


def sum_by_directory(cases: Mapping[str, float]) -> dict[str, float]:
    """The time of each directory of tests, the longest first."""
    sums: dict[str, float] = collections.defaultdict(float)
    for case, duration in cases.items():
        sums[case.partition("::")[0].rpartition("/")[0]] += duration
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


class Durations:
    """Adds up what each case takes, and reports it at the end."""

    def __init__(self, file: Path, most_imports: float | None, accepted: Path) -> None:
        self._units = measure_imports()
        self._file, self._most_imports, self._accepted = file, most_imports, accepted
        self._start = time.monotonic()
        self._imports = 0.0
        self._seconds: dict[str, float] = collections.defaultdict(float)

    @property
    def import_seconds(self) -> float:
        return statistics.median(self._units)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        seconds = time.monotonic() - self._start
        if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):  # not after an interrupt: it takes seconds
            self._units += measure_imports()
        self._imports = seconds / self.import_seconds

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        by_length = sorted(self._seconds.items(), key=lambda item: -item[1])
        cases = {case: round(seconds / self.import_seconds, 2) for case, seconds in by_length}
        values = {
            "command": "make test, whose --durations-file this is",
            "import_seconds": round(self.import_seconds, 2),
            "imports": round(self._imports, 1),
            "cases": {case: imports for case, imports in cases.items() if imports >= LEAST_LISTED},
        }
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(json.dumps(values, indent=1) + "\n")
        accepted: dict[str, Any] = json.loads(self._accepted.read_text()) if self._accepted.exists() else {"cases": {}}
        write = terminalreporter.write_line
        terminalreporter.section(f"durations, in imports of TensorFlow and Keras ({self.import_seconds:.2f} s each)")
        for case, imports in list(cases.items())[:10]:
            write(f"{imports:6.1f}  {case}")
        write("by directory: " + ", ".join(f"{name} {sum_:.0f}" for name, sum_ in sum_by_directory(cases).items()))
        for case, (before, now) in find_grown(cases, accepted["cases"]).items():
            what = f"grown from {before:.1f} to" if case in accepted["cases"] else "new, takes"
            write(f"{what} {now:.1f}: {case}", yellow=True)
        write(f"the run took {self._imports:.0f} imports (all durations: {self._file})")
        if self._most_imports is not None and self._imports > self._most_imports:
            write(f"warning: that is more than --most-imports {self._most_imports:g}", yellow=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("durations of cases")
    group.addoption("--durations-file", type=Path, help="write the durations of all cases to this file")
    group.addoption("--most-imports", type=float, help="warn if the run takes longer than this many imports")


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption("--durations-file")
    if file and not hasattr(config, "workerinput"):  # a worker of pytest-xdist reports to the process that measures
        most = config.getoption("--most-imports")
        config.pluginmanager.register(Durations(file, most, config.rootpath / ACCEPTED), "case-durations")
