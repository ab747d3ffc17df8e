"""The page of an audit: its verdict, and all variables, the most different first."""

from __future__ import annotations

from pathlib import Path

import jinja2

from ringtrain.keras.auditing.session import Auditor

STYLE = Path(__file__).parents[2] / "report" / "template" / "page.css"


def make_page(audit: Auditor) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined
    )
    ranks = audit.results[0]
    rows = [dict(row) for row in ranks[0]["variables"]]
    for row in rows:
        of_ranks = [its for rank in ranks for its in rank["variables"] if its["name"] == row["name"]]
        row["difference"] = max(its["difference"] for its in of_ranks)
        row["is_equal"] = len({its["gradient"] for its in of_ranks}) == 1
    rows.sort(key=lambda row: -row["difference"])
    style = STYLE.read_text(encoding="utf-8")
    page = environment.get_template("page.html.j2")
    return page.render(lines=audit.describe(), passes=audit.passes, rows=rows, style=style)
