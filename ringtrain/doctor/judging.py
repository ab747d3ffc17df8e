"""From the facts of one process to findings: pure functions, one for each subject."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from ringtrain.doctor.facts import Facts, Stack
from ringtrain.runtime.cores import format_cores

Status = Literal["ok", "warning", "broken"]

# The ranges of pyproject.toml: from the first, up to the second without it.
PYTHONS = ((3, 10), (3, 14))
TENSORFLOWS = ((2, 18), (2, 22))
KERASES = ((3, 10), (3, 16))
KERAS_3 = ((3, 0), (4, 0))
HOROVOD = "0.28.1"

GIB, MIB = 2**30, 2**20
# A process that trains the built-in digits on a core has a peak of 0.6 GiB, measured.
MEMORY_PER_RANK = 1 * GIB
# The file of each rank through which Open MPI 4.1 talks within a node (btl_vader_segment_size).
SHM_PER_RANK = 4 * MIB
# One of NCCL's buffers between GPUs that cannot read each other's memory: 9637888 bytes, by its own error
# messages. There are several for a GPU; NCCL's user guide (Troubleshooting, Shared Memory) asks for 1 GiB in all.
SHM_PER_NCCL_BUFFER = 10 * MIB
SHM_PER_GPU = 32 * MIB

SETUP = "make the environment anew: make setup (or environment.yml)"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One row of the table.

    Attributes:
        subject: what was looked at.
        status: ``broken`` where training would not work.
        text: what was found.
        remedy: what helps; empty where nothing has to.
    """

    subject: str
    status: Status
    text: str
    remedy: str = ""


def judge(facts: Facts) -> list[Finding]:
    """All findings of one process."""
    stack = facts.stack
    return [
        judge_python(stack),
        judge_tensorflow(stack),
        judge_keras(stack),
        judge_horovod(stack),
        judge_mpi(facts),
        judge_launchers(facts),
        judge_gpus(facts),
        judge_cores(facts),
        judge_memory(facts),
        judge_shm(facts),
        *(broken_probe(name, why) for name, why in facts.unknown.items()),
    ]


def judge_python(stack: Stack) -> Finding:
    """The interpreter."""
    text = f"{stack.python}, {stack.executable}"
    if stack.optimize >= 2:
        return Finding(
            subject="Python", status="broken" if "tensorflow" in stack.failures else "warning",
            text=f"{text}, without docstrings, which TensorFlow may need",
            remedy="unset PYTHONOPTIMIZE, and leave out -OO",
        )  # fmt: skip
    if is_within(stack.python, PYTHONS):
        return Finding(subject="Python", status="ok", text=text)
    return Finding(
        subject="Python", status="broken", text=text, remedy="use Python 3.10 to 3.13: make PYTHON=... setup"
    )


def judge_tensorflow(stack: Stack) -> Finding:
    """TensorFlow: there, loadable, of the version that ringtrain is tested with."""
    finding = _judge_package(stack, "tensorflow", "TensorFlow")
    if finding.status == "broken":
        return finding
    cuda = f"built for CUDA {stack.cuda}" if stack.cuda else "built for cores, without CUDA"
    text = f"{finding.text}, {cuda}"
    if not is_within(stack.versions["tensorflow"], TENSORFLOWS):
        remedy = "ringtrain is tested with TensorFlow 2.18 to 2.21: install one, and Horovod built against it"
        return Finding(subject="TensorFlow", status="warning", text=text, remedy=remedy)
    return Finding(subject="TensorFlow", status="ok", text=text)


