"""Table of findings, 80 columns wide."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from ringtrain.doctor.judging import Finding
from ringtrain.messages.escaping import escape

WIDTH = 80
COLOURS = {"ok": "32", "warning": "33", "broken": "1;31"}  # ECMA-48, "select graphic rendition"


def format_table(title: str, findings: Sequence[Finding], *, colour: bool) -> str:
    subjects = max(len(finding.subject) for finding in findings)
    lines = [*_wrap(title, ""), ""]
    for finding in findings:
        status = f"{finding.status:<7}"
        head = f"{finding.subject:<{subjects}}  {status}  "
        wrapped = _wrap(finding.text, head)
        if colour:
            wrapped[0] = wrapped[0].replace(f"  {status}", f"  \x1b[{COLOURS[finding.status]}m{status}\x1b[0m", 1)
        lines += wrapped
        if finding.remedy:
            lines += _wrap(finding.remedy, " " * len(head) + "-> ")
    return "\n".join([*lines, "", conclusion(findings)])


def conclusion(findings: Sequence[Finding]) -> str:
    broken = [finding.subject for finding in findings if finding.status == "broken"]
    warnings = sum(finding.status == "warning" for finding in findings)
    if broken:
        return f"Training would not work. Broken: {', '.join(dict.fromkeys(broken))}."
    noted = f", with {warnings} warning{'s' if warnings > 1 else ''}" if warnings else ""
    return f"Training would work{noted}."


def exit_code(findings: Sequence[Finding]) -> int:
    return 2 if any(finding.status == "broken" for finding in findings) else 0


def _wrap(text: str, head: str) -> list[str]:
    """Indent after ``head``. Long words, such as paths, are not split."""
    lines = textwrap.wrap(
        text, WIDTH, initial_indent=head, subsequent_indent=" " * len(head), break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip
    return [escape(line) for line in lines]
