"""Audit the first steps of a script: does each train what one process would train on the samples of all ranks?

It starts the script under several processes. After the first step, --steps steps run unchanged, and on every rank as
in one process with the samples of all ranks. The script ends after the last of them.

    python -m ringtrain verify --script train.py --np 2
    python -m ringtrain verify --script train.py -- --epochs 3
"""

from __future__ import annotations

import functools
import json
import runpy
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringtrain.commands.parser import parse_arguments
from ringtrain.errors import EXIT_CODES, ReplicasDifferError, RingtrainError, UsageError
from ringtrain.files.bounded import open_regular
from ringtrain.runtime.world import World
from ringtrain.verify.world_sizes import run_processes

if TYPE_CHECKING:
    from ringtrain.keras.auditing.session import Auditor

VERDICT, PAGE = "verdict.json", "index.html"


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


def audit_script(arguments: Sequence[str], world: World) -> int:
    """Start the ranks, and give their verdict's exit code."""
    split = [*arguments, "--"].index("--")
    mine, rest = list(arguments[:split]), list(arguments[split + 1 :])
    options = Options(**parse_arguments(Options, ["--np" if word == "-np" else word for word in mine], world))
    for name, least in (("np", 2), ("steps", 1), ("max_mebibytes", 1)):
        if (value := getattr(options, name)) < least:
            raise UsageError(f"{name} is {value}; it must be at least {least}.")
    try:
        open_regular(options.script).close()
    except OSError as error:
        raise UsageError(f"script is {str(options.script)!r}: {error.strerror}. Give a file of Python.") from error
    options.out.mkdir(parents=True, exist_ok=True)
    verdict = options.out / VERDICT
    verdict.unlink(missing_ok=True)
    words = ["--script", options.script, "--steps", options.steps, "--max_mebibytes", options.max_mebibytes]
    words += ["--out", options.out, "--", *rest]
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    code, _ = run_processes(options.np, ["_audit", *map(str, words)], timeout=None, shows_output=True)
    if not verdict.exists():
        if code:
            raise EXIT_CODES.get(code, RingtrainError)(f"the script failed with exit code {code}; see above.")
        raise UsageError(f"{options.script} has ended without a step that updates weights: nothing was audited.")
    found = json.loads(verdict.read_text(encoding="utf-8"))
    if not found["steps"]:
        raise UsageError(f"{options.script} cannot be audited: {found['why_not'] or 'it updates no weights'}.")
    print(f"all variables: {options.out / PAGE}")
    return 0 if found["passes"] else ReplicasDifferError.exit_code


def main(arguments: Sequence[str], world: World) -> int:
    """Run the script on this rank."""
    split = [*arguments, "--"].index("--")
    options = Options(**parse_arguments(Options, arguments[:split], world))
    import keras

    from ringtrain.keras.auditing.recording import replaced
    from ringtrain.keras.auditing.session import Audit, Auditor, watching_functions

    audit = Auditor(options.steps, options.max_mebibytes * 2**20)
    audit.conclude = functools.partial(write_and_leave, audit, options.out)

    def fit(plain: Callable[..., Any], model: keras.Model, *args: Any, callbacks: Any = None, **kwargs: Any) -> Any:
        listed = [callbacks] if isinstance(callbacks, keras.callbacks.Callback) else list(callbacks or ())
        others = [callback for callback in listed if not isinstance(callback, Audit)]
        return plain(model, *args, callbacks=[*others, Audit.of(audit)], **kwargs)

    sys.argv = [str(options.script), *arguments[split + 1 :]]
    sys.path.insert(0, str(options.script.resolve().parent))
    with replaced(keras.Model, "fit", fit), watching_functions(audit, ends_early=True):
        runpy.run_path(str(options.script), run_name="__main__")
    audit.conclude()
    return 0


def write_and_leave(audit: Auditor, directory: Path) -> None:
    """Rank 0 prints and writes. The launcher has nothing to say of a verdict: the command that waits gives its code."""
    import horovod.tensorflow as hvd

    from ringtrain.files.atomic import replace_text
    from ringtrain.keras.auditing.page import make_page

    if not hvd.is_initialized():
        raise UsageError("the script never calls ringtrain.keras.init(): its processes train apart.")
    if hvd.rank() == 0:
        if audit.results:
            print("\n".join(["", *audit.describe()]), flush=True)  # a progress bar ends in no new line
            replace_text(directory / PAGE, make_page(audit))
        replace_text(directory / VERDICT, json.dumps(audit.to_json(), indent=1))
    raise SystemExit(0)