def judge_keras(stack: Stack) -> Finding:
    """Keras: 3, on TensorFlow."""
    finding = _judge_package(stack, "keras", "Keras")
    version = stack.versions.get("keras", "")
    if version and not is_within(version, KERAS_3):
        return Finding(
            subject="Keras", status="broken", text=f"{version}, but ringtrain trains models of Keras 3",
            remedy="pip install 'keras>=3.10,<3.16'",
        )  # fmt: skip
    if finding.status == "broken":
        return finding
    if stack.keras_backend not in (None, "tensorflow"):
        return Finding(
            subject="Keras", status="broken", text=f"{version}, but KERAS_BACKEND={stack.keras_backend}",
            remedy="unset KERAS_BACKEND",
        )  # fmt: skip
    if stack.legacy_keras:
        return Finding(
            subject="Keras", status="warning",
            text=f"{version}, but TF_USE_LEGACY_KERAS makes tf.keras Keras 2: models of tf.keras cannot be trained",
            remedy="unset TF_USE_LEGACY_KERAS",
        )  # fmt: skip
    text = f"{version}, on TensorFlow"
    if not is_within(version, KERASES):
        remedy = "tested are 3.10 to 3.15: pip install 'keras>=3.10,<3.16'"
        return Finding(subject="Keras", status="warning", text=text, remedy=remedy)
    return Finding(subject="Keras", status="ok", text=text)


def judge_horovod(stack: Stack) -> Finding:
    """Horovod: built for this TensorFlow, loadable, with something that carries its messages."""
    version, built_for = stack.versions.get("horovod"), stack.horovod_built_for
    tensorflow = stack.versions.get("tensorflow")
    is_for_another = bool(version and built_for and tensorflow and built_for != tensorflow)
    build = f", built for TensorFlow {built_for}" if built_for else ""
    here = f", but {tensorflow} is installed" if is_for_another else ""
    rebuild = (
        "build it for this TensorFlow: make setup, or, in a checkout of ringtrain: "
        "CMAKE_TOOLCHAIN_FILE=$PWD/.ci/horovod/toolchain.cmake pip install --no-cache-dir --no-build-isolation "
        f"--force-reinstall --no-deps horovod=={HOROVOD}"
    )
    for package, title in (("tensorflow", "TensorFlow"), ("keras", "Keras")):
        if version and "horovod" in stack.failures and _is_unfit(stack, package):
            text = f"{version}{build}; does not load, as it needs {title}"
            return Finding(subject="Horovod", status="broken", text=text, remedy=f"mend {title} first")
    if "horovod" in stack.failures and is_for_another:
        return Finding(
            subject="Horovod", status="broken", text=f"{version}{build}{here}, and does not load", remedy=rebuild
        )
    finding = _judge_package(stack, "horovod", "Horovod", remedy=rebuild)
    if finding.status == "broken":
        return finding
    text = f"{version}{build}{here}; {describe_parts(stack)}"
    if not {"mpi", "gloo"} & set(stack.horovod_parts):
        remedy = f"install mpicc or CMake, then {rebuild}"
        return Finding(subject="Horovod", status="broken", text=text, remedy=remedy)
    if is_for_another:
        return Finding(subject="Horovod", status="warning", text=text, remedy=rebuild)
    if version != HOROVOD:
        return Finding(subject="Horovod", status="warning", text=text, remedy=f"ringtrain is tested with {HOROVOD}")
    return Finding(subject="Horovod", status="ok", text=text)


def describe_parts(stack: Stack) -> str:
    """What was compiled into Horovod: who tells the ranks when to reduce what, and who carries the data."""
    names = {"mpi": "MPI", "gloo": "Gloo", "nccl": f"NCCL {stack.nccl}", "ccl": "CCL"}
    controllers = [names[part] for part in stack.horovod_parts if part in ("mpi", "gloo")]
    operations = [names[part] for part in stack.horovod_parts if part in names]
    gpus = "".join(f", for {part.upper()}" for part in stack.horovod_parts if part in ("cuda", "rocm"))
    listed = (
        f"{title}: {', '.join(found) or 'none'}"
        for title, found in (("controllers", controllers), ("operations", operations))
    )
    return "; ".join(listed) + gpus


