"""Send a run to experiment trackers or an object store.

A run with --tracker or --copy_to does so while it trains; this sends what was left, and runs of the past. One that
has logged no end, and is not running, gets the status of a killed one. One process.

    python -m ringtrain track runs/digits --to mlflow
    python -m ringtrain track runs/digits --to s3://bucket/runs
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from ringtrain.commands.parser import parse_arguments
from ringtrain.commands.preparing import refuse_launcher
from ringtrain.config import TRACKERS, trackers_of
from ringtrain.errors import RingtrainError, UsageError
from ringtrain.messages.escaping import escape
from ringtrain.run.lease import is_held
from ringtrain.runtime.world import World
from ringtrain.tracking.base import DEFAULTS, describe_failure, require_installed, require_store


@dataclass(frozen=True)
class Options:
    run: Path
    """directory of a run"""

    _: KW_ONLY

    to: str
    """mlflow, wandb or trackio, several with commas between; or an address such as s3://bucket/runs"""


def main(arguments: Sequence[str], world: World) -> int:
    options = Options(**parse_arguments(Options, arguments, world))
    refuse_launcher("track", world)
    trackers = [options.to] if "://" in options.to else trackers_of(options.to)
    if not trackers:
        raise UsageError(f"to is {options.to!r}; it must be {', '.join(TRACKERS)} or an address.")
    if "://" in options.to:
        require_store(options.to)
    else:
        require_installed(trackers)
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    from ringtrain.report.reading import read_run
    from ringtrain.tracking.follower import open_sender

    if not read_run(options.run).of_kind("start"):
        raise UsageError(f"{str(options.run)!r} has logged no start. Give the directory of a run that has trained.")
    for name in trackers:
        try:
            with open_sender(options.run, name) as feed:
                feed.send(is_dead=not is_held(options.run))
        except RingtrainError:
            raise
        except Exception as error:
            why = describe_failure(error)
            raise RingtrainError(
                f"{name} did not take all of {str(options.run)!r}: {why.rstrip('.')}. Try again."
            ) from error
        print(escape(f"{options.run} is in {name}"))
    return 0
