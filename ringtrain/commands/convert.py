"""Convert an image folder or CIFAR-10 to TFRecord files.

Of CIFAR-10 it takes the binary files.

    python -m ringtrain convert images records
    python -m ringtrain convert data records --kind cifar10 --shards 8
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Literal

from ringtrain.commands.parser import parse_arguments
from ringtrain.commands.preparing import refuse_launcher
from ringtrain.errors import UsageError
from ringtrain.messages.escaping import escape
from ringtrain.messages.rules import printable
from ringtrain.runtime.world import World
from ringtrain.terminal.startup import quiet_start
from ringtrain.training.joining import pin

MAX_SHARDS = 99_999  # five digits in file names


@dataclass(frozen=True)
class Options:
    source: Path
    """directory with train/<class>/*.jpg|png, or of CIFAR-10's files"""

    destination: Path
    """directory to make; it must not exist, or be empty"""

    _: KW_ONLY

    shards: int | None = None
    """files for each split (about 128 MiB a file)"""

    kind: Literal["auto", "image_folder", "cifar10"] = "auto"
    """what the source is"""

    def __post_init__(self) -> None:
        printable("destination", self.destination)
        if self.shards is not None and not 1 <= self.shards <= MAX_SHARDS:
            raise UsageError(f"shards is {self.shards}; it must be from 1 to {MAX_SHARDS:,}.")


def main(arguments: Sequence[str], world: World) -> int:
    options = Options(**parse_arguments(Options, arguments, world))
    refuse_launcher("convert", world)
    pin(world)
    with quiet_start():
        import tensorflow as tf

        # A GPU's memory may be in use. TensorFlow's warnings about a missing driver are suppressed here.
        tf.config.set_visible_devices([], "GPU")
        from ringtrain.data.formats.conversion import convert
    made = convert(options.source, options.destination, kind=options.kind, num_shards=options.shards)
    print(escape(f"{options.destination}: {made}"))
    return 0
