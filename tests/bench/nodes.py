"""A step on two nodes that a slow network joins: native sums against Horovod's.

    python -m tests.bench.nodes --models WIDE --rounds 7

The nodes are name spaces of this machine (tests/slurm), whose cores all four ranks share. What goes from one to the
other passes one queue of so many Gbit/s, for both directions together. It needs root, and Slurm (`make setup-tests`).
"""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path

from benchmarks.__main__ import run_experiments
from benchmarks.contenders import DIRECTORY, Command, Comparison, Experiment, contenders_of
from benchmarks.outcomes import RUN, read_training
from benchmarks.peers.peer_models import MODELS
from benchmarks.settings import BenchOptions, Length
from benchmarks.steps import AGAIN, plan_one_process, workload_flags
from tests.slurm.cluster import Cluster

SIZE = 4
SRUN = ("srun", "--mpi=pmix", "--kill-on-bad-exit=1", "--nodes=2", f"--ntasks={SIZE}", "--overcommit")
LENGTHS = {"CNN": Length(steps=20, log_every=5), "WIDE": Length(steps=20, log_every=5)}
SHORT = Length(steps=100, log_every=20)
BURST, LONGEST = "256kb", "50ms"  # of the queue: what it lets through at once, and how long it keeps a packet


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="WIDE", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--gbit", type=float, default=2.0, help="of the queue")
    parser.add_argument("--output", type=Path, default=Path("results/bench-nodes.json"))
    arguments = parser.parse_args()
    options = BenchOptions(rounds=arguments.rounds, size=SIZE, models=arguments.models, timeout=600)
    with Cluster() as cluster:
        limit = ["root", "tbf", "rate", f"{arguments.gbit}gbit", "burst", BURST, "latency", LONGEST]
        cluster.ask("tc", "qdisc", "add", "dev", "lo", *limit)
        experiments = [plan(cluster, model, arguments.gbit) for model in options.model_names]
        command = " ".join(["python -m tests.bench.nodes", *sys.argv[1:]])
        return run_experiments(experiments, options, command, arguments.output, functools.partial(print, flush=True))


def plan(cluster: Cluster, model: str, gbit: float) -> Experiment:
    """A model, by each backend."""
    length = LENGTHS.get(model, SHORT)

    def train(backend: str) -> Command:
        run = (sys.executable, "-m", "ringtrain", *workload_flags(model), *length.flags, "--backend", backend)
        argv = cluster.on_login([*SRUN, *run, "--out", f"{DIRECTORY}/{RUN}"])
        return Command(tuple(argv), {"SLURM_CONF": str(cluster.site / "slurm.conf")})

    contenders = contenders_of(
        read_training,
        ("native", "sums on each node, and between them by MPI", train("native")),
        ("native_again", AGAIN, train("native")),
        ("horovod", "Horovod over MPI", train("horovod")),
    )
    comparisons = (Comparison("native", "horovod", 1.2), Comparison("native_again", "native"))
    name = f"{model} on two nodes of two ranks, {gbit:g} Gbit/s for both directions"
    return Experiment(name, "a step", contenders, comparisons, plan_one_process(model, SIZE, length))


if __name__ == "__main__":
    sys.exit(main())
