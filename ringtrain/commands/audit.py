"""Audit the first steps of a script: does each train what one process would train on the samples of all ranks?

It starts the script under several processes. After the first step, --steps steps run unchanged, and on every rank as
in one process with the samples of all ranks. The script ends after the last of them.

    python -m ringtrain verify --script train.py --np 2
    python -m ringtrain verify --script train.py -- --epochs 3
"""

from __future__ import annotations

import json
import runpy
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ringtrain.commands.parser import parse_arguments
from ringtrain.errors import EXIT_CODES, ReplicasDifferError, RingtrainError, UsageError
from ringtrain.files.atomic import replace_text
from ringtrain.files.bounded import open_regular
from ringtrain.messages.rules import at_least
from ringtrain.runtime.world import World
from ringtrain.verify.world_sizes import run_processes

VERDICT, PAGE = "verdict.json", "index.html"
RUNS = ".runs"  # of callbacks.Run, while the script is audited


@dataclass(frozen=True, kw_only=True)
class Options:
    script: Path
    """script that trains with ringtrain.keras; its own arguments follow --"""

    np: int = 2
    """number of processes"""

    steps: int = 3
    """audited steps"""

    max_mebibytes: int = 1024
    """limit for the samples of a step, which each rank gathers from all ranks"""

    out: Path = Path("audit")
    """directory for the verdict as JSON and as a page"""


def read(arguments: Sequence[str], world: World) -> tuple[Options, list[str]]:
    split = [*arguments, "--"].index("--")
    words = ["--np" if word == "-np" else word for word in arguments[:split]]
    return Options(**parse_arguments(Options, words, world)), list(arguments[split + 1 :])


def audit_script(arguments: Sequence[str], world: World) -> int:
    options, rest = read(arguments, world)
    for name, least in (("np", 2), ("steps", 1), ("max_mebibytes", 1)):
        at_least(name, getattr(options, name), least)
    out = options.out.resolve()  # the script may change the directory
    try:
        open_regular(options.script).close()
        out.mkdir(parents=True, exist_ok=True)
        (out / VERDICT).unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(
            f"{error.filename}: {error.strerror}. Give --script a Python file, and --out a directory."
        ) from error
    words = ["--script", options.script, "--steps", options.steps, "--max_mebibytes", options.max_mebibytes]
    command = ["_audit", *map(str, words), "--out", str(out), "--", *rest]
    try:
        code, _ = run_processes(options.np, command, timeout=None, shows_output=True)
    finally:
        shutil.rmtree(out / RUNS, ignore_errors=True)
    if not (out / VERDICT).exists():
        raise EXIT_CODES.get(code, RingtrainError)(f"the script failed with exit code {code}; see above.")
    found = json.loads((out / VERDICT).read_text(encoding="utf-8"))
    if not found["steps"]:
        why_not = found["why_not"] or "no step that updates weights was called twice"
        raise UsageError(f"{options.script} cannot be audited: {why_not}. See docs/audit.md.")
    print(f"all variables: {options.out / PAGE}")
    return 0 if found["passes"] else ReplicasDifferError.exit_code


def main(arguments: Sequence[str], world: World) -> int:
    options, rest = read(arguments, world)
    from ringtrain.keras.auditing.runs import AuditEnd, redirecting_runs
    from ringtrain.keras.auditing.session import Auditor, watching

    def end_script() -> None:
        raise AuditEnd

    auditor = Auditor(options.steps, options.max_mebibytes)
    auditor.then = end_script
    sys.argv = [str(options.script), *rest]
    sys.path.insert(0, str(options.script.resolve().parent))
    with redirecting_runs(options.out / RUNS) as runs, watching(auditor):
        try:
            runpy.run_path(str(options.script), run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise
    auditor.notes = runs.notes
    import horovod.tensorflow as hvd

    if not (hvd.is_initialized() or auditor.results):
        raise UsageError("the script never calls ringtrain.keras.init(): each process trains its own model.")
    if not hvd.is_initialized() or hvd.rank() == 0:
        if auditor.results:
            replace_text(options.out / PAGE, auditor.to_page())
        auditor.show()
        replace_text(options.out / VERDICT, json.dumps(auditor.to_json(), indent=1))
    return 0  # the parent process returns the verdict's exit code
