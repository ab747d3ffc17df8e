"""List the built-in workloads and their data.

The table has the model, the data, the batch size, the length and the number of parameters of each.

    python -m ringtrain workloads
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ringtrain.commands.parser import parse_arguments
from ringtrain.runtime.world import World
from ringtrain.workloads import BUILT_IN, load_workload


@dataclass(frozen=True)
class Options:
    pass


def main(arguments: Sequence[str], world: World) -> int:
    parse_arguments(Options, arguments, world)
    if world.is_rank0:
        print(list_workloads())
    return 0


class Entry(NamedTuple):
    what: str
    data: str  # for --data_dir
    parameters: int  # inception: with 10 classes


ENTRIES: Mapping[str, Entry] = {
    "autoencoder": Entry("conv. autoencoder", "CIFAR-10", 3_101_443),
    "cifar10": Entry("tutorial's CNN", "CIFAR-10", 1_068_298),
    "cifar10_resnet": Entry("residual CNN", "CIFAR-10", 1_973_920),
    "digits": Entry("small CNN", "none", 121_994),
    "inception": Entry("Inception v3", "images", 22_030_260),
    "polynomial": Entry("y = 5x² + 3", "none", 3),
}
NOTES = """\
none      bundled, or synthetic
CIFAR-10  --data_dir DIR: its binary files; downloaded there if they are missing
images    --data_dir DIR: an image folder, or TFRecord files
--synthetic true trains each of them on synthetic data of the same shape.

Settings of one:  python -m ringtrain --workload NAME --print_config
Train it:         horovodrun -np 2 python -m ringtrain --workload NAME
Your own:         python -m ringtrain init my_workload.py"""


def list_workloads() -> str:
    rows = [("workload", "model", "data", "batch", "length", "parameters")]
    for name in sorted(BUILT_IN):
        entry, defaults = ENTRIES[name], load_workload(name).defaults
        whole, steps = defaults.get("global_batch_size"), defaults.get("steps")
        batch = f"{whole} in all" if whole else f"{defaults['batch_size']}/rank"
        length = f"{steps} steps" if steps else f"{defaults['epochs']} epochs"
        rows.append((name, entry.what, entry.data, batch, length, f"{entry.parameters:,}"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join([*cells[:-1], f"{row[-1]:>{widths[-1]}}"]).rstrip())
    return "\n".join([*lines, "", NOTES])
