"""What the doctor makes of facts, which are made here; tests/world/test_doctor.py breaks the things themselves."""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import pytest

from ringtrain.collectives.timing import bus_bandwidth
from ringtrain.doctor import judging
from ringtrain.doctor.facts import AllReduce, Facts, Gpu, Hardware, Launchers, Stack, facts_from_plain
from ringtrain.doctor.judging import Finding, can_join, is_within, judge
from ringtrain.doctor.ranks import judge_all_reduce, judge_ranks, judge_versions
from ringtrain.doctor.table import WIDTH, conclusion, exit_code, format_table
from ringtrain.runtime.world import World
from tests.unit.test_setup import EXTRAS, PROJECT, ranges

GIB, MIB = 2**30, 2**20
LIBMPI = "/usr/lib/libmpi.so.40"
STACK = Stack(
    python="3.11.7",
    executable="/env/bin/python",
    versions={"tensorflow": "2.21.0", "keras": "3.15.1", "horovod": "0.28.1", "mpi4py": "4.1.2"},
    horovod_built_for="2.21.0",
    horovod_parts=("mpi", "gloo"),
    horovod_mpi=(LIBMPI,),
    mpi4py_mpi=(LIBMPI,),
    mpi_library="Open MPI 4.1.4",
)
HARDWARE = Hardware(
    cores=(0, 1, 2, 3),
    total_cores=8,
    memory_bytes=16 * GIB,
    available_bytes=12 * GIB,
    shared_memory_bytes=8 * GIB,
    shm_free_bytes=8 * GIB,
)
LAUNCHERS = Launchers(
    horovodrun="/env/bin/horovodrun", mpirun="/usr/bin/mpirun", mpirun_version="Open MPI 4.1.4", srun=None
)
H200 = Gpu(uuid="GPU-a", name="NVIDIA H200", driver="570.1", mig=False)
TWO_GPUS = (H200, replace(H200, uuid="GPU-b"))
HEALTHY = Facts(
    world=World(rank=0, size=1, local_rank=0, local_size=1, node="a", launcher="no launcher"),
    stack=STACK,
    hardware=HARDWARE,
    launchers=LAUNCHERS,
)


def changed(facts: Facts = HEALTHY, **changes: Any) -> Facts:
    """Facts with other values, of whichever part has a field of that name."""
    for name, value in changes.items():
        for part in ("world", "stack", "hardware", "launchers"):
            if name in getattr(facts, part).__dataclass_fields__:
                facts = replace(facts, **{part: replace(getattr(facts, part), **{name: value})})
                break
        else:
            facts = replace(facts, **{name: value})
    return facts


def without(package: str) -> dict[str, str]:
    return {name: version for name, version in STACK.versions.items() if name != package}


def at(**versions: str) -> dict[str, str]:
    return {**STACK.versions, **versions}


def finding_of(facts: Facts, subject: str) -> Finding:
    [finding] = [item for item in judge(facts) if item.subject == subject]
    return finding


def test_a_healthy_machine_has_no_finding() -> None:
    findings = judge(HEALTHY)
    assert [item.status for item in findings] == ["ok"] * 10
    assert not any(item.remedy for item in findings)
    assert exit_code(findings) == 0
    assert conclusion(findings) == "Training would work."


GPUS: Mapping[str, Any] = {"gpus": TWO_GPUS, "visible_gpus": 2, "cuda": "12.5.1"}
NCCL: Mapping[str, Any] = {"horovod_parts": ("mpi", "gloo", "nccl", "cuda"), "nccl": "2.21.5"}
RANKS: Mapping[str, Any] = {"size": 2, "local_size": 2, "launcher": "srun"}

