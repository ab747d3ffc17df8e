"""Findings from the facts of one process: pure functions."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

from ringtrain.doctor.facts import Facts, Stack
from ringtrain.messages.hiding import RENAME
from ringtrain.runtime.devices import SHARED_MEMORY_BYTES_PER_RANK
from ringtrain.runtime.machine import format_cores
from ringtrain.runtime.srun import HOROVODRUN
from ringtrain.runtime.world import GLOO_LAUNCHER

Status = Literal["ok", "warning", "broken"]

# Ranges of pyproject.toml, upper bound excluded.
PYTHONS = ((3, 10), (3, 14))
TENSORFLOWS = ((2, 18), (2, 23))
KERASES = ((3, 10), (3, 17))
KERAS_3 = ((3, 0), (4, 0))
HOROVOD = "0.28.1"

GIB, MIB, KIB = 2**30, 2**20, 2**10
# Measured: digits peaks at 0.6 GiB on a core.
MEMORY_PER_RANK = 1 * GIB
# One NCCL buffer between GPUs without peer access: 9637888 bytes, from its error messages; each GPU has several. NCCL's
# user guide (Troubleshooting, Shared Memory) asks for 1 GiB in all.
SHM_PER_NCCL_BUFFER = 10 * MIB
SHM_PER_GPU = 32 * MIB

SETUP = "make the environment again: make setup (or environment.yml)"
INSTALL_KERAS = "pip install 'keras>=3.10,<3.17'"
REBUILD_HOROVOD = (
    "build it for this TensorFlow: make setup, or, in a checkout of ringtrain: "
    "CMAKE_TOOLCHAIN_FILE=$PWD/.ci/horovod/toolchain.cmake pip install --no-cache-dir --no-build-isolation "
    f"--force-reinstall --no-deps horovod=={HOROVOD}"
)


class Finding(NamedTuple):
    status: Status  # ``broken``: training would not work
    text: str
    remedy: str = ""
    subject: str = ""


def judge(facts: Facts) -> list[Finding]:
    findings = [check(facts)._replace(subject=subject) for subject, check in CHECKS.items()]
    for refusal in facts.refusals:
        text, _, remedy = refusal.rpartition(". ")
        findings.append(Finding("broken", text, remedy, subject="environment"))
    # A failed probe does not mean that training fails.
    return findings + [
        Finding("warning", f"could not be looked at: {why}", "report this message", subject=name)
        for name, why in facts.unknown.items()
    ]


def judge_python(facts: Facts) -> Finding:
    stack = facts.stack
    text = f"{stack.python}, {stack.executable}"
    if stack.optimize >= 2:
        status: Status = "broken" if "tensorflow" in stack.failures else "warning"
        text += ", without docstrings, which TensorFlow may need"
        return Finding(status, text, "unset PYTHONOPTIMIZE, and leave out -OO")
    if is_within(stack.python, PYTHONS):
        return Finding("ok", text)
    return Finding("broken", text, "use Python 3.10 to 3.13: make PYTHON=... setup")


def judge_tensorflow(facts: Facts) -> Finding:
    stack = facts.stack
    if missing := find_missing(stack, "tensorflow"):
        return missing
    cuda = f"built for CUDA {stack.cuda}" if stack.cuda else "built for cores, without CUDA"
    text = f"{stack.versions['tensorflow']}, {cuda}"
    if is_within(stack.versions["tensorflow"], TENSORFLOWS):
        return Finding("ok", text)
    remedy = "ringtrain is tested with TensorFlow 2.18 to 2.22: install one, and Horovod built against it"
    return Finding("warning", text, remedy)


def judge_keras(facts: Facts) -> Finding:
    stack = facts.stack
    version = stack.versions.get("keras", "")
    if version and not is_within(version, KERAS_3):
        return Finding("broken", f"{version}, but ringtrain trains models of Keras 3", INSTALL_KERAS)
    if missing := find_missing(stack, "keras"):
        return missing
    if stack.keras_backend not in (None, "tensorflow"):
        return Finding("broken", f"{version}, but KERAS_BACKEND={stack.keras_backend}", "unset KERAS_BACKEND")
    if stack.legacy_keras:
        text = f"{version}, but TF_USE_LEGACY_KERAS makes tf.keras Keras 2: models of tf.keras cannot be trained"
        return Finding("warning", text, "unset TF_USE_LEGACY_KERAS")
    text = f"{version}, on TensorFlow"
    if is_within(version, KERASES):
        return Finding("ok", text)
    return Finding("warning", text, f"tested are 3.10 to 3.16: {INSTALL_KERAS}")


def judge_horovod(facts: Facts) -> Finding:
    stack = facts.stack
    version, built_for = stack.versions.get("horovod"), stack.horovod_built_for
    tensorflow = stack.versions.get("tensorflow")
    is_for_another = bool(version and built_for and tensorflow and built_for != tensorflow)
    build = f", built for TensorFlow {built_for}" if built_for else ""
    here = f", but {tensorflow} is installed" if is_for_another else ""
    for package, title in (("tensorflow", "TensorFlow"), ("keras", "Keras")):
        is_unfit = find_missing(stack, package) or (
            package == "keras" and not is_within(stack.versions["keras"], KERAS_3)
        )
        if version and "horovod" in stack.failures and is_unfit:
            return Finding("broken", f"{version}{build}; does not load, as it needs {title}", f"mend {title} first")
    if "horovod" in stack.failures and is_for_another:
        return Finding("broken", f"{version}{build}{here}, and does not load", REBUILD_HOROVOD)
    if version is None and stack.versions.get("mpi4py"):
        return Finding(
            "warning",
            "not installed: cores sum natively, over MPI",
            "GPUs and ringtrain.keras need it: make setup HOROVOD=1",
        )
    if missing := find_missing(stack, "horovod", remedy=REBUILD_HOROVOD):
        return missing
    text = f"{version}{build}{here}; {describe_parts(stack)}"
    if not {"mpi", "gloo"} & set(stack.horovod_parts):
        return Finding("broken", text, f"install mpicc or CMake, then {REBUILD_HOROVOD}")
    if is_for_another:
        return Finding("warning", text, REBUILD_HOROVOD)
    if version != HOROVOD:
        return Finding("warning", text, f"ringtrain is tested with {HOROVOD}")
    return Finding("ok", text)


def describe_parts(stack: Stack) -> str:
    names = {"mpi": "MPI", "gloo": "Gloo", "nccl": f"NCCL {stack.nccl}", "ccl": "CCL"}
    controllers = [names[part] for part in stack.horovod_parts if part in ("mpi", "gloo")]
    operations = [names[part] for part in stack.horovod_parts if part in names]
    gpus = "".join(f", for {part.upper()}" for part in stack.horovod_parts if part in ("cuda", "rocm"))
    return f"controllers: {', '.join(controllers) or 'none'}; operations: {', '.join(operations) or 'none'}{gpus}"


def judge_mpi(facts: Facts) -> Finding:
    stack = facts.stack
    if stack.versions.get("horovod") and stack.horovod_parts and "mpi" not in stack.horovod_parts:
        return Finding("ok", "not used: Horovod has Gloo alone")
    if missing := find_missing(stack, "mpi4py", remedy="pip install 'mpi4py>=4,<5', with Horovod's MPI in PATH"):
        goes_on = facts.world.launcher == GLOO_LAUNCHER and "gloo" in stack.horovod_parts  # needs no MPI
        return missing._replace(status="warning" if goes_on else "broken", text=f"mpi4py {missing.text}")
    mine, theirs = stack.horovod_mpi, stack.mpi4py_mpi
    library, mpirun = stack.mpi_library or "an unknown MPI", facts.launchers.mpirun_version
    if mine and theirs and not set(theirs) <= set(mine):
        text = f"Horovod loads {', '.join(mine)}, but mpi4py {', '.join(theirs)}"
        remedy = f"unset MPI4PY_LIBMPI and MPI4PY_MPIABI; else pip install mpi4py with the MPI of {mine[0]}"
        return Finding("broken", text, remedy)
    if mpirun and stack.mpi_library and not _is_same_mpi(mpirun, stack.mpi_library):
        text = f"Horovod and mpi4py use {library}, but {facts.launchers.mpirun} is of {mpirun}"
        status: Status = "broken" if facts.world.size == 1 else "warning"
        return Finding(status, text, f"put the mpirun of {library} first in PATH")
    users = f"mpi4py {stack.versions['mpi4py']}" + (" and Horovod use it" if mine else "")
    return Finding("ok", f"{library}, {', '.join(theirs or mine)}; {users}")


def judge_launchers(facts: Facts) -> Finding:
    launchers, parts = facts.launchers, facts.stack.horovod_parts
    fails, version = launchers.mpirun_failure, launchers.mpirun_version
    mpirun = f"which fails: {fails}" if fails else version or "of an unknown MPI"
    has_srun = launchers.srun_mpi not in (None, HOROVODRUN)
    cannot = "does not respond" if launchers.srun_mpi is None else "knows neither PMIx nor PMI2"
    srun = f"srun (--mpi={launchers.srun_mpi})" if has_srun else f"srun (which {cannot})"
    words = {"horovodrun": "horovodrun", "mpirun": f"mpirun ({mpirun})", "srun": srun}
    found = [text for name, text in words.items() if getattr(launchers, name)]
    missing = [name for name in words if not getattr(launchers, name)]
    text = f"{', '.join(found) or 'none'}" + (f"; no {', no '.join(missing)}" if found and missing else "")
    if facts.world.size > 1:
        return Finding("ok", f"{text}; this is {facts.world.launcher}")
    by_mpi = "mpi" in parts and ((launchers.mpirun and not fails) or has_srun)
    by_gloo = "gloo" in parts and launchers.horovodrun
    if not by_mpi and not by_gloo and parts:
        remedy = "install Open MPI (apt-get install openmpi-bin, or conda install openmpi), and put .venv/bin in PATH"
        return Finding("broken", f"{text}: nothing starts ranks", remedy)
    if "mpi" in parts and not by_mpi:
        return Finding("warning", text, "start by horovodrun --gloo, or install Open MPI: apt-get install openmpi-bin")
    if launchers.refuses_root and not has_srun:
        remedy = "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; horovodrun needs no such"
        return Finding("warning", f"{text}; mpirun refuses root", remedy)
    return Finding("ok", text)


def judge_gpus(facts: Facts) -> Finding:
    stack, hardware, local_size = facts.stack, facts.hardware, facts.world.local_size
    gpus, seen = hardware.gpus or (), stack.visible_gpus
    hidden = f" (CUDA_VISIBLE_DEVICES={hardware.cuda_visible_devices})" if hardware.cuda_visible_devices else ""
    if facts.device_failure or 1 < seen < local_size:
        text = f"{seen} GPUs{hidden} for {local_size} ranks of this node"
        remedy = f"start at most {seen} ranks on a node, or set CUDA_VISIBLE_DEVICES= to compute on cores"
        return Finding("broken", text, remedy)
    if hardware.gpu_failure:
        remedy = "reinstall the NVIDIA driver, or give the container its GPUs (--gpus all)"
        return Finding("warning", f"nvidia-smi fails: {hardware.gpu_failure}; training runs on CPU cores", remedy)
    if not gpus and not seen:
        return Finding("ok", "none: training runs on CPU cores")
    counts = Counter(gpu.name for gpu in gpus)
    kinds = ", ".join(f"{count} x {name}" for name, count in counts.items()) or f"{seen} GPUs"
    driver = f", driver {gpus[0].driver}" if gpus else ""
    text = f"{kinds}{driver}; TensorFlow sees {seen}{hidden}"
    if not seen and hardware.cuda_visible_devices in ("", "-1"):
        return Finding("ok", f"{kinds}, hidden by CUDA_VISIBLE_DEVICES: training runs on CPU cores")
    if not seen:
        remedy = "pip install 'tensorflow[and-cuda]'" if stack.cuda else "install a TensorFlow that is built for CUDA"
        return Finding("warning", f"{text}: training runs on CPU cores", remedy)
    if any(gpu.mig for gpu in gpus):
        remedy = "NCCL joins no two slices of one GPU: switch MIG off (nvidia-smi -mig 0), or train in one process"
        return Finding("warning", f"{text}; MIG is on", remedy)
    if "nccl" not in stack.horovod_parts:
        remedy = "build Horovod with HOROVOD_GPU_OPERATIONS=NCCL"
        return Finding("warning", f"{text}; no NCCL: sums go through the cores", remedy)
    return Finding("ok", f"{text}; NCCL {stack.nccl}")


def judge_cores(facts: Facts) -> Finding:
    hardware, local_size = facts.hardware, facts.world.local_size
    count = len(hardware.cores)
    limit = "no cgroup limit" if hardware.quota is None else f"cgroup limit {hardware.quota:g}"
    bound = ", bound by the launcher" if hardware.bound_by_launcher else ""
    text = f"{count} of {hardware.total_cores} ({format_cores(hardware.cores)}{bound}), {limit}"
    usable = min(float(count), hardware.quota or count)
    if local_size > max(1, usable) and not hardware.bound_by_launcher:
        remedy = f"start at most {max(1, int(usable))} on a node, or ask for more cores"
        return Finding("warning", f"{text}, for {local_size} ranks", remedy)
    if hardware.quota is not None and hardware.quota < 1:
        return Finding("warning", text, "give the container at least one core")
    return Finding("ok", text)


def judge_memory(facts: Facts) -> Finding:
    hardware, local_size = facts.hardware, facts.world.local_size
    if not hardware.memory_bytes:
        return Finding("warning", "unknown", "mount /proc")
    limit = "no cgroup limit" if hardware.memory_limit is None else f"cgroup limit {in_gib(hardware.memory_limit)}"
    text = f"{in_gib(hardware.memory_bytes)}, {in_gib(hardware.available_bytes)} of it available; {limit}"
    available, needed = hardware.available_bytes, MEMORY_PER_RANK * local_size
    if min(available, hardware.memory_limit or available) >= needed:
        return Finding("ok", text)
    ranks = f" for {local_size} ranks" if local_size > 1 else ""
    return Finding(
        "warning", f"{text}: little{ranks}", f"make {in_gib(needed)} available (1 GiB a rank), or start fewer ranks"
    )


def judge_shm(facts: Facts) -> Finding:
    hardware, world, seen = facts.hardware, facts.world, facts.stack.visible_gpus
    has_gpus = seen > 1 or (seen > 0 and world.local_size > 1)
    ranks = world.local_size if world.size > 1 else seen or max(len(hardware.cores), 2)
    needed = ranks * (SHM_PER_GPU if has_gpus else SHARED_MEMORY_BYTES_PER_RANK)
    remedy = f"at least {max(needed, 64 * MIB) // MIB} MiB: docker run --shm-size=1g, or mount -o remount,size=1g"
    if not hardware.shared_memory_bytes:
        return Finding("broken" if has_gpus else "warning", "not there", remedy)
    text = f"{_in_size(hardware.shared_memory_bytes)}, {_in_size(hardware.shm_free_bytes)} of it free"
    if hardware.shm_free_bytes >= needed:
        return Finding("ok", text)
    if has_gpus and "nccl" in facts.stack.horovod_parts:
        if hardware.shm_free_bytes < ranks * SHM_PER_NCCL_BUFFER:
            return Finding("broken", f"{text}: too little for NCCL with {ranks} GPUs", remedy)
        return Finding("warning", f"{text}: little for NCCL with {ranks} GPUs", remedy)
    # Measured: Open MPI 4.1 falls back to TCP, with a page of warnings.
    return Finding("warning", f"{text}: {ranks} ranks would talk by TCP, slowly", remedy)


CHECKS: Mapping[str, Callable[[Facts], Finding]] = {
    "Python": judge_python,
    "TensorFlow": judge_tensorflow,
    "Keras": judge_keras,
    "Horovod": judge_horovod,
    "MPI": judge_mpi,
    "launchers": judge_launchers,
    "GPUs": judge_gpus,
    "cores": judge_cores,
    "memory": judge_memory,
    "/dev/shm": judge_shm,
}


def can_join(facts: Facts) -> bool:
    has_horovod = "horovod" in facts.stack.versions
    uses_mpi = facts.world.launcher != GLOO_LAUNCHER and (not has_horovod or "mpi" in facts.stack.horovod_parts)
    needed = ["tensorflow", *(["horovod"] if has_horovod else []), *(["mpi4py"] if uses_mpi else [])]
    return not set(needed) & set(facts.stack.failures)


def is_within(version: str, bounds: tuple[tuple[int, int], tuple[int, int]]) -> bool:
    """Exclude the upper bound."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return bool(match) and bounds[0] <= (int(match[1]), int(match[2])) < bounds[1]  # type: ignore[index]


def in_gib(size: float) -> str:
    return f"{size / GIB:.0f} GiB" if size >= 10 * GIB else f"{size / GIB:.1f} GiB"


def _in_size(size: int) -> str:
    return in_gib(size) if size >= GIB else f"{size / MIB:.0f} MiB"


def _is_same_mpi(mpirun: str, library: str) -> bool:
    """Compare name, major and minor version, as far as known."""
    names = [re.sub(r" [\d.]+\w*$", "", text) for text in (mpirun, library)]
    numbers = [re.findall(r" (\d+\.\d+)", text) for text in (mpirun, library)]
    return names[0] == names[1] and (not all(numbers) or numbers[0] == numbers[1])


def find_missing(stack: Stack, package: str, remedy: str = SETUP) -> Finding | None:
    version, failure = stack.versions.get(package), stack.failures.get(package)
    if version is None:
        return Finding("broken", "not installed", remedy)
    if not failure:
        return None
    remedy = RENAME.removeprefix(": ") if failure.endswith(RENAME) else remedy
    return Finding("broken", f"{version} does not load: {failure.removesuffix(RENAME)}", remedy)
