"""``bench page``: the page of all results, each figure from a result file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ringtrain.bench.table import describe_result

QUESTIONS = {
    "step": "A step of training, on four models, beside plain Horovod, tf.distribute, unconnected processes and one",
    "loop": "ringtrain with logs, guards and a checkpoint every 100 steps, beside a loop that does nothing but train",
    "allreduce": "A sum over all ranks, from 4 KiB to 64 MiB",
    "input": "Real data beside synthetic data; reading alone",
    "startup": "From the command to the end of the first step",
    "checkpoint": "A save every 100 steps beside none; what the training waits for it",
    "guards": "The guards that flags turn off, on and off",
    "settings": "Each variable that ringtrain sets beside another value of it",
}
HEAD = """\
# Benchmarks

What is compared with what, in which order, how often, and what each word in the tables means is in
[ringtrain/bench/README.md](../ringtrain/bench/README.md). Each section is what `python -m ringtrain bench show FILE`
shows of a committed file, which holds the command, the commit, the machine and each single run;
`python -m ringtrain bench page` writes this page from those files. In the pictures each run is a dot, and a tick the
median.
"""


def make_page(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The page, in Markdown; ``results`` are by the names of their files."""
    sections = [HEAD]
    for mode, question in QUESTIONS.items():
        names = [name for name in results if mode_of(name) == mode]
        sections += [f"## {question}\n"] if names else []
        for name in names:
            table = "\n".join(describe_result(results[name]))
            picture = f"![{question}: times and ratios as in the table](../results/{name}.svg)"
            sections.append(f"`results/{name}.json`:\n\n```text\n{table}\n```\n\n{picture}\n")
    missing = [f"`{mode}`" for mode in QUESTIONS if mode not in map(mode_of, results)]
    if missing:
        sections.append(f"## Not measured yet\n\n{', '.join(missing)}\n")
    return "\n".join(sections)


def read_results(directory: Path) -> dict[str, Mapping[str, Any]]:
    """The result files that are there, such as ``bench-step.json`` and ``bench-step-WIDE.json``, by name."""
    paths = sorted(path for path in directory.glob("bench-*.json") if mode_of(path.stem) in QUESTIONS)
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in paths}


def mode_of(name: str) -> str:
    """What a result file's name says that was measured: a measurement may be made in parts."""
    return name.removeprefix("bench-").partition("-")[0]
