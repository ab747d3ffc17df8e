"""``bench allreduce``: sums over all ranks, by sizes."""

from __future__ import annotations

import sys

from ringtrain.bench.contenders import DIRECTORY, Command, Comparison, Contender, Experiment
from ringtrain.bench.outcomes import read_figures
from ringtrain.bench.settings import Settings
from ringtrain.bench.steps import PEERS, launch

SIZES = tuple(4**power for power in range(6, 14))  # 4 KiB to 64 MiB


def plan_sums(size: int, settings: Settings) -> Experiment:
    """ringtrain's collective, Horovod's and MPI's."""
    flags = ["--sizes", ",".join(map(str, SIZES)), "--output", DIRECTORY]
    own = Command(argv=launch(size, [sys.executable, "-m", "ringtrain.bench.own_sums", *flags]))
    horovod = [sys.executable, str(PEERS / "horovod_allreduce.py"), *flags]
    mpi = [sys.executable, str(PEERS / "mpi_allreduce.py"), *flags, *settings.flags]
    planned = {
        "ringtrain": ("ringtrain's collective under stock horovodrun", own),
        "ringtrain_again": ("the same once more (A/A)", own),
        "horovod_stock": ("hvd.allreduce under stock horovodrun", Command(argv=launch(size, horovod))),
        "horovod": (
            "hvd.allreduce with ringtrain's cores, threads and variables",
            Command(argv=launch(size, [*horovod, *settings.flags]), env=settings.env),
        ),
        "mpi": (
            "mpi4py's Allreduce on the same cores, spinning",
            Command(argv=("mpirun", "-np", str(size), "--oversubscribe", "--bind-to", "none", *mpi)),
        ),
    }
    return Experiment(
        name="allreduce",
        unit="a sum",
        contenders=tuple(
            Contender(name=name, description=description, commands=(command,), read=read_figures)
            for name, (description, command) in planned.items()
        ),
        comparisons=(
            Comparison(name="ringtrain_again", other="ringtrain"),
            *(Comparison(name="ringtrain", other=other) for other in ("horovod_stock", "horovod", "mpi")),
        ),
        num_bytes={str(num_bytes): num_bytes for num_bytes in SIZES},
    )


def bus_bandwidth(num_bytes: int, seconds: float, size: int) -> float:
    """Bytes per second on a link, whatever the number of ranks.

    A ring sends 2(n-1)/n of the data over each link (nccl-tests, doc/PERFORMANCE.md, "Bus bandwidth").
    """
    return num_bytes / seconds * 2 * (size - 1) / size