def judge_mpi(facts: Facts) -> Finding:
    """One MPI: Horovod's, mpi4py's and the launcher's."""
    stack = facts.stack
    if stack.versions.get("horovod") and stack.horovod_parts and "mpi" not in stack.horovod_parts:
        return Finding(subject="MPI", status="ok", text="not used: Horovod has Gloo alone")
    finding = _judge_package(stack, "mpi4py", "mpi4py", remedy="pip install 'mpi4py>=4,<5', with Horovod's MPI in PATH")
    if finding.status == "broken":
        goes_on = facts.launcher == "horovodrun --gloo" and "gloo" in stack.horovod_parts  # which needs no MPI
        status: Status = "warning" if goes_on else "broken"
        return Finding(subject="MPI", status=status, text=f"mpi4py {finding.text}", remedy=finding.remedy)
    mine, theirs = stack.horovod_mpi, stack.mpi4py_mpi
    library, mpirun = stack.mpi_library or "an unknown MPI", facts.launchers.mpirun_version
    if mine and theirs and not set(theirs) <= set(mine):
        return Finding(
            subject="MPI", status="broken",
            text=f"Horovod loads {', '.join(mine)}, but mpi4py {', '.join(theirs)}",
            remedy=f"unset MPI4PY_LIBMPI and MPI4PY_MPIABI; else pip install mpi4py with the MPI of {mine[0]}",
        )  # fmt: skip
    text = f"{library}, {', '.join(theirs or mine)}; mpi4py {stack.versions['mpi4py']}" + (
        " and Horovod use it" if mine else ""
    )
    if mpirun and stack.mpi_library and not _is_same_mpi(mpirun, stack.mpi_library):
        return Finding(
            subject="MPI", status="broken" if facts.size == 1 else "warning",
            text=f"Horovod and mpi4py use {library}, but {facts.launchers.mpirun} is of {mpirun}",
            remedy=f"put the mpirun of {library} first in PATH",
        )  # fmt: skip
    return Finding(subject="MPI", status="ok", text=text)


def judge_launchers(facts: Facts) -> Finding:
    """What could start several ranks. Under a launcher the question is answered."""
    launchers, parts = facts.launchers, facts.stack.horovod_parts
    fails, version = launchers.mpirun_failure, launchers.mpirun_version
    mpirun = f"which fails: {fails}" if fails else version or "of an unknown MPI"
    has_srun = launchers.srun_mpi not in (None, "horovodrun")
    cannot = "gives no answer" if launchers.srun_mpi is None else "knows neither PMIx nor PMI2"
    srun = f"srun (--mpi={launchers.srun_mpi})" if has_srun else f"srun (which {cannot})"
    found = [
        *(["horovodrun"] if launchers.horovodrun else []),
        *([f"mpirun ({mpirun})"] if launchers.mpirun else []),
        *([srun] if launchers.srun else []),
    ]
    missing = [name for name in ("horovodrun", "mpirun", "srun") if getattr(launchers, name) is None]
    text = f"{', '.join(found) or 'none'}" + (f"; no {', no '.join(missing)}" if found and missing else "")
    if facts.size > 1:
        return Finding(subject="launchers", status="ok", text=f"{text}; this is {facts.launcher}")
    by_mpi = "mpi" in parts and ((launchers.mpirun and not fails) or has_srun)
    by_gloo = "gloo" in parts and launchers.horovodrun
    if not by_mpi and not by_gloo and parts:
        remedy = "install Open MPI (apt-get install openmpi-bin, or conda install openmpi), and put .venv/bin in PATH"
        return Finding(subject="launchers", status="broken", text=f"{text}: nothing starts ranks", remedy=remedy)
    if "mpi" in parts and not by_mpi:
        remedy = "start by horovodrun --gloo, or install Open MPI: apt-get install openmpi-bin"
        return Finding(subject="launchers", status="warning", text=text, remedy=remedy)
    if launchers.refuses_root and not has_srun:
        remedy = "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; horovodrun needs no such"
        return Finding(subject="launchers", status="warning", text=f"{text}; mpirun refuses root", remedy=remedy)
    return Finding(subject="launchers", status="ok", text=text)


