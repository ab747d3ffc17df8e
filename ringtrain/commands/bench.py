"""Time all-reduces of many sizes on the ranks that a launcher starts.

The columns are those of nccl-tests: the bytes that each rank gives, values of float32, rank 0's median time, the bytes
over that time (algbw), what each link of a ring would carry (busbw, which does not depend on the number of ranks), and
how many values of the sum are wrong.

    horovodrun -np 2 python -m ringtrain bench
    horovodrun -np 2 python -m ringtrain bench --max_bytes 1073741824
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ringtrain.collectives.connect import Backend
from ringtrain.collectives.objects import all_gather_object
from ringtrain.collectives.timing import VALUE_BYTES, bus_bandwidth, fit_ring, time_all_reduce
from ringtrain.commands.parser import parse_arguments
from ringtrain.commands.preparing import prepare
from ringtrain.config import Config
from ringtrain.errors import UsageError
from ringtrain.guard.causes import explaining_lost_ranks, explaining_memory
from ringtrain.messages.rules import at_least
from ringtrain.runtime.world import World
from ringtrain.terminal.console import open_console
from ringtrain.training.joining import joined

if TYPE_CHECKING:
    from ringtrain.collectives import Collective

COLUMNS = ("size (B)", "count", "time (us)", "algbw (GB/s)", "busbw (GB/s)", "wrong")


@dataclass(frozen=True, kw_only=True)
class Options:
    backend: Backend = Config.backend
    """what carries the sums"""

    min_bytes: int = 1024
    """bytes of the smallest sum"""

    max_bytes: int = 2**28
    """bytes of the largest sum"""

    factor: int = 4
    """how many times as large the next sum is"""

    calls: int = 20
    """timed sums of each size"""

    warm_up: int = 5
    """sums of each size before those"""

    def __post_init__(self) -> None:
        for name, least in (("min_bytes", VALUE_BYTES), ("factor", 2), ("calls", 1), ("warm_up", 0)):
            at_least(name, getattr(self, name), least)
        if self.max_bytes < self.min_bytes:
            raise UsageError(f"max_bytes is {self.max_bytes}; it must be at least min_bytes, {self.min_bytes}.")

    def sizes(self) -> Iterator[int]:
        """Multiples of VALUE_BYTES."""
        size = self.min_bytes
        while size <= self.max_bytes:
            yield size - size % VALUE_BYTES
            size *= self.factor


def main(arguments: Sequence[str], world: World) -> int:
    options = Options(**parse_arguments(Options, arguments, world))
    if world.size == 1:
        raise UsageError(
            "one process has no other to sum with. Start several: horovodrun -np 2 python -m ringtrain bench"
        )
    prepared = prepare({"backend": options.backend}, world)
    with (
        joined(prepared, world, command="bench") as (collective, _),
        explaining_lost_ranks(),
        explaining_memory(prepared.config),
    ):
        return measure(collective, options, prepared.device)


def measure(collective: Collective, options: Options, device: str) -> int:
    console = open_console(is_rank0=collective.world.is_rank0)
    world, times, num_wrong = collective.world, [], 0
    size = world.size
    console.line(f"all-reduce (sum) of float32 among {size} ranks by {collective.description}; rank 0 on {device}")
    console.line("  ".join(f"{column:>12}" for column in COLUMNS))
    for num_bytes in options.sizes():
        seconds, wrong = time_all_reduce(collective, num_bytes, calls=options.calls, warm_up=options.warm_up)
        wrong = sum(all_gather_object(collective, wrong, name=f"bench/{num_bytes}"))
        speeds = (num_bytes / seconds / 1e9, bus_bandwidth(num_bytes, seconds, size) / 1e9)
        cells = [str(num_bytes), str(num_bytes // VALUE_BYTES), f"{seconds * 1e6:.1f}", *(f"{s:.3f}" for s in speeds)]
        console.line("  ".join(f"{cell:>12}" for cell in [*cells, str(wrong)]))
        num_wrong += wrong
        times.append((num_bytes, seconds))
    line = describe_ring(world, times)
    if line:
        console.line(line)
    return 1 if num_wrong else 0


def describe_ring(world: World, times: Sequence[tuple[int, float]]) -> str:
    """Describe latency and rate of the links; empty if they do not fit, or are of several kinds."""
    if world.local_size == world.size:
        neighbours = "ranks of a node"
    elif world.local_size == 1:
        neighbours = "nodes"
    else:
        return ""
    if len(times) < 2:
        return ""
    link = fit_ring(times, world.size)
    if link is None:
        return ""
    return f"as a ring: {link.gbit:.3g} Gbit/s and {link.latency_us:.3g} us a message between the {neighbours}"
