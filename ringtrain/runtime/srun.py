"""MPI types of the site's srun."""

from __future__ import annotations

import re
from collections.abc import Callable

from ringtrain.runtime.processes import ask

HOROVODRUN = "horovodrun"  # starts the ranks if srun cannot


def choose_mpi(listing: str) -> str:
    """Prefer PMIx: every Open MPI since 2.0 supports it; PMI2 needs Slurm's library."""
    names = re.findall(r"\b(?:pmix(?:_v\d+)?|pmi2)\b", listing)
    versions = sorted((name for name in names if name.startswith("pmix_v")), key=lambda name: int(name[6:]))
    for name in ("pmix", *reversed(versions), "pmi2"):
        if name in names:
            return name
    return HOROVODRUN


def ask_srun() -> str | None:
    status, words = ask(("srun", "--mpi=list"), seconds=20.0)
    return words if status == 0 else None


def find_mpi(print_line: Callable[[str], None], ask: Callable[[], str | None] = ask_srun) -> str:
    listing = ask()
    if listing is None:
        print_line(
            "no srun here says which kinds of MPI it has: taking --mpi pmix. Give --mpi where the cluster has another."
        )
        return "pmix"
    chosen = choose_mpi(listing)
    if chosen == HOROVODRUN:
        print_line(f"this site's srun knows neither PMIx nor PMI2: taking {HOROVODRUN}, which needs ssh to all nodes.")
    return chosen
