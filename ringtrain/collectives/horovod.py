"""Collectives by Horovod, over MPI, Gloo or NCCL, as it was built and started."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import http.client
import json
import os
import time
from collections.abc import Collection, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ringtrain.collectives.base import Collective, Totals, mark_collective
from ringtrain.collectives.mpi import finalize_mpi, gather_by_mpi, require_size
from ringtrain.errors import UsageError
from ringtrain.messages.defects import describe_failed_import
from ringtrain.runtime.devices import DYNAMIC_TIMELINE
from ringtrain.runtime.processes import list_threads
from ringtrain.runtime.world import GLOO_LAUNCHER, World

if TYPE_CHECKING:
    import tensorflow as tf

MAX_DIFFERENCES = 20
RENDEZVOUS_SECONDS = 30.0  # for an answer of Horovod's own launcher, which is there before its ranks
RANK_0_SECONDS = 300.0  # ranks start apart, by the time that a slow file system takes to load TensorFlow
DIFFERENT_SETTINGS = (
    "Horovod's settings in the environment are not the same on all ranks; nothing was trained. Let the launcher set "
    "them everywhere, such as by mpirun -x NAME."
)
LOWEST_PRIORITY = 19  # the largest "nice" value

# Those of Horovod's settings by which its processes decide on their own what to send next, and how. Others are rank
# 0's alone (timeline, log), or differ by rank or node (network interface, affinity).
HOROVOD_SETTINGS = tuple(
    f"HOROVOD_{name}"
    for name in (
        "ADASUM_MPI_CHUNK_SIZE", "AUTOTUNE", "AUTOTUNE_BAYES_OPT_MAX_SAMPLES", "AUTOTUNE_GAUSSIAN_PROCESS_NOISE",
        "AUTOTUNE_STEPS_PER_SAMPLE", "AUTOTUNE_WARMUP_SAMPLES", "BATCH_D2D_MEMCOPIES", "CACHE_CAPACITY", "CONTROLLER",
        "CPU_OPERATIONS", "CYCLE_TIME", "DISABLE_GROUP_FUSION", "DYNAMIC_PROCESS_SETS", "ELASTIC",
        "ENABLE_ASYNC_COMPLETION", "ENABLE_XLA_OPS", "FUSION_THRESHOLD", "HIERARCHICAL_ALLGATHER",
        "HIERARCHICAL_ALLREDUCE", "MPI_THREADS_DISABLE", "NUM_NCCL_STREAMS", "STALL_CHECK_DISABLE",
        "STALL_CHECK_TIME_SECONDS", "STALL_SHUTDOWN_TIME_SECONDS", "TORUS_ALLREDUCE",
    )
)  # fmt: skip


class HorovodCollective(Collective):
    """The collective of a run under a launcher."""

    def __init__(self, world: World, hvd: ModuleType, threads: Collection[int] = ()) -> None:
        """Horovod has been started; ``threads`` are those that it and MPI have started in this process."""
        self.world = world
        controller = "MPI" if hvd.mpi_enabled() else "Gloo"
        self.description = f"Horovod over {controller}" + (" and NCCL" if hvd.nccl_built() else "")
        self.hvd = hvd
        self.threads = threads

    def all_reduce(
        self, tensors: Sequence[tf.Tensor], *, name: str, **_: Any
    ) -> Totals:  # Horovod agrees on an order in every cycle, and gives memory of the rank's own
        options = {"op": self.hvd.Sum, "name": name, "ignore_name_scope": _is_whole(name)}
        if len(tensors) == 1:  # it may be reduced in place, without the copies into a fusion buffer
            totals = [self.hvd.allreduce(tensors[0], **options)]
        else:
            totals = self.hvd.grouped_allreduce(list(tensors), **options)
        return Totals(mark_collective(totals, name))

    @property
    def may_use_mpi(self) -> bool:  # type: ignore[override]
        """True if other threads than Horovod's own may call MPI as well."""
        if not self.hvd.mpi_enabled():
            return False
        from mpi4py import MPI

        return bool(MPI.Query_thread() == MPI.THREAD_MULTIPLE)

    def yield_core(self) -> None:
        """Let the threads of Horovod and MPI run when nothing else of this process wants the core.

        Horovod's thread meets those of the other ranks in every cycle, whether there is anything to sum or not, and
        takes the only core of a rank from what computes. When that waits for a sum of Horovod's, the core is free.
        """
        for thread in self.threads:
            with contextlib.suppress(OSError):  # it has ended
                os.setpriority(os.PRIO_PROCESS, thread, LOWEST_PRIORITY)

    def all_gather(self, tensor: tf.Tensor, *, name: str) -> tf.Tensor:
        gathered = self.hvd.allgather(tensor, name=name, ignore_name_scope=_is_whole(name))
        return mark_collective([gathered], name)[0]

    def reduce_scatter(self, tensor: tf.Tensor, *, name: str) -> tf.Tensor:
        mine = self.hvd.reducescatter(tensor, op=self.hvd.Sum, name=name)
        mine.set_shape([tensor.shape[0] // self.world.size])
        return mark_collective([mine], name)[0]

    def broadcast(self, tensors: Sequence[tf.Tensor], *, name: str) -> list[tf.Tensor]:
        return [
            self.hvd.broadcast(tensor, root_rank=0, name=f"{name}/{number}") for number, tensor in enumerate(tensors)
        ]

    def start_timeline(self, directory: str, name: str) -> None:
        if self._has_dynamic_timeline:
            self.hvd.start_timeline(os.path.join(directory, f"horovod-{name}.json"))

    def stop_timeline(self) -> None:
        if self._has_dynamic_timeline:
            self.hvd.stop_timeline()

    @property
    def _has_dynamic_timeline(self) -> bool:
        """Not if HOROVOD_TIMELINE names a file: Horovod writes it from the start to the end."""
        return os.environ.get("HOROVOD_TIMELINE") == DYNAMIC_TIMELINE

    def close(self) -> None:
        self.hvd.shutdown()
        finalize_mpi()  # Horovod does not end an MPI that it did not start


def _is_whole(name: str) -> bool:
    """True if the ranks meet by this name alone.

    The scopes around it are those of layers, which Keras numbers in the order of their creation, and a rank may have
    created more of them. Of what Horovod calls a scope it is all before the last slash.
    """
    return "/" not in name


def connect_horovod(world: World) -> HorovodCollective:
    """Start Horovod and hold what it sees against what the launcher said."""
    require_same_settings_by_rendezvous(world)
    try:
        import horovod.tensorflow as hvd
    except ModuleNotFoundError as error:
        if error.name != "horovod":
            raise _cannot_load(error) from error
        raise UsageError("Horovod is not installed. Run: make setup HOROVOD=1, or use --backend auto.") from error
    except (Exception, SystemExit) as error:  # a broken or half-installed package may raise anything
        raise _cannot_load(error) from error
    threads = list_threads()
    try:
        hvd.init()
    except (ImportError, ValueError, AttributeError) as error:  # built without the controller of the launcher; a part
        raise _cannot_load(error) from error
    threads = list_threads() - threads
    places = {"local_rank": hvd.local_rank(), "local_size": hvd.local_size()}
    seen = dataclasses.replace(world, rank=hvd.rank(), size=hvd.size(), **places)
    for who, size in (("Horovod", seen.size), ("mpi4py", _mpi4py_size(hvd, world))):
        require_size(world, who, size)
    if seen != world:
        raise UsageError(
            f"{world.launcher} says {world}, but Horovod says {seen}. Start the run again in a clean shell.",
            reach="rank",
        )
    if hvd.mpi_enabled():
        _require_same_settings(world)
    return HorovodCollective(world, hvd, threads)


def _cannot_load(error: BaseException) -> UsageError:
    return UsageError(
        f"Horovod cannot be loaded: {describe_failed_import(error)}. It must be built against the TensorFlow that "
        "is installed: run `make setup`, or see `horovodrun --check-build`."
    )


def _require_same_settings(world: World) -> None:
    """See that Horovod's own settings are the same on all ranks: by MPI alone, before the first collective of Horovod.

    With some of them different, such as the capacity of its cache, its processes wait in that for each other, for ever.
    So the error is every rank's.
    """
    from mpi4py import MPI

    if MPI.Query_thread() != MPI.THREAD_MULTIPLE:  # Horovod's own thread uses MPI at the same time
        return
    ranks = gather_by_mpi(_settings_of(world))
    if differences := [line for rank, its in enumerate(ranks) for line in _find_differences(rank, its, ranks[0])]:
        atexit.register(os._exit, UsageError.exit_code)  # before Horovod's own way out, which would wait as well
        error = UsageError("\n  ".join([DIFFERENT_SETTINGS, *differences[:MAX_DIFFERENCES]]))
        error.is_agreed = True
        raise error


def _settings_of(world: World) -> list[str]:
    """This rank's node and Horovod's settings there."""
    return [world.node, *(os.environ.get(name, "nothing") for name in HOROVOD_SETTINGS)]


def _find_differences(rank: int, its: Sequence[str], first: Sequence[str]) -> list[str]:
    """The settings of a rank that differ from those of rank 0."""
    return [
        f"{name}: rank {rank} on {its[0]} has {own}, rank 0 on {first[0]} has {other}"
        for name, own, other in zip(HOROVOD_SETTINGS, its[1:], first[1:], strict=True)
        if own != other
    ]


def require_same_settings_by_rendezvous(world: World) -> None:
    """See, before Horovod starts over Gloo, that its launcher is there and that its settings are rank 0's.

    The launcher's server, where the processes find each other, keeps any values by their names. With other settings
    Horovod's first collective would wait for ever, and without the server it ends within C++.
    """
    names = ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT")
    if world.launcher != GLOO_LAUNCHER or any(name not in os.environ for name in names):
        return
    place = ":".join(os.environ[name] for name in names)
    mine = _settings_of(world)
    try:
        if world.is_rank0:
            _ask_rendezvous(place, json.dumps(mine).encode())
            return
        end, pause = time.monotonic() + RANK_0_SECONDS, 0.05
        while (answer := _ask_rendezvous(place)) is None:
            if time.monotonic() > end:
                text = "rank 0 did not come to Horovod's launcher in time. Look for its own error."
                raise UsageError(text, reach="rank")
            time.sleep(pause)
            pause = min(1.0, 1.5 * pause)  # a thousand ranks ask one server
    except (OSError, http.client.HTTPException) as error:
        raise UsageError(
            f"Horovod's launcher does not answer at {place} (HOROVOD_GLOO_RENDEZVOUS_ADDR and _PORT): {error}. It has "
            "ended, or a firewall is between it and this node. Start the run again.",
            reach="rank",
        ) from None
    if differences := _find_differences(world.rank, mine, json.loads(answer)):
        raise UsageError("\n  ".join([DIFFERENT_SETTINGS, *differences[:MAX_DIFFERENCES]]), reach="rank")


def _ask_rendezvous(place: str, value: bytes | None = None) -> bytes | None:
    """Keep rank 0's value at the launcher's server, or read it; None if it is not there yet."""
    connection = http.client.HTTPConnection(place, timeout=RENDEZVOUS_SECONDS)
    try:
        connection.request("GET" if value is None else "PUT", "/ringtrain/settings", value)
        response = connection.getresponse()
        return response.read() if response.status == http.HTTPStatus.OK else None
    finally:
        connection.close()


def _mpi4py_size(hvd: ModuleType, world: World) -> int:
    """The size that mpi4py sees, where MPI is in use at all."""
    if not hvd.mpi_enabled():
        return world.size
    try:
        import mpi4py

        mpi4py.rc.initialize = False  # Horovod has started MPI, and ends it
        from mpi4py import MPI
    except (Exception, SystemExit) as error:  # a broken or half-installed package may raise anything
        raise UsageError(
            f"mpi4py cannot be loaded: {describe_failed_import(error)}. Install it built against Horovod's MPI: "
            "run `make setup`, or see python -m ringtrain doctor."
        ) from error
    return MPI.COMM_WORLD.Get_size() if MPI.Is_initialized() else 1
