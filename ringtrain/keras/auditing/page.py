"""The page of an audit: its verdict, and all variables, the most different first."""

from __future__ import annotations

from pathlib import Path

import jinja2

from ringtrain.keras.auditing.session import Auditor

STYLE = Path(__file__).parents[2] / "report" / "template" / "page.css"


def make_page(auditor: Auditor) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined
    )
    ranks = auditor.results[0]
    rows = [dict(row) for row in ranks[0]["variables"]]
    for index, row in enumerate(rows):
        of_ranks = [of_rank["variables"][index] for of_rank in ranks]
        row["difference"] = max(its["difference"] for its in of_ranks)
        row["is_equal"] = len({its["gradient"] for its in of_ranks}) == 1
    rows.sort(key=lambda row: -row["difference"])
    style = STYLE.read_text(encoding="utf-8")
    page = environment.get_template("page.html.j2")
    return page.render(lines=auditor.describe(), passes=auditor.passes, rows=rows, style=style)