def judge_gpus(facts: Facts) -> Finding:
    """The GPUs of the node, and whether each rank has one."""
    stack, hardware = facts.stack, facts.hardware
    gpus, seen = hardware.gpus or (), stack.visible_gpus
    hidden = f" (CUDA_VISIBLE_DEVICES={hardware.cuda_visible_devices})" if hardware.cuda_visible_devices else ""
    if facts.device_failure or 1 < seen < facts.local_size:
        return Finding(
            subject="GPUs", status="broken", text=f"{seen} GPUs{hidden} for {facts.local_size} ranks of this node",
            remedy=f"start at most {seen} ranks on a node, or set CUDA_VISIBLE_DEVICES= to compute on cores",
        )  # fmt: skip
    if hardware.gpu_failure:
        return Finding(
            subject="GPUs", status="warning", text=f"nvidia-smi fails: {hardware.gpu_failure}; computes on cores",
            remedy="install the NVIDIA driver anew, or give the container its GPUs (--gpus all)",
        )  # fmt: skip
    if not gpus and not seen:
        return Finding(subject="GPUs", status="ok", text="none: computes on cores")
    names = {gpu.name: [other.name for other in gpus].count(gpu.name) for gpu in gpus}
    kinds = ", ".join(f"{count} x {name}" for name, count in names.items()) or f"{seen} GPUs"
    driver = f", driver {gpus[0].driver}" if gpus else ""
    text = f"{kinds}{driver}; TensorFlow sees {seen}{hidden}"
    if not seen and hardware.cuda_visible_devices in ("", "-1"):
        return Finding(subject="GPUs", status="ok", text=f"{kinds}, hidden by CUDA_VISIBLE_DEVICES: computes on cores")
    if not seen:
        remedy = "pip install 'tensorflow[and-cuda]'" if stack.cuda else "install a TensorFlow that is built for CUDA"
        return Finding(subject="GPUs", status="warning", text=f"{text}: computes on cores", remedy=remedy)
    if any(gpu.mig for gpu in gpus):
        remedy = "NCCL joins no two slices of one GPU: switch MIG off (nvidia-smi -mig 0), or train in one process"
        return Finding(subject="GPUs", status="warning", text=f"{text}; MIG is on", remedy=remedy)
    if "nccl" not in stack.horovod_parts:
        remedy = "build Horovod with HOROVOD_GPU_OPERATIONS=NCCL"
        return Finding(
            subject="GPUs", status="warning", text=f"{text}; no NCCL: sums go through the cores", remedy=remedy
        )
    return Finding(subject="GPUs", status="ok", text=f"{text}; NCCL {stack.nccl}")


def judge_cores(facts: Facts) -> Finding:
    """The cores that the process may use, and the limit of its cgroup."""
    hardware = facts.hardware
    count = len(hardware.cores)
    limit = "no cgroup limit" if hardware.quota is None else f"cgroup limit {hardware.quota:g}"
    bound = ", bound by the launcher" if hardware.bound_by_launcher else ""
    text = f"{count} of {hardware.total_cores} ({format_cores(hardware.cores)}{bound}), {limit}"
    if facts.local_size > 1 and not hardware.bound_by_launcher:
        usable = min(float(count), hardware.quota or count)
        if usable < facts.local_size:
            return Finding(
                subject="cores", status="warning", text=f"{text}, for {facts.local_size} ranks",
                remedy=f"start at most {max(1, int(usable))} on a node, or ask for more cores",
            )  # fmt: skip
    if hardware.quota is not None and hardware.quota < 1:
        return Finding(subject="cores", status="warning", text=text, remedy="give the container at least one core")
    return Finding(subject="cores", status="ok", text=text)


def judge_memory(facts: Facts) -> Finding:
    """Enough for TensorFlow in each rank."""
    hardware = facts.hardware
    if not hardware.memory_bytes:
        return Finding(subject="memory", status="warning", text="unknown", remedy="mount /proc")
    limit = "no cgroup limit" if hardware.memory_limit is None else f"cgroup limit {in_gib(hardware.memory_limit)}"
    text = f"{in_gib(hardware.memory_bytes)}, {in_gib(hardware.available_bytes)} of it available; {limit}"
    available = min(hardware.available_bytes, hardware.memory_limit or hardware.available_bytes)
    if available < MEMORY_PER_RANK * facts.local_size:
        ranks = f" for {facts.local_size} ranks" if facts.local_size > 1 else ""
        return Finding(
            subject="memory", status="warning", text=f"{text}: little{ranks}",
            remedy=f"make {in_gib(MEMORY_PER_RANK * facts.local_size)} available (1 GiB a rank), or start fewer ranks",
        )  # fmt: skip
    return Finding(subject="memory", status="ok", text=text)


