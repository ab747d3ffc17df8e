"""The MPI types of this site's srun."""

from __future__ import annotations

import re
from collections.abc import Callable

from ringtrain.runtime.processes import ask

HOROVODRUN = "horovodrun"  # starts the ranks where srun cannot


def choose_mpi(listing: str) -> str:
    """The best of what ``srun --mpi=list`` prints, for any version of Slurm.

    PMIx comes first: every Open MPI since 2.0 speaks it, and PMI2 only if it was built with Slurm's library.
    """
    names = re.findall(r"\b(?:pmix(?:_v\d+)?|pmi2)\b", listing)
    versions = sorted((name for name in names if name.startswith("pmix_v")), key=lambda name: int(name[6:]))
    for name in ("pmix", *reversed(versions), "pmi2"):
        if name in names:
            return name
    return HOROVODRUN


def ask_srun() -> str | None:
    """The output of ``srun --mpi=list``; None if there is no srun, or it does not answer."""
    status, words = ask(("srun", "--mpi=list"), seconds=20.0)
    return words if status == 0 else None


def find_mpi(print_line: Callable[[str], None], ask: Callable[[], str | None] = ask_srun) -> str:
    """Choose how to start the ranks on this site, with a note if it is not by srun alone."""
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
