"""Collectives by Horovod, over MPI, Gloo or NCCL."""

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
from typing import TYPE_CHECKING

from ringtrain.collectives.base import Collective, mark_collective
from ringtrain.collectives.mpi import finalize_mpi, gather_by_mpi, require_size
from ringtrain.errors import UsageError
from ringtrain.messages.defects import describe_failed_import
from ringtrain.runtime.devices import DYNAMIC_TIMELINE
from ringtrain.runtime.processes import list_threads
from ringtrain.runtime.world import GLOO_LAUNCHER, World

if TYPE_CHECKING:
    import tensorflow as tf

MAX_DIFFERENCES = 20
RENDEZVOUS_SECONDS = 30.0  # for Horovod's launcher, which starts before its ranks
RANK_0_SECONDS = 300.0  # slow file systems delay TensorFlow's import
DIFFERENT_SETTINGS = (
    "Horovod's settings in the environment are not the same on all ranks; nothing was trained. Let the launcher set "
    "them everywhere, such as by mpirun -x NAME."
)
LOWEST_PRIORITY = 19  # largest "nice" value

# Settings by which each process decides what to send next. Others are rank 0's alone or may differ.
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
    sums_bfloat16 = False

    def __init__(self, world: World, hvd: ModuleType, threads: Collection[int] = ()) -> None:
        """``threads``: those that Horovod and MPI started in this process."""
        super().__init__(world)
        controller = "MPI" if hvd.mpi_enabled() else "Gloo"
        self.description = f"Horovod over {controller}" + (" and NCCL" if hvd.nccl_built() else "")
        self.hvd = hvd
        self.threads = threads

    def all_reduce(self, tensors: Sequence[tf.Tensor], *, name: str) -> list[tf.Tensor]:
        options = {"op": self.hvd.Sum, "name": name, "ignore_name_scope": _is_whole(name)}
        if len(tensors) == 1:  # in place, without the fusion buffer
            totals = [self.hvd.allreduce(tensors[0], **options)]
        else:
            totals = self.hvd.grouped_allreduce(list(tensors), **options)
        return mark_collective(totals, name)

    @property
    def may_use_mpi(self) -> bool:  # type: ignore[override]
        """True if other threads may call MPI."""
        if not self.hvd.mpi_enabled():
            return False
        from mpi4py import MPI

        return bool(MPI.Query_thread() == MPI.THREAD_MULTIPLE)

    def yield_core(self) -> None:
        """Lower the priority of Horovod's threads: they synchronize in every cycle, also when idle, on a rank's only
        core.
        """
        for thread in self.threads:
            with contextlib.suppress(OSError):  # the thread has exited
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
        """False if Horovod writes the file from start to end."""
        return os.environ.get("HOROVOD_TIMELINE") == DYNAMIC_TIMELINE

    def close(self) -> None:
        self.hvd.shutdown()
        finalize_mpi()  # Horovod finalizes only its own


def _is_whole(name: str) -> bool:
    """True if the ranks match by this name alone.

    Name scopes are layers', numbered by Keras; a rank may have created more. Horovod's scope ends at the last slash.
    """
    return "/" not in name


def connect_horovod(world: World) -> HorovodCollective:
    require_same_settings_by_rendezvous(world)
    try:
        import horovod.tensorflow as hvd
    except ModuleNotFoundError as error:
        if error.name != "horovod":
            raise _cannot_load(error) from error
        raise UsageError("Horovod is not installed. Run: make setup HOROVOD=1, or use --backend auto.") from error
    except (Exception, SystemExit) as error:  # broken packages raise anything
        raise _cannot_load(error) from error
    threads = list_threads()
    try:
        hvd.init()
    except (ImportError, ValueError, AttributeError) as error:  # built without the launcher's controller
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
    """Check by MPI, and raise on every rank: Horovod's first collective may deadlock otherwise."""
    from mpi4py import MPI

    if MPI.Query_thread() != MPI.THREAD_MULTIPLE:  # Horovod's thread uses MPI concurrently
        return
    ranks = gather_by_mpi(_settings_of(world))
    if differences := [line for rank, its in enumerate(ranks) for line in _find_differences(rank, its, ranks[0])]:
        atexit.register(os._exit, UsageError.exit_code)  # Horovod's own exit handler would block
        error = UsageError("\n  ".join([DIFFERENT_SETTINGS, *differences[:MAX_DIFFERENCES]]))
        error.is_agreed = True
        raise error


def _settings_of(world: World) -> list[str]:
    return [world.node, *(os.environ.get(name, "nothing") for name in HOROVOD_SETTINGS)]


def _find_differences(rank: int, its: Sequence[str], first: Sequence[str]) -> list[str]:
    return [
        f"{name}: rank {rank} on {its[0]} has {own}, rank 0 on {first[0]} has {other}"
        for name, own, other in zip(HOROVOD_SETTINGS, its[1:], first[1:], strict=True)
        if own != other
    ]


def require_same_settings_by_rendezvous(world: World) -> None:
    """Check before Horovod starts over Gloo.

    It would deadlock with settings other than rank 0's, and abort in C++ without the rendezvous server.
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
            pause = min(1.0, 1.5 * pause)  # a thousand ranks poll one server
    except (OSError, http.client.HTTPException) as error:
        raise UsageError(
            f"Horovod's launcher does not answer at {place} (HOROVOD_GLOO_RENDEZVOUS_ADDR and _PORT): {error}. It has "
            "ended, or a firewall is between it and this node. Start the run again.",
            reach="rank",
        ) from None
    if differences := _find_differences(world.rank, mine, json.loads(answer)):
        raise UsageError("\n  ".join([DIFFERENT_SETTINGS, *differences[:MAX_DIFFERENCES]]), reach="rank")


def _ask_rendezvous(place: str, value: bytes | None = None) -> bytes | None:
    """Write (rank 0) or read the value; None if absent."""
    connection = http.client.HTTPConnection(place, timeout=RENDEZVOUS_SECONDS)
    try:
        connection.request("GET" if value is None else "PUT", "/ringtrain/settings", value)
        response = connection.getresponse()
        return response.read() if response.status == http.HTTPStatus.OK else None
    finally:
        connection.close()


def _mpi4py_size(hvd: ModuleType, world: World) -> int:
    if not hvd.mpi_enabled():
        return world.size
    try:
        import mpi4py

        mpi4py.rc.initialize = False  # Horovod starts and finalizes MPI
        from mpi4py import MPI
    except (Exception, SystemExit) as error:  # broken packages raise anything
        raise UsageError(
            f"mpi4py cannot be loaded: {describe_failed_import(error)}. Install it built against Horovod's MPI: "
            "run `make setup`, or see python -m ringtrain doctor."
        ) from error
    return MPI.COMM_WORLD.Get_size() if MPI.Is_initialized() else 1
