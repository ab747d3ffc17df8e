"""A step on nodes that a slow network joins, against its rate, delay and loss of packets.

    python -m tests.bench.network
    python -m tests.bench.network --nodes 4 --models WIDE --gbit 1 --rounds 1

The nodes (tests/world/network.py) have one rank and one core each. A node sends through a queue of so many Gbit/s
(tc-tbf), so that both directions have the rate; a filter loses packets at random, of 9,000 bytes each in that row; a
process delays them (tests/world/delay.py). It needs root, and writes results/network.json after each run.
"""

import argparse
import contextlib
import json
import random
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.origin import describe_commit, describe_machine, read_load
from benchmarks.settings import Length
from benchmarks.steps import workload_flags
from tests.world.network import Network
from tests.world.processes import clean_environment, run_command

CONTENDERS = {
    "native": "--backend native",
    "horovod": "--backend horovod",
    "native fp16": "--backend native --compression fp16",
    "native bf16": "--backend native --compression bf16",
    "horovod fp16": "--backend horovod --compression fp16",
    "native, 4 micro-batches": "--backend native --accumulate 4",
}
PASSES = {"native, 4 micro-batches": 4}  # of a step; else 1
LENGTHS = {"CNN": Length(steps=20, log_every=5), "WIDE": Length(steps=8, log_every=2)}
DELAYS_MS, LOSS_PERCENT = (0.0, 1.0), 0.1  # of each of the two cables that a packet passes
LOSS_TOLERANCE = 0.02  # of the training's, relative to the first contender's: halves round
TIMEOUT_SECONDS = 180
# Instructions of classic BPF: drop (2) if a random number of 32 bits is at least so large; else let pass (-1).
DROP_AT_RANDOM = "4,32 0 0 4294963256,53 0 1 {},6 0 0 2,6 0 0 4294967295"


@dataclass(frozen=True)
class Link:
    gbit: float  # per second, of each direction
    delay_ms: float  # of each node's cable, besides what the kernel takes
    loss_percent: float = 0.0

    def __str__(self) -> str:
        delay = f", {2 * self.delay_ms:g} ms" if self.delay_ms else ""
        return f"{self.gbit:g} Gbit/s{delay}" + (f", {self.loss_percent:g} % lost" if self.loss_percent else "")

    def apply(self, network: Network) -> None:
        for node in network.nodes:
            run = network.run
            run(node, "tc qdisc replace dev eth0 clsact")
            run(node, "tc filter delete dev eth0 egress")
            run(node, "tc qdisc replace dev eth0 root pfifo")
            run(node, f"tc qdisc replace dev eth0 root tbf rate {self.gbit}gbit burst 1024kb latency 50ms")
            run(node, f"ip link set eth0 gso_max_segs {1 if self.loss_percent else 65535}")
            if self.loss_percent:
                least = DROP_AT_RANDOM.format(int(2**32 * (1 - self.loss_percent / 100)))
                run(node, "tc filter add dev eth0 egress bpf direct-action bytecode", least)


@dataclass
class Row:
    model: str
    link: Link
    contender: str
    flags: str
    sec_per_batch: list[float] = field(default_factory=list)  # of a global batch; of each round
    loss: float = 0.0  # of the last step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--models", default="CNN,WIDE")
    parser.add_argument("--gbit", default="1,10")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--contenders", default=";".join(CONTENDERS), help="with semicolons between")
    parser.add_argument("--output", type=Path, default=Path("results/network.json"))
    arguments = parser.parse_args()
    result: dict[str, Any] = {
        "command": " ".join(["python -m tests.bench.network", *sys.argv[1:]]),
        **describe_commit(),
        "machine": describe_machine(),
        "nodes": arguments.nodes,
        "load_before": read_load(),
    }
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # to end the ranks
    with contextlib.ExitStack() as stack:
        networks = {delay: stack.enter_context(Network(arguments.nodes, delay_sec=delay / 1000)) for delay in DELAYS_MS}
        rates = [float(word) for word in arguments.gbit.split(",")]
        links = [Link(gbit, delay) for delay in DELAYS_MS for gbit in rates] + [Link(rates[0], 0.0, LOSS_PERCENT)]
        rows = [
            Row(model, link, name, CONTENDERS[name])
            for model in arguments.models.split(",")
            for link in links
            for name in arguments.contenders.split(";")
        ]
        order = random.Random(0)
        for _ in range(arguments.rounds):
            for row in order.sample(rows, len(rows)):
                network = networks[row.link.delay_ms]
                row.link.apply(network)
                seconds, row.loss = measure(network, row)
                row.sec_per_batch.append(seconds)
                print(f"{row.model}, {row.link}, {row.contender}: {1000 * seconds:.1f} ms", flush=True)
                result |= {"load_after": read_load(), "rows": [asdict(each) for each in rows]}
                arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    check_losses(rows)
    print("\n".join(make_table(rows)))


def measure(network: Network, row: Row) -> tuple[float, float]:
    """Return the median seconds of a global batch, without the first interval, and the last loss."""
    length, passes = LENGTHS[row.model], PASSES.get(row.contender, 1)
    flags = Length(steps=length.steps // passes, log_every=max(1, length.log_every // passes)).flags
    with tempfile.TemporaryDirectory() as directory:
        train = [sys.executable, "-m", "ringtrain", *workload_flags(row.model), *flags, *row.flags.split()]
        rest = ["--checkpoint_every", "0", "--eval_every_epochs", "0", "--out", f"{directory}/run"]
        finished = run_command([*network.mpirun(), *train, *rest], env=clean_environment(), timeout=TIMEOUT_SECONDS)
        assert finished.rc == 0, finished.stderr
        text = Path(directory, "run", "metrics.jsonl").read_text()
    events = [event for event in map(json.loads, text.splitlines()) if event["event"] == "train"]
    return statistics.median(event["sec_per_step"] for event in events[1:]) / passes, events[-1]["loss"]


def check_losses(rows: Sequence[Row]) -> None:
    """Contenders of as many samples per step train the same, but for rounding."""
    for row in rows:
        same = [
            each for each in rows if each.model == row.model and PASSES.get(each.contender) == PASSES.get(row.contender)
        ]
        assert abs(row.loss - same[0].loss) <= LOSS_TOLERANCE * same[0].loss, row


def make_table(rows: Sequence[Row]) -> list[str]:
    """Milliseconds of a global batch, medians; the least of each line in bold."""
    names = list(dict.fromkeys(row.contender for row in rows))
    lines = [f"| model, network | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for model, link in dict.fromkeys((row.model, row.link) for row in rows):
        of_line = [row for row in rows if (row.model, row.link) == (model, link)]
        medians = [1000 * statistics.median(row.sec_per_batch) for row in of_line]
        words = [f"**{each:.0f}**" if each == min(medians) else f"{each:.0f}" for each in medians]
        lines.append(f"| {model}, {link} | {' | '.join(words)} |")
    return lines


if __name__ == "__main__":
    main()
