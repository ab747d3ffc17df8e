"""Probes of packages, node and launchers, with time limits; none raises."""

from __future__ import annotations

import contextlib
import csv
import importlib
import importlib.util
import json
import os
import platform
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ringtrain.doctor.facts import Facts, Gpu, Hardware, Launchers, Stack, as_tuples
from ringtrain.doctor.inside import STEPS, describe_mpi, shorten
from ringtrain.errors import UsageError
from ringtrain.messages.hiding import describe_hiding
from ringtrain.runtime.environment import check_address_space, check_environment
from ringtrain.runtime.machine import read_machine, read_memory_limits
from ringtrain.runtime.processes import ask
from ringtrain.runtime.srun import ask_srun, choose_mpi
from ringtrain.runtime.versions import package_version
from ringtrain.runtime.world import World

Found = TypeVar("Found")

# TensorFlow may take a minute from a cold network file system.
LOAD_SECONDS = 120.0
COMMAND_SECONDS = 20.0
REQUIRED = ("yaml", "rich.progress")  # not loaded by the child process; NumPy comes with TensorFlow
NVIDIA_SMI = ("nvidia-smi", "--query-gpu=uuid,name,driver_version,mig.mode.current", "--format=csv,noheader")


def gather_facts(world: World, environ: Mapping[str, str], *, keras_backend: str | None) -> Facts:
    """``keras_backend``: from the user's environment."""
    unknown: dict[str, str] = {}

    def attempt(name: str, probe: Callable[[], Found], otherwise: Found) -> Found:
        try:
            return probe()
        except Exception as error:  # reported as a finding
            unknown[name] = shorten(f"{type(error).__name__}: {error}")
            return otherwise

    python = Stack(python=platform.python_version(), executable=sys.executable)
    bare = Hardware(cores=tuple(sorted(os.sched_getaffinity(0))), total_cores=os.cpu_count() or 1)
    return Facts(
        world=world,
        stack=attempt("packages", lambda: look_at_stack(environ, keras_backend), python),
        hardware=attempt("node", lambda: look_at_hardware(environ), bare),
        launchers=attempt("launchers", lambda: look_at_launchers(environ), Launchers()),
        unknown=unknown,
        refusals=attempt("environment", lambda: find_refusals(environ), []),
    )


def find_refusals(environ: Mapping[str, str]) -> list[str]:
    """Return errors that would end a training before TensorFlow starts."""
    refusals = []
    checks: list[Callable[[], None]] = [
        lambda: check_environment(environ),
        lambda: check_address_space(resource.getrlimit(resource.RLIMIT_AS)[0]),
    ]
    for check in checks:
        try:
            check()
        except UsageError as error:
            refusals.append(str(error))
    for name in REQUIRED:
        try:
            importlib.import_module(name)
        except Exception as error:
            why = describe_hiding(error) or shorten(f"{type(error).__name__}: {error}")
            refusals.append(f"the package {name} does not load: {why}. Install the environment again: make setup.")
    return refusals


def look_at_stack(environ: Mapping[str, str], keras_backend: str | None) -> Stack:
    found, failures = load_packages([sys.executable, "-m", "ringtrain.doctor.inside"], LOAD_SECONDS)
    versions: dict[str, str] = {}
    for name in STEPS:
        version = package_version(name)
        if version is not None:
            versions[name] = version
    versions |= {name: values["version"] for name, values in found.items() if values.get("version")}
    parts = {name: value for values in found.values() for name, value in values.items() if name != "version"}
    return Stack(
        python=platform.python_version(),
        executable=sys.executable,
        optimize=sys.flags.optimize,
        versions=versions,
        failures=failures,
        keras_backend=keras_backend,
        legacy_keras=environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true"),
        horovod_built_for=_horovod_built_for(),
        **as_tuples(parts),
    )


