"""Audit the first steps of a script: does each train what one process would train on the samples of all ranks?

It starts the script under several processes. After the first step, --steps steps run unchanged, and on every rank as
in one process with the samples of all ranks. The script ends after the last of them.

    python -m ringtrain verify --script train.py --np 2
    python -m ringtrain verify --script train.py -- --epochs 3
"""

from __future__ import annotations

import contextlib
import json
import runpy
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringtrain.commands.parser import parse_arguments
from ringtrain.errors import EXIT_CODES, ReplicasDifferError, RingtrainError, UsageError
from ringtrain.files.atomic import replace_text
from ringtrain.files.bounded import open_regular
from ringtrain.files.outputs import require_same_kind
from ringtrain.messages.defects import describe_defect, find_users_place
from ringtrain.messages.rules import at_least
from ringtrain.runtime.world import World
from ringtrain.verify.world_sizes import run_processes

VERDICT, PAGE = "verdict.json", "index.html"
OUTPUTS = {VERDICT: b'"why_not": ', PAGE: b"<title>Audit</title>"}  # in the first bytes of those of an audit
RUNS = ".runs"  # of callbacks.Run, while the script is audited
FAILURE = "failure-"  # of a rank


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
    require_own_outputs(out)
    try:
        open_regular(options.script).close()
        out.mkdir(parents=True, exist_ok=True)
        (out / VERDICT).unlink(missing_ok=True)
        directory = Path(tempfile.mkdtemp(prefix=".audit-", dir=out))
    except OSError as error:
        raise UsageError(
            f"{error.filename}: {error.strerror}. Give --script a Python file, and --out a directory."
        ) from error
    try:
        found = run_audit(options, rest, directory)
        require_own_outputs(out)
        for name in (PAGE, VERDICT):
            if (directory / name).exists():
                (directory / name).replace(out / name)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    if not found["steps"]:
        why_not = found["why_not"] or "no step that updates weights was called twice"
        raise UsageError(f"{options.script} cannot be audited: {why_not}. See docs/audit.md.")
    print(f"all variables: {options.out / PAGE}")
    return 0 if found["passes"] else ReplicasDifferError.exit_code


def require_own_outputs(out: Path) -> None:
    """Raise UsageError if an output of the audit would replace a file that is none."""
    for name, mark in OUTPUTS.items():
        require_same_kind(out / name, mark, kind="of an audit", option="an output of --out")


def run_audit(options: Options, rest: Sequence[str], directory: Path) -> dict[str, Any]:
    """Audit the script in processes that write to ``directory``; return the verdict.

    Raises:
        RingtrainError: the script failed. The class has its exit code, if that is a documented one.
    """
    words = ["--script", options.script, "--steps", options.steps, "--max_mebibytes", options.max_mebibytes]
    command = ["_audit", *map(str, words), "--out", str(directory), "--", *rest]
    code, _ = run_processes(options.np, command, timeout=None, shows_output=True)
    if not (directory / VERDICT).exists():
        why = read_first_failure(directory) or "it raised no exception: a process was killed, or left by os._exit"
        raise EXIT_CODES.get(code, RingtrainError)(f"the script failed with exit code {code}; {why}.")
    found: dict[str, Any] = json.loads((directory / VERDICT).read_text(encoding="utf-8"))
    return found


def read_first_failure(directory: Path) -> str:
    """Return the first exception of a rank, in words without a full stop; empty if there was none."""
    files = sorted(directory.glob(f"{FAILURE}*"), key=lambda file: file.stat().st_mtime_ns)
    return files[0].read_text(encoding="utf-8") if files else ""


@contextlib.contextmanager
def noting_failure(directory: Path, rank: int) -> Iterator[None]:
    """Write the exception with which the script ends to a file, for the last line of the command."""
    try:
        yield
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        if not (isinstance(error, SystemExit) and not error.code):
            words = f"rank {rank}: {describe_defect(error).rstrip('. ')}"
            place = find_users_place(error)
            with contextlib.suppress(OSError):
                replace_text(directory / f"{FAILURE}{rank}", words + (f" ({place})" if place else ""))
        raise


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
    with (
        noting_failure(options.out, world.rank),
        redirecting_runs(options.out / RUNS) as runs,
        watching(auditor),
    ):
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
