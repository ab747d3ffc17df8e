"""Send what a run has logged to experiment trackers, each step once.

A run with --tracker does so while it trains; this sends what was left, and runs of the past. One process.

    python -m ringtrain track runs/digits --to mlflow
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from ringtrain.commands.parser import parse_arguments
from ringtrain.commands.preparing import refuse_launcher
from ringtrain.config import trackers_of
from ringtrain.errors import RingtrainError
from ringtrain.messages.defects import describe_defect
from ringtrain.messages.escaping import escape
from ringtrain.runtime.world import World
from ringtrain.tracking.base import require_installed


@dataclass(frozen=True)
class Options:
    run: Path
    """directory of a run"""

    _: KW_ONLY

    to: str
    """mlflow or wandb, both with a comma between"""


def main(arguments: Sequence[str], world: World) -> int:
    options = Options(**parse_arguments(Options, arguments, world))
    refuse_launcher("track", world)
    trackers = trackers_of(options.to)
    require_installed(trackers)
    from ringtrain.tracking.feed import Feed

    for name in trackers:
        try:
            Feed(options.run, name).send()
        except RingtrainError:
            raise
        except Exception as error:
            raise RingtrainError(
                f"{name} did not take all of {str(options.run)!r}: {describe_defect(error)}. The same command goes on."
            ) from error
        print(escape(f"{options.run} is in {name}"))
    return 0
