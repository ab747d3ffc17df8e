"""How the doctor looks: nothing that it looks at can end it, hold it up, or make it raise."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ringtrain.doctor.inside import describe_mpi
from ringtrain.doctor.judging import judge
from ringtrain.doctor.probes import gather_facts, load_packages, parse_gpus, read_answer
from ringtrain.doctor.table import exit_code
from ringtrain.runtime.machine import read_memory_limits
from ringtrain.runtime.world import World

BEGIN = "import json, os, signal, sys, time\n"
DONE = "print(json.dumps({'name': 'tensorflow', 'found': {'version': '1'}}), flush=True)\n"


@pytest.mark.parametrize(
    ("script", "failures"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", {"keras": "loading it ended the interpreter (SIGSEGV)"}),
        ("sys.exit('no luck')", {"keras": "loading it ended the interpreter with exit code 1: no luck"}),
        ("time.sleep(60)", {"keras": "loading it took more than 1 s"}),
    ],
)
def test_a_package_that_ends_or_holds_up_its_process_is_named(script: str, failures: dict[str, str]) -> None:
    found, failed = load_packages([sys.executable, "-c", BEGIN + DONE + script], 1.0)
    assert found == {"tensorflow": {"version": "1"}}
    assert failed == failures | dict.fromkeys(["horovod", "mpi4py"], "not tried: keras ended the look")


def test_an_incomplete_answer_is_blamed_on_the_step_in_progress() -> None:
    answer = '{"name": "tensorflow", "failure": "ImportError: x"}\n'
    assert read_answer(answer, "gone")[1] == {
        "tensorflow": "ImportError: x",
        "keras": "gone",
        "horovod": "not tried: keras ended the look",
        "mpi4py": "not tried: keras ended the look",
    }


def test_a_look_that_raises_is_itself_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise OSError("no such luck")

    for name in ("look_at_stack", "look_at_hardware", "look_at_launchers"):
        monkeypatch.setattr(f"ringtrain.doctor.probes.{name}", fail)
    world = World(rank=0, size=1, local_rank=0, local_size=1, node="a", launcher="no launcher")
    facts = gather_facts(world, {}, keras_backend=None)
    assert facts.unknown == dict.fromkeys(["packages", "node", "launchers"], "OSError: no such luck")
    assert exit_code(judge(facts)) == 2, "of packages that nobody could look at nothing good is known"


@pytest.mark.parametrize(
    ("text", "described"),
    [
        ("mpirun (Open MPI) 4.1.4\n\nReport bugs to ...", "Open MPI 4.1.4"),
        ("Open MPI v4.1.4, package: Debian OpenMPI, ident: 4.1.4", "Open MPI 4.1.4"),
        ("mpirun (Open MPI) 5.0.3rc1", "Open MPI 5.0.3"),
        ("MPICH Version:      4.0.2\nMPICH Release date: x", "MPICH 4.0.2"),
        ("HYDRA build details:\n    Version:                                 4.0.2\n", "MPICH 4.0.2"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.11 Build 2023", "Intel MPI 2021.11"),
        ("", None),
        ("some other thing 1.2", None),
    ],
)
def test_an_mpi_is_known_by_its_own_words(text: str, described: str | None) -> None:
    assert describe_mpi(text) == described


def test_the_lines_of_nvidia_smi_are_read() -> None:
    listing = "GPU-a, NVIDIA H200, 570.86.15, Disabled\nGPU-b, NVIDIA A100-SXM4-40GB, 570.86.15, Enabled\n"
    listing += "GPU-c, Tesla T4, 570.86.15, [N/A]\n"
    assert [(gpu.uuid, gpu.name, gpu.mig) for gpu in parse_gpus(listing)] == [
        ("GPU-a", "NVIDIA H200", False), ("GPU-b", "NVIDIA A100-SXM4-40GB", True), ("GPU-c", "Tesla T4", False)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({"sys/fs/cgroup/a/memory.max": "max", "sys/fs/cgroup/memory.max": "1000"}, 1000),
        ({"sys/fs/cgroup/memory/m/memory.limit_in_bytes": "2000"}, 2000),
        ({"sys/fs/cgroup/memory/m/memory.limit_in_bytes": str(2**63 - 4096)}, None),
        ({}, None),
    ],
)
def test_the_tightest_memory_limit_counts(tmp_path: Path, files: dict[str, str], limit: int | None) -> None:
    for name, text in {"proc/self/cgroup": "4:memory:/m\n0::/a", **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert min((granted for granted, _ in read_memory_limits(tmp_path)), default=None) == limit


WAIT = """
import ctypes
import numpy  # whose threads take signals
from ringtrain.commands import doctor
doctor.TOGETHER_SECONDS = {seconds}
with doctor.ending_in_time(lambda reason: print(reason, flush=True)):
    print("waits", flush=True)
    ctypes.CDLL(None).sleep(60)  # as a rank waits in MPI: no signal handler of Python's runs meanwhile
"""


@pytest.mark.parametrize(
    ("seconds", "number", "reason"),
    [(0.2, None, "the ranks did not meet in 0 s"), (60, signal.SIGTERM, "another rank ended first")],
)
def test_a_rank_that_waits_in_vain_reports_it_and_exits(
    seconds: float, number: signal.Signals | None, reason: str
) -> None:
    process = subprocess.Popen([sys.executable, "-c", WAIT.format(seconds=seconds)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "waits\n"
    if number:
        process.send_signal(number)
    assert process.communicate(timeout=30)[0] == f"{reason}\n"
    assert process.returncode == 2