# What is changed in a healthy machine; the finding's subject, verdict, and words of its text and of its remedy.
CASES: dict[str, tuple[Mapping[str, Any], str, str, str, str]] = {
    "old Python": ({"python": "3.9.2"}, "Python", "broken", "3.9.2", "3.10 to 3.13"),
    "new Python": ({"python": "3.14.0"}, "Python", "broken", "3.14.0", "make PYTHON="),
    "no TensorFlow": ({"versions": without("tensorflow")}, "TensorFlow", "broken", "not installed", "make setup"),
    "TensorFlow crashes": (
        {"failures": {"tensorflow": "ended the interpreter (SIGILL)"}},
        "TensorFlow", "broken", "2.21.0 does not load: ended the interpreter (SIGILL)", "make setup",
    ),
    "other TensorFlow": ({"versions": at(tensorflow="2.23.0")}, "TensorFlow", "warning", "2.23.0", "2.18 to 2.22"),
    "no Keras": ({"versions": without("keras")}, "Keras", "broken", "not installed", "make setup"),
    "legacy Keras": ({"versions": at(keras="2.15.0")}, "Keras", "broken", "2.15.0, but", "pip install 'keras>=3"),
    "legacy Keras that fails": (
        {"versions": at(keras="2.15.0"), "failures": {"keras": "x"}}, "Keras", "broken", "Keras 3", "keras>=3"
    ),
    "tf.keras is legacy": ({"legacy_keras": True}, "Keras", "warning", "TF_USE_LEGACY_KERAS", "unset TF_USE_LEGACY"),
    "other backend": ({"keras_backend": "jax"}, "Keras", "broken", "KERAS_BACKEND=jax", "unset KERAS_BACKEND"),
    "untested Keras": ({"versions": at(keras="3.17.0")}, "Keras", "warning", "3.17.0", "keras>=3.10,<3.17"),
    "no Horovod": ({"versions": without("horovod")}, "Horovod", "warning", "cores sum natively", "make setup"),
    "no Horovod and no MPI": (
        {"versions": {"tensorflow": "2.21.0"}}, "Horovod", "broken", "not installed", "make setup"
    ),
    "Horovod for another TensorFlow, loads not": (
        {"horovod_built_for": "2.18.1", "failures": {"horovod": "undefined symbol"}},
        "Horovod", "broken", "built for TensorFlow 2.18.1, but 2.21.0 is installed, and does not load",
        "CMAKE_TOOLCHAIN_FILE=$PWD/.ci/horovod/toolchain.cmake pip install",
    ),
    "Horovod for another TensorFlow, loads": (
        {"horovod_built_for": "2.20.0"}, "Horovod", "warning", "built for TensorFlow 2.20.0, but 2.21.0", "make setup"
    ),
    "Horovod crashes": (
        {"failures": {"horovod": "ended the interpreter (SIGSEGV)"}}, "Horovod", "broken", "SIGSEGV", "make setup"
    ),
    "Horovod carries nothing": ({"horovod_parts": ()}, "Horovod", "broken", "controllers: none", "mpicc"),
    "Horovod without TensorFlow": (
        {"failures": {"tensorflow": "x", "horovod": "x"}}, "Horovod", "broken", "needs TensorFlow", "mend TensorFlow"
    ),
    "Horovod with legacy Keras": (
        {"versions": at(keras="2.15.0"), "failures": {"horovod": "x"}},
        "Horovod", "broken", "needs Keras", "mend Keras first",
    ),
    "other Horovod": ({"versions": at(horovod="0.27.0")}, "Horovod", "warning", "0.27.0", "0.28.1"),
    "no mpi4py": ({"versions": without("mpi4py")}, "MPI", "broken", "mpi4py not installed", "pip install 'mpi4py"),
    "mpi4py for another MPI": (
        {"failures": {"mpi4py": "libmpi.so.12: cannot open"}}, "MPI", "broken", "libmpi.so.12", "pip install 'mpi4py"
    ),
    "no mpi4py under Gloo": (
        {**RANKS, "launcher": "horovodrun --gloo", "versions": without("mpi4py")}, "MPI", "warning", "mpi4py", "pip"
    ),
    "two MPI libraries": (
        {"mpi4py_mpi": ("/opt/libmpi.so.12",), "mpi_library": "MPICH 4.0.2"},
        "MPI", "broken", f"Horovod loads {LIBMPI}, but mpi4py /opt/libmpi.so.12", "unset MPI4PY_LIBMPI",
    ),
    "mpirun of another MPI": (
        {"mpirun_version": "MPICH 4.0.2"}, "MPI", "broken", "/usr/bin/mpirun is of MPICH 4.0.2", "first in PATH"
    ),
    "mpirun of another Open MPI": (
        {"mpirun_version": "Open MPI 5.0.3"}, "MPI", "broken", "Open MPI 5.0.3", "mpirun of Open MPI 4.1.4"
    ),
    "mpirun of another patch": ({"mpirun_version": "Open MPI 4.1.6"}, "MPI", "ok", "Open MPI 4.1.4", ""),
    "unknown mpirun": ({"mpirun_version": None}, "MPI", "ok", "Open MPI 4.1.4", ""),
    "Gloo alone": ({"horovod_parts": ("gloo",), "versions": without("mpi4py")}, "MPI", "ok", "not used", ""),
    "no mpirun": ({"mpirun": None, "mpirun_version": None}, "launchers", "warning", "no mpirun", "horovodrun --gloo"),
    "mpirun that does not run": (
        {"mpirun_version": None, "mpirun_failure": "no libslurm"},
        "launchers", "warning", "mpirun (which fails: no libslurm)", "horovodrun --gloo",
    ),
    "no mpirun, no Gloo": (
        {"mpirun": None, "horovod_parts": ("mpi",)}, "launchers", "broken", "nothing starts ranks", "openmpi-bin"
    ),
    "no launcher": ({"mpirun": None, "horovodrun": None}, "launchers", "broken", "none: nothing", "put .venv/bin"),
    "srun alone": (
        {"mpirun": None, "horovodrun": None, "srun": "/bin/srun", "srun_mpi": "pmix"},
        "launchers", "ok", "srun (--mpi=pmix); no horovodrun, no mpirun", "",
    ),
    "srun without PMI": (
        {"mpirun": None, "horovodrun": None, "srun": "/bin/srun", "srun_mpi": "horovodrun"},
        "launchers", "broken", "neither PMIx nor PMI2", "openmpi",
    ),
    "srun is silent": ({"srun": "/bin/srun"}, "launchers", "ok", "srun (which does not respond)", ""),
    "mpirun refuses root": ({"refuses_root": True}, "launchers", "warning", "refuses root", "OMPI_ALLOW_RUN_AS_ROOT"),
    "under a launcher": ({**RANKS, "mpirun": None, "horovodrun": None}, "launchers", "ok", "this is srun", ""),
    "GPUs with NCCL": ({**GPUS, **NCCL}, "GPUs", "ok", "2 x NVIDIA H200, driver 570.1; TensorFlow sees 2; NCCL 2.", ""),
    "more ranks than GPUs": (
        {**GPUS, **NCCL, "size": 3, "local_size": 3}, "GPUs", "broken", "2 GPUs for 3 ranks", "at most 2 ranks"
    ),
    "a rank without a GPU": (
        {**GPUS, **RANKS, "device_failure": "x"}, "GPUs", "broken", "for 2 ranks", "CUDA_VISIBLE_DEVICES="
    ),
    "GPUs hidden": ({"gpus": TWO_GPUS, "cuda_visible_devices": ""}, "GPUs", "ok", "hidden by CUDA_VISIBLE_DEVICES", ""),
    "GPUs unseen": ({"gpus": TWO_GPUS, "cuda": "12.5"}, "GPUs", "warning", "TensorFlow sees 0", "[and-cuda]"),
    "TensorFlow without CUDA": ({"gpus": TWO_GPUS}, "GPUs", "warning", "training runs on CPU cores", "built for CUDA"),
    "a broken driver": ({"gpu_failure": "no NVML"}, "GPUs", "warning", "nvidia-smi fails: no NVML", "--gpus all"),
    "GPUs without NCCL": (GPUS, "GPUs", "warning", "no NCCL", "HOROVOD_GPU_OPERATIONS=NCCL"),
    "MIG": (
        {**GPUS, **NCCL, "gpus": (replace(H200, mig=True),)}, "GPUs", "warning", "MIG is on", "nvidia-smi -mig 0"
    ),
    "a cgroup's cores": ({"quota": 1.5}, "cores", "ok", "4 of 8 (0-3), cgroup limit 1.5", ""),
    "half a core": ({"quota": 0.5}, "cores", "warning", "cgroup limit 0.5", "at least one core"),
    "more ranks than cores": ({"size": 5, "local_size": 5}, "cores", "warning", "for 5 ranks", "at most 4"),
    "more ranks than the quota": ({**RANKS, "quota": 1.0}, "cores", "warning", "for 2 ranks", "at most 1"),
    "a core for each rank": ({**RANKS, "cores": (3,), "bound_by_launcher": True}, "cores", "ok", "bound by", ""),
    "little memory": ({"available_bytes": 512 * MIB}, "memory", "warning", "0.5 GiB of it available", "1.0 GiB"),
    "a cgroup's memory": ({**RANKS, "memory_limit": GIB}, "memory", "warning", "1.0 GiB: little for 2", "2.0 GiB"),
    "tiny /dev/shm": (
        {"shared_memory_bytes": MIB, "shm_free_bytes": MIB},
        "/dev/shm", "warning", "1 MiB of it free: 4 ranks", "--shm-size=1g",
    ),
    "tiny /dev/shm with NCCL": (
        {**GPUS, **NCCL, "shared_memory_bytes": 16 * MIB, "shm_free_bytes": 16 * MIB},
        "/dev/shm", "broken", "too little for NCCL", "remount,size=1g",
    ),
    "small /dev/shm with NCCL": (
        {**GPUS, **NCCL, "shared_memory_bytes": 40 * MIB, "shm_free_bytes": 40 * MIB},
        "/dev/shm", "warning", ": little for NCCL with 2 GPUs", "remount,size=1g",
    ),
    "no /dev/shm": ({"shared_memory_bytes": 0, "shm_free_bytes": 0}, "/dev/shm", "warning", "not there", "--shm-size"),
    "a look that failed": ({"unknown": {"node": "OSError: x"}}, "node", "warning", "OSError: x", "report"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_finding_names_the_thing_and_its_remedy(case: str) -> None:
    changes, subject, status, text, remedy = CASES[case]
    facts = changed(**changes)
    finding = finding_of(facts, subject)
    assert finding.status == status
    assert text in finding.text
    assert remedy in finding.remedy
    assert bool(finding.remedy) == (status != "ok")
    assert exit_code([finding]) == (2 if status == "broken" else 0)


def test_a_fault_is_reported_in_one_row_only() -> None:
    for changes in ({"versions": at(keras="2.15.0")}, {"mpirun": None}, {"quota": 0.5}, {"python": "3.9.0"}):
        assert sum(item.status != "ok" for item in judge(changed(**changes))) == 1, changes


def test_the_versions_that_are_judged_are_those_of_the_project() -> None:
    known = ranges(PROJECT["dependencies"])
    for name, (first, end) in {"tensorflow": judging.TENSORFLOWS, "keras": judging.KERASES}.items():
        assert known[name] == "<{1},>={0}".format(*(".".join(map(str, item)) for item in (first, end)))
    assert ranges(EXTRAS["horovod"])["horovod"] == f"=={judging.HOROVOD}"
    assert PROJECT["requires-python"] == ">={}.{},<{}.{}".format(*judging.PYTHONS[0], *judging.PYTHONS[1])


@pytest.mark.parametrize(
    ("version", "inside"),
    [("2.18.0", True), ("2.18.1rc0", True), ("2.17.9", False), ("2.19.0", False), ("3.0", False), ("?", False)],
)
def test_versions_are_compared_as_numbers(version: str, inside: bool) -> None:
    assert is_within(version, ((2, 18), (2, 19))) == inside


@pytest.mark.parametrize(
    ("failures", "parts", "joins"),
    [
        ({}, ("mpi",), True),
        ({"keras": "x"}, ("mpi",), True),
        ({"mpi4py": "x"}, ("mpi",), False),
        ({"mpi4py": "x"}, ("gloo",), True),
        ({"horovod": "x"}, (), False),
        ({"tensorflow": "x"}, (), False),
    ],
)
def test_who_can_talk_to_other_ranks(failures: dict[str, str], parts: tuple[str, ...], joins: bool) -> None:
    assert can_join(changed(failures=failures, horovod_parts=parts)) == joins


# --- Several ranks ---


SUMS = AllReduce(description="Horovod over MPI", seconds=0.008, short_seconds=2e-4, is_right=True)


def rank_facts(rank: int, size: int = 2, node: str = "a", **changes: Any) -> Facts:
    place = {"size": size, "rank": rank, "local_size": size, "local_rank": rank, "node": node, "launcher": "mpirun"}
    return changed(**{**place, "device": f"core {rank}", **changes})


def test_identical_ranks_share_one_table() -> None:
    findings = judge_ranks([rank_facts(0), rank_facts(1)], SUMS)
    assert [item.status for item in findings] == ["ok"] * 13
    assert [item.subject for item in findings[-3:]] == ["versions", "plan", "all-reduce"]
    assert "the same on all 2 ranks: Python 3.11.7, TensorFlow 2.21.0" in findings[-3].text
    assert findings[-2].text == "a: rank 0: core 0, rank 1: core 1"


def test_a_rank_with_other_versions_is_named_with_its_host() -> None:
    other = rank_facts(2, 3, "b", versions=at(tensorflow="2.17.0"))
    finding = judge_versions([rank_facts(0, 3), rank_facts(1, 3), other])
    assert finding.status == "broken"
    assert finding.text == "rank 2 on b: TensorFlow 2.17.0 (rank 0: TensorFlow 2.21.0)"
    assert "one environment" in finding.remedy


def test_another_patch_of_python_is_a_warning() -> None:
    finding = judge_versions([rank_facts(0), rank_facts(1, python="3.11.2")])
    assert (finding.status, finding.text) == ("warning", "rank 1 on a: Python 3.11.2 (rank 0: Python 3.11.7)")


def test_a_fault_on_other_nodes_is_reported_once_with_its_ranks() -> None:
    small = {"shared_memory_bytes": MIB, "shm_free_bytes": MIB}
    findings = judge_ranks([rank_facts(0, 3), rank_facts(1, 3, "b", **small), rank_facts(2, 3, "b", **small)], None)
    [finding] = [item for item in findings if item.status != "ok"]
    assert (finding.subject, finding.status) == ("/dev/shm", "warning")
    assert finding.text.startswith("ranks 1, 2 on b: 1 MiB")


def test_a_finding_of_all_ranks_is_reported_once() -> None:
    findings = judge_ranks([rank_facts(rank, quota=1.0) for rank in range(2)], None)
    assert [item.subject for item in findings if item.status != "ok"] == ["cores"]


def test_the_plan_has_a_row_for_each_node() -> None:
    ranks = [rank_facts(rank, 4, "ab"[rank // 2], device=f"GPU {rank % 2}") for rank in range(4)]
    plans = [item.text for item in judge_ranks(ranks, None) if item.subject == "plan"]
    assert plans == ["a: rank 0: GPU 0, rank 1: GPU 1", "b: rank 2: GPU 0, rank 3: GPU 1"]


@pytest.mark.parametrize(
    ("gpus", "shared"),
    [
        (["GPU-a", "GPU-b"], False),
        (["GPU-a", "GPU-a"], True),  # a node with one GPU, and two ranks that both take it
        ([None, None], False),  # on cores
    ],
)
def test_no_two_ranks_of_a_node_have_the_same_gpu(gpus: list[str | None], shared: bool) -> None:
    ranks = [rank_facts(rank, **GPUS, **NCCL, device="GPU 0", gpu=gpus[rank]) for rank in range(2)]
    broken = [item for item in judge_ranks(ranks, None) if item.status == "broken"]
    assert len(broken) == shared
    assert all("ranks 0, 1 on a have the same GPU GPU-a" in item.text for item in broken)


def test_gpus_of_the_same_name_on_two_nodes_are_two() -> None:
    ranks = [
        rank_facts(rank, 2, "ab"[rank], **GPUS, **NCCL, device="GPU 0", gpu="GPU-a", local_rank=0, local_size=1)
        for rank in range(2)
    ]
    assert exit_code(judge_ranks(ranks, None)) == 0


def test_bandwidth_is_that_of_a_ring_s_links() -> None:
    assert bus_bandwidth(1000, 2.0, 2) == 500
    assert bus_bandwidth(1000, 2.0, 4) == 750


def test_a_wrong_sum_is_broken() -> None:
    finding = judge_all_reduce(replace(SUMS, is_right=False), 2)
    assert finding.status == "broken"
    assert "16 MiB among 2 ranks by Horovod over MPI in 8.0 ms: 2.10 GB/s" in finding.text
    assert "4 KiB in 0.20 ms; A SUM IS WRONG" in finding.text
    assert "WRONG" in finding.text


def test_facts_travel_as_json() -> None:
    facts = rank_facts(1, **GPUS, **NCCL, failures={"keras": "x"}, quota=1.5)
    assert facts_from_plain(json.loads(json.dumps(asdict(facts)))) == facts
    assert facts_from_plain(json.loads(json.dumps(asdict(HEALTHY)))) == HEALTHY


# --- The table ---


def test_the_table_fits_80_columns_with_remedies_below_findings() -> None:
    findings = [
        Finding(subject="MPI", status="broken", text="word " * 40, remedy="do this " * 20),
        Finding(subject="/dev/shm", status="ok", text="fine"),
    ]
    text = format_table("ringtrain doctor", findings, colour=False)
    lines = text.splitlines()
    assert max(map(len, lines)) <= WIDTH == 80
    assert lines[2].startswith("MPI       broken   word")
    first_remedy = next(number for number, line in enumerate(lines) if "-> do this" in line)
    assert 2 < first_remedy < next(number for number, line in enumerate(lines) if line.startswith("/dev/shm"))
    assert lines[-1] == "Training would not work. Broken: MPI."
    assert "\x1b" not in text


def test_colour_changes_only_the_colour() -> None:
    findings = judge(changed(mpirun=None, python="3.9.1"))
    plain, coloured = (format_table("x", findings, colour=colour) for colour in (False, True))
    assert coloured.count("\x1b[32m") == 8
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == plain


def test_warnings_are_counted_and_do_not_break() -> None:
    findings = judge(changed(quota=0.5, available_bytes=1))
    assert (conclusion(findings), exit_code(findings)) == ("Training would work, with 2 warnings.", 0)


def test_python_without_docstrings_is_reported() -> None:
    finding = finding_of(changed(optimize=2), "Python")
    assert (finding.status, finding.remedy) == ("warning", "unset PYTHONOPTIMIZE, and leave out -OO")
    failed = changed(optimize=2, failures={"tensorflow": "TypeError"})
    assert finding_of(failed, "Python").status == "broken"