def load_packages(command: Sequence[str], seconds: float) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    reader, writer = os.pipe()  # closed when this process exits
    child = subprocess.Popen(
        command, stdin=reader, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
    )
    os.close(reader)
    ending = ""
    try:
        answer, errors = child.communicate(timeout=seconds)
        if child.returncode < 0:
            ending = f"loading it ended the interpreter ({signal.Signals(-child.returncode).name})"
        elif child.returncode:
            ending = f"loading it ended the interpreter with exit code {child.returncode}: {_last_line(errors)}"
    except subprocess.TimeoutExpired:
        child.kill()
        answer, _ = child.communicate()
        ending = f"loading it took more than {seconds:.0f} s"
    os.close(writer)
    return read_answer(answer, ending)


def read_answer(answer: str, ending: str) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Parse the child's lines. The first package without one ended it; ``ending``: how. Before its first line, none."""
    lines = list(map(json.loads, answer.splitlines()))
    if not lines:
        return {}, dict.fromkeys(STEPS, shorten(ending or "not tried"))
    found = {line["name"]: line["found"] for line in lines if "found" in line}
    failures = {line["name"]: line["failure"] for line in lines if "failure" in line}
    missing = [name for name in STEPS if name not in found and name not in failures]
    for name in missing[1:]:
        failures[name] = f"not tried: {missing[0]} ended the look"
    return found, failures | {name: shorten(ending or "not tried") for name in missing[:1]}


def look_at_hardware(environ: Mapping[str, str]) -> Hardware:
    machine = read_machine(environ)
    memory = dict(re.findall(r"^(\w+): +(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE))
    gpus, gpu_failure = look_at_gpus()
    return Hardware(
        **vars(machine),
        total_cores=os.cpu_count() or len(machine.cores),
        memory_bytes=int(memory.get("MemTotal", 0)) * 1024,
        available_bytes=int(memory.get("MemAvailable", 0)) * 1024,
        memory_limit=min((limit for limit, _ in read_memory_limits(Path("/"))), default=None),
        gpus=gpus,
        gpu_failure=gpu_failure,
        cuda_visible_devices=environ.get("CUDA_VISIBLE_DEVICES"),
    )


def look_at_gpus() -> tuple[tuple[Gpu, ...] | None, str | None]:
    """Return GPUs and failure; (None, None) without a driver."""
    if shutil.which(NVIDIA_SMI[0]) is None:
        return None, None
    status, output = ask(NVIDIA_SMI, seconds=COMMAND_SECONDS)
    return (parse_gpus(output), None) if status == 0 else (None, shorten(output))


def parse_gpus(listing: str) -> tuple[Gpu, ...]:
    rows = [[cell.strip() for cell in row] for row in csv.reader(listing.splitlines())]
    return tuple(Gpu(uuid=row[0], name=row[1], driver=row[2], mig=row[3] == "Enabled") for row in rows if len(row) == 4)


def look_at_launchers(environ: Mapping[str, str]) -> Launchers:
    mpirun, srun = shutil.which("mpirun"), shutil.which("srun")
    status, words = ask([mpirun, "--version"], seconds=COMMAND_SECONDS) if mpirun else (0, "")
    version = describe_mpi(words)
    listing = ask_srun() if srun else None
    allowed = all(environ.get(f"OMPI_ALLOW_RUN_AS_ROOT{end}") == "1" for end in ("", "_CONFIRM"))
    return Launchers(
        horovodrun=shutil.which("horovodrun"),
        mpirun=mpirun,
        mpirun_version=version,
        mpirun_failure=None if status == 0 else shorten(_last_line(words)),
        srun=srun,
        srun_mpi=None if listing is None else choose_mpi(listing),
        refuses_root=os.geteuid() == 0 and not allowed and (version or "").startswith("Open MPI"),
    )


def _horovod_built_for() -> str | None:
    spec = importlib.util.find_spec("horovod")
    for directory in (spec and spec.submodule_search_locations) or ():
        with contextlib.suppress(OSError, ValueError):
            return json.loads((Path(directory) / "metadata.json").read_text()).get("tensorflow") or None
    return None


def _last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "no message")
