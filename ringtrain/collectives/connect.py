"""Backend selection, and checks that its sums are right."""

from __future__ import annotations

import os
from typing import Literal

from ringtrain.collectives.base import Collective, Solo
from ringtrain.collectives.objects import all_gather_object
from ringtrain.errors import UsageError
from ringtrain.runtime.devices import can_share_gpus, uses_horovod
from ringtrain.runtime.world import GLOO_LAUNCHER, World

SIZES = (3, 1000)  # two tensors of one fused message


Backend = Literal["auto", "native", "horovod", "solo"]


def connect(backend: Backend, world: World) -> Collective:
    if backend == "solo" and world.size > 1:
        raise UsageError(
            f"backend is 'solo', but {world.launcher} started {world.size} processes, each of which would train alone. "
            "Use --backend auto, or start one process."
        )
    if world.size == 1 and backend != "horovod":
        return Solo(world)
    if backend == "native" and world.launcher == GLOO_LAUNCHER:
        raise UsageError(
            f"backend is 'native', which needs MPI, but {world.launcher} starts ranks without MPI. Start them by "
            "mpirun, or use --backend auto, by which Horovod carries what is not summed natively."
        )
    from ringtrain.collectives.horovod import connect_horovod
    from ringtrain.collectives.mpi import connect_mpi, require_same_carrier

    connects_by_horovod = uses_horovod(backend, world.launcher)
    if world.launcher != GLOO_LAUNCHER and world.size > 1:
        require_same_carrier(world, "Horovod" if connects_by_horovod else "MPI")
    return connect_horovod(world) if connects_by_horovod else connect_mpi(world)


def with_native_sums(collective: Collective, backend: Backend = "auto", *, stall_seconds: float = 0.0) -> Collective:
    """Return the same ranks, with native sums if possible. Collective.

    Between nodes "auto" keeps Horovod: native sums were not measured on a real network. "native" raises UsageError if
    impossible. Without a watchdog, ranks report waits of ``stall_seconds``.
    """
    is_one_node = collective.world.local_size == collective.world.size
    is_left_alone = backend == "horovod" or (backend == "auto" and not (is_one_node or collective.is_ordered))
    if isinstance(collective, Solo) or is_left_alone:
        return collective
    from ringtrain.collectives.native.backend import ON_GPUS, Native, join

    native = join(collective, stall_seconds=stall_seconds)
    if isinstance(native, Native):
        return native
    if backend == "native":
        raise UsageError(
            f"backend is 'native', which sums on the cores of equal nodes, but {native}. Use --backend auto."
        )
    if native != ON_GPUS:
        collective.description += f", and no sum natively: {native}"
    elif collective.is_ordered:
        raise UsageError(f"{native}, whose sums Horovod carries over NCCL, but it is not installed: make setup GPU=1.")
    return collective


def require_working_sums(collective: Collective, gpu: str | None) -> None:
    """Check that no two ranks share a GPU, and that sums are right. Collective.

    Under Slurm's ``--gpus-per-task=1`` a rank cannot see if others share its GPU. NCCL supports neither shared GPUs by
    default, nor GPUs with cores. Horovod without a kernel for this GPU or driver returns fused tensors unchanged.
    ``gpu``: from ``devices.own_gpu``.
    """
    world = collective.world
    ranks = all_gather_object(collective, [world.rank, world.node, gpu], name="checks/ranks")
    owners: dict[tuple[str, str], list[int]] = {}
    for rank, node, its_gpu in ranks:
        if its_gpu is not None:
            owners.setdefault((node, its_gpu), []).append(rank)
    for (node, its_gpu), sharing in owners.items():
        if len(sharing) > 1 and not can_share_gpus(os.environ):
            raise UsageError(
                f"ranks {', '.join(map(str, sharing))} on {node} have the same GPU ({its_gpu}), and each "
                "rank needs its own. Start at most one rank for each GPU of a node, show each its own "
                "(srun --gpus-per-task=1), or set CUDA_VISIBLE_DEVICES= to compute on the cores."
            )
    on_cores = {rank: node for rank, node, its_gpu in ranks if its_gpu is None}
    if owners and on_cores:
        raise UsageError(
            f"rank {', '.join(map(str, on_cores))} on {', '.join(sorted(set(on_cores.values())))} computes on cores, "
            "the others on GPUs, and NCCL sums only between GPUs. Run python -m ringtrain doctor there, or set "
            "CUDA_VISIBLE_DEVICES= on all nodes to compute on cores."
        )
    expected = sum(rank + 1.0 for rank, _, _ in ranks)
    found = all_gather_object(collective, find_wrong_sum(collective, expected), name="checks/sums")
    wrong = {rank: value for (rank, _, _), value in zip(ranks, found, strict=True) if value is not None}
    if wrong:
        remedy = "It was compiled for other GPUs, or for a newer driver: make setup GPU=1 on such a machine"
        raise UsageError(
            f"{collective.description} sums wrongly: rank + 1 over all ranks is {expected:g}, but "
            f"{next(iter(wrong.values())):g} on rank {', '.join(map(str, wrong))}. "
            f"{remedy if owners else 'Compile it again: make setup'}."
        )


def find_wrong_sum(collective: Collective, expected: float) -> float | None:
    """Sum (rank + 1) in fused tensors."""
    import tensorflow as tf

    tensors = [tf.fill([size], collective.world.rank + 1.0) for size in SIZES]
    totals = collective.all_reduce(tensors, name="checks/sum")
    return next((float(value) for total in totals for value in total.numpy() if value != expected), None)
