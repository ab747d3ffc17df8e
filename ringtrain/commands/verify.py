"""Check that N processes train your model exactly as one does.

It trains the same batches under several numbers of processes, which it starts itself, and compares weights, optimizer
slots, losses and samples. Use no launcher. With --script it audits steps of a script of yours instead (see
`ringtrain verify --script --help`).

    python -m ringtrain verify
    python -m ringtrain verify --workload my_workload.py --world_sizes 1,2
"""

from __future__ import annotations

import functools
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from ringtrain.commands.parser import parse_arguments
from ringtrain.commands.preparing import Settings, check_settings, refuse_launcher
from ringtrain.config import to_plain
from ringtrain.errors import UsageError
from ringtrain.messages.escaping import escape
from ringtrain.runtime.world import World
from ringtrain.verify.world_sizes import DEFAULT_GLOBAL_BATCH_SIZE, parse_world_sizes, verify


@dataclass(frozen=True, kw_only=True)
class Options(Settings):
    world_sizes: str = "1,2,3"
    """numbers of processes, such as 1,2,3"""

    oracle: bool = False
    """also compare one process with a plain Keras loop, BatchNorm included"""


def main(arguments: Sequence[str], world: World) -> int:
    refuse_launcher("verify", world)
    if any(word.partition("=")[0] == "--script" for word in arguments):
        from ringtrain.commands.audit import audit_script

        return audit_script(arguments, world)
    explicit = {"global_batch_size": DEFAULT_GLOBAL_BATCH_SIZE, **parse_arguments(Options, arguments, world)}
    if "batch_size" in explicit:
        raise UsageError(
            f"batch_size is {explicit['batch_size']}, of each process; all numbers of processes are to train the same "
            f"batches. Give --global_batch_size ({DEFAULT_GLOBAL_BATCH_SIZE} unless you do)."
        )
    sizes = parse_world_sizes(explicit.pop("world_sizes", Options.world_sizes))
    with_oracle = explicit.pop("oracle", Options.oracle)
    check_settings(explicit)
    print_line = functools.partial(print, flush=True)
    try:
        with tempfile.TemporaryDirectory(prefix="ringtrain-verify-") as directory:
            settings = Path(directory) / "settings.yaml"
            settings.write_text(yaml.safe_dump(to_plain(explicit)), encoding="utf-8")
            print_line(f"training under each of the world sizes {', '.join(map(str, sizes))}")
            words = ["--config", str(settings)]
            for line in verify(sizes, words, Path(directory), with_oracle=with_oracle, print_line=print_line):
                print(escape(line))
    except (KeyboardInterrupt, SystemExit) as end:
        number = signal.SIGINT if isinstance(end, KeyboardInterrupt) else signal.SIGTERM
        print(f"ringtrain: verify was ended by {number.name}; its processes are gone.", file=sys.stderr)
        return 128 + number
    print("the world sizes train the same")
    return 0