def judge_shm(facts: Facts) -> Finding:
    """Shared memory, through which the ranks of a node talk."""
    hardware = facts.hardware
    has_gpus = facts.stack.visible_gpus > 1 or (facts.stack.visible_gpus > 0 and facts.local_size > 1)
    ranks = facts.local_size if facts.size > 1 else facts.stack.visible_gpus or max(len(hardware.cores), 2)
    needed = ranks * (SHM_PER_GPU if has_gpus else SHM_PER_RANK)
    remedy = f"at least {max(needed, 64 * MIB) // MIB} MiB: docker run --shm-size=1g, or mount -o remount,size=1g"
    if hardware.shm_bytes is None or hardware.shm_free_bytes is None:
        return Finding(subject="/dev/shm", status="broken" if has_gpus else "warning", text="not there", remedy=remedy)
    text = f"{_in_size(hardware.shm_bytes)}, {_in_size(hardware.shm_free_bytes)} of it free"
    if hardware.shm_free_bytes >= needed:
        return Finding(subject="/dev/shm", status="ok", text=text)
    if has_gpus and "nccl" in facts.stack.horovod_parts:
        is_broken = hardware.shm_free_bytes < ranks * SHM_PER_NCCL_BUFFER
        text = f"{text}: {'too little' if is_broken else 'little'} for NCCL with {ranks} GPUs"
        return Finding(subject="/dev/shm", status="broken" if is_broken else "warning", text=text, remedy=remedy)
    # Measured: Open MPI 4.1 goes on over TCP, after a page of warnings.
    return Finding(
        subject="/dev/shm", status="warning", text=f"{text}: {ranks} ranks would talk by TCP, slowly", remedy=remedy
    )


def broken_probe(name: str, why: str) -> Finding:
    """A look that failed by itself, which says nothing about training."""
    return Finding(subject=name, status="warning", text=f"could not be looked at: {why}", remedy="report this message")


def can_join(facts: Facts) -> bool:
    """Whether this process can talk to other ranks at all."""
    uses_mpi = "mpi" in facts.stack.horovod_parts and facts.launcher != "horovodrun --gloo"
    needed = ["tensorflow", "horovod", *(["mpi4py"] if uses_mpi else [])]
    return not set(needed) & set(facts.stack.failures)


def is_within(version: str, bounds: tuple[tuple[int, int], tuple[int, int]]) -> bool:
    """Whether a version is at least the first and below the second."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return bool(match) and bounds[0] <= (int(match[1]), int(match[2])) < bounds[1]  # type: ignore[index]


def in_gib(size: float) -> str:
    """Bytes as gibibytes."""
    return f"{size / GIB:.0f} GiB" if size >= 10 * GIB else f"{size / GIB:.1f} GiB"


def _in_size(size: int) -> str:
    return in_gib(size) if size >= GIB else f"{size / MIB:.0f} MiB"


def _is_same_mpi(mpirun: str, library: str) -> bool:
    """Whether two descriptions agree, as far as both are known: the same name, and the same first two numbers."""
    names = [re.sub(r" [\d.]+\w*$", "", text) for text in (mpirun, library)]
    numbers = [re.findall(r" (\d+\.\d+)", text) for text in (mpirun, library)]
    return names[0] == names[1] and (not all(numbers) or numbers[0] == numbers[1])


def _is_unfit(stack: Stack, package: str) -> bool:
    """Whether a package is missing, does not load, or is the Keras of before."""
    version = stack.versions.get(package)
    is_legacy = package == "keras" and bool(version) and not is_within(version or "", KERAS_3)
    return version is None or package in stack.failures or is_legacy


def _judge_package(stack: Stack, package: str, title: str, remedy: str = SETUP) -> Finding:
    """Whether a package is installed and loads."""
    version, failure = stack.versions.get(package), stack.failures.get(package)
    if version is None:
        return Finding(subject=title, status="broken", text="not installed", remedy=remedy)
    if failure:
        return Finding(subject=title, status="broken", text=f"{version} does not load: {failure}", remedy=remedy)
    return Finding(subject=title, status="ok", text=version)
