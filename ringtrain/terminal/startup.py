"""Start of a run: filters TensorFlow's harmless messages, describes the run."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ringtrain import __version__
from ringtrain.messages.ranks import name_ranks
from ringtrain.runtime.devices import describe_shared_memory, misses_gpus
from ringtrain.runtime.machine import has_gpu_driver
from ringtrain.runtime.versions import package_version

if TYPE_CHECKING:
    from ringtrain.collectives import Collective
    from ringtrain.runtime.devices import DevicePlan

MAX_LISTED_RANKS = 16  # of more the first of each node
# Printed as errors at every import.
HARMLESS = re.compile(
    rb"Unable to register cu(FFT|DNN|BLAS) factory|before absl::InitializeLog\(\)"
    rb"|computation_placer\.cc.*already registered"
)
# From CUDA builds on machines without GPUs.
HARMLESS_WITHOUT_GPU = re.compile(rb"failed call to cuInit|cuda_diagnostics\.cc")
# TensorFlow 2.22 appends lines to some messages, from such a title to an empty line.
TRACE_TITLE = b"=== Source Location Trace:"
# TensorFlow 2.21 prints these before it reads TF_CPP_MIN_LOG_LEVEL.
BELOW_LEVEL = {"1": (b"I0000 ",), "2": (b"I0000 ", b"W0000 "), "3": (b"I0000 ", b"W0000 ", b"E0000 ")}


@contextlib.contextmanager
def quiet_start() -> Iterator[None]:
    """Filter messages by a child process, so that the last output of a crash is shown."""
    sys.stderr.flush()
    error_stream = os.dup(2)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writer)
        _filter_lines(reader, error_stream)
    os.close(reader)
    os.dup2(writer, 2)
    os.close(writer)
    try:
        with skipping_garbage_collection():
            yield
    finally:
        sys.stderr.flush()
        os.dup2(error_stream, 2)
        os.close(error_stream)
        os.waitpid(child, 0)


@contextlib.contextmanager
def skipping_garbage_collection() -> Iterator[None]:
    """Objects of TensorFlow's import live until exit; scanning them doubles its CPU time."""
    if "tensorflow" in sys.modules or not gc.isenabled():
        yield
        return
    gc.collect()  # for gc.freeze
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _filter_lines(reader: int, error_stream: int) -> None:
    """Never returns."""
    try:
        log_level = os.environ.get("TF_CPP_MIN_LOG_LEVEL", "")
        with os.fdopen(reader, "rb") as lines:
            for line in without_harmless(lines, has_gpu=has_gpu_driver(), log_level=log_level):
                os.write(error_stream, line)
    finally:
        os._exit(0)


def without_harmless(lines: Iterable[bytes], *, has_gpu: bool, log_level: str) -> Iterator[bytes]:
    """Leave out TensorFlow's harmless messages, with the lines that belong to them.

    Args:
        lines: of stderr, each with its line break.
        has_gpu: messages about a missing GPU are kept.
        log_level: ``TF_CPP_MIN_LOG_LEVEL``; messages below it are left out.
    """
    below_level = BELOW_LEVEL.get(log_level, ())
    was_left_out = False
    is_in_trace = False  # of a message that was left out
    for line in lines:
        if is_in_trace:
            is_in_trace = bool(line.strip())
            continue
        if was_left_out and line.startswith(TRACE_TITLE):
            is_in_trace = True
            continue
        is_harmless = line.startswith(below_level) or HARMLESS.search(line) is not None
        if not has_gpu and HARMLESS_WITHOUT_GPU.search(line):
            is_harmless = True
        was_left_out = is_harmless
        if not is_harmless:
            yield line


def place_ranks(rows: Sequence[Sequence[Any]]) -> Iterator[str]:
    """Describe ranks by node, pid, device and threads: each, or of many ranks the first of each node."""
    for node, group in itertools.groupby(enumerate(rows), key=lambda item: item[1][0]):
        ranks = list(group)
        for part in [[item] for item in ranks] if len(rows) <= MAX_LISTED_RANKS else [ranks]:
            _, pid, computes_on, threads, *_ = part[0][1]
            of_first = " of the first" if len(part) > 1 else ""
            described = f"{computes_on}, {threads} thread{'s' if threads > 1 else ''}"
            yield f"  {name_ranks([rank for rank, _ in part])} on {node} (pid {pid}{of_first}): {described}"


def describe_start(collective: Collective, plan: DevicePlan, device: str) -> list[str]:
    """Return versions, devices of ranks, and settings with sources. Collective."""
    from ringtrain.collectives import all_gather_object

    world = collective.world
    misses = misses_gpus(plan.machine, os.environ)
    rows = all_gather_object(collective, [world.node, os.getpid(), device, plan.intra_op_threads, misses], name="start")
    without_gpus = sorted({node for node, *_, misses in rows if misses})
    versions = []
    for title, package in (("TensorFlow", "tensorflow"), ("Keras", "keras"), ("Horovod", "horovod")):
        version = package_version(package)
        if version is not None:
            versions.append(f"{title} {version}")
    return [
        f"ringtrain {__version__}: {', '.join(versions)}",
        f"{world.size} rank{'s' if world.size > 1 else ''}, started by {world.launcher}; communication: "
        f"{collective.description}",
        *place_ranks(rows),
        *(f"  {setting.name}={setting.value} ({setting.source})" for setting in plan.settings),
        *describe_shared_memory(world, plan),
        *(
            f"warning: {node} has NVIDIA's driver, but TensorFlow sees no GPU there and computes on cores. Run "
            "python -m ringtrain doctor there; if cores are meant, set CUDA_VISIBLE_DEVICES= (empty)."
            for node in without_gpus
        ),
    ]
