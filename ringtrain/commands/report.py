"""Write an HTML report of one or more runs.

It needs no network. One process.

    python -m ringtrain report runs/digits
    python -m ringtrain report runs/first runs/second --output compared.html
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from ringtrain.commands.parser import parse_arguments
from ringtrain.commands.preparing import refuse_launcher
from ringtrain.errors import UsageError
from ringtrain.messages.escaping import escape
from ringtrain.run.directory import REPORT_FILE
from ringtrain.runtime.world import World


@dataclass(frozen=True)
class Options:
    runs: tuple[Path, ...]
    """directories of runs; several are compared"""

    _: KW_ONLY

    output: Path | None = None
    """the file to write (RUN/report.html; of several report.html here)"""


def main(arguments: Sequence[str], world: World) -> int:
    options = Options(**parse_arguments(Options, arguments, world))
    refuse_launcher("report", world)
    from ringtrain.report import write_report

    runs = options.runs
    target = options.output or (runs[0] / REPORT_FILE if len(runs) == 1 else Path(REPORT_FILE))
    try:
        write_report(runs, target)
    except OSError as error:
        raise UsageError(
            f"the report cannot be written to {str(target)!r}: {error.strerror}. Give another place with --output."
        ) from None
    print(escape(f"the report of {len(runs)} run{'s' if len(runs) > 1 else ''} is in {target}"))
    return 0
