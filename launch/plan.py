"""The command that starts a group of ranks on this machine: a pure function."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from . import PACKAGE

Controller = Literal["mpi", "gloo"]


def plan_group(
    num_ranks: int,
    controller: Controller,
    flags: Sequence[str],
    *,
    listener: Path,
    python: str,
    is_root: bool,
) -> list[str]:
    """The argv of a launcher with ``num_ranks`` ranks, each of which runs ``python -m ringtrain FLAGS``.

    Slots are given by hand: mpirun refuses more ranks than it counts cores, and inside a batch job it would spread them
    over the job's nodes. No core is bound, since each rank takes its own (see ``ringtrain.runtime.devices``).
    ``listener`` is the directory where ``launch.rank`` finds those who listen to the ranks.
    """
    hosts = f"localhost:{num_ranks}"
    rank = [python, "-m", f"{PACKAGE}.rank", str(listener), python, "-m", "ringtrain", *flags]
    if controller == "gloo":
        return [python, "-m", f"{PACKAGE}.gloo", "horovodrun", "--gloo", "-np", str(num_ranks), "-H", hosts, *rank]
    as_root = ["--allow-run-as-root"] if is_root else []
    return ["mpirun", *as_root, "-np", str(num_ranks), "--host", hosts, "--map-by", "slot", "--bind-to", "none", *rank]


def plan_restart(flags: Sequence[str], run: Path | None, *, here: Path) -> list[str]:
    """The flags of a restart: those of the first start, and where that one had its run directory.

    ``--resume never`` would otherwise begin anew beside it, each time. ``here`` is the ranks' current directory.
    """
    if run is None:
        return list(flags)
    out = run.relative_to(here) if run.is_relative_to(here) else run  # for the lines that name it to the user
    return [*flags, "--out", str(out), "--resume", "auto"]
