"""MPI's own all-reduce from mpi4py, by sizes.

mpirun -np 2 --bind-to core python mpi_allreduce.py --sizes 4096,65536 --output DIR
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import peer_loop
import peer_sums


def main() -> None:
    arguments = peer_sums.parse_arguments(__doc__)
    from mpi4py import MPI

    ranks = MPI.COMM_WORLD
    peer_loop.pin(arguments, ranks.Get_rank())

    def prepare(values: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
        total = np.empty_like(values)

        def add() -> Any:
            ranks.Allreduce(values, total)
            return total

        return add, lambda outcome: outcome

    peer_sums.time_sums(arguments, ranks.Get_rank(), ranks.Get_size(), prepare)


if __name__ == "__main__":
    main()
