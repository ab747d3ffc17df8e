"""The doctor on this machine, with one thing after the other broken for real, and under launchers.

What cannot be broken here, GPUs, is judged from made facts in tests/unit/test_doctor.py.
"""

import json
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.world.conftest import RunRingtrain
from tests.world.environments import SITE_PACKAGES, make_environment
from tests.world.processes import REPOSITORY, Finished, clean_environment, run_command

TITLE = "ringtrain .* doctor on"
WITHOUT_GPUS = {"CUDA_VISIBLE_DEVICES": ""}  # so that a machine with some judges alike


def look(
    *, python: Path | str = sys.executable, env: Mapping[str, str] | None = None, wrapper: Sequence[str] = ()
) -> Finished:
    """``python -m ringtrain doctor`` to its end."""
    command = [*wrapper, str(python), "-m", "ringtrain", "doctor"]
    return run_command(command, env=clean_environment(**WITHOUT_GPUS, **(env or {})), timeout=120)


def row(finished: Finished, subject: str) -> str:
    """A finding with its remedy, as one line."""
    lines = finished.stdout.splitlines()
    [start] = [number for number, line in enumerate(lines) if re.match(rf"{subject} +(ok|warning|broken)", line)]
    more = [line.strip() for line in lines[start + 1 :]]
    indented = [line.startswith(" " * 10) for line in lines[start + 1 :]]
    return " ".join([lines[start], *more[: indented.index(False)]])


def assert_told(finished: Finished, subject: str, status: str, *texts: str, num_warnings: int = 1) -> None:
    """The exit code fits, the finding is there with its remedy, and nothing else is written."""
    assert finished.rc == (2 if status == "broken" else 0), finished.stdout + finished.stderr
    assert finished.stderr == ""
    assert len(re.findall(TITLE, finished.stdout)) == 1
    assert not [line for line in finished.stdout.splitlines() if len(line) > 80 and " " in line.strip()]
    finding = row(finished, subject)
    assert re.match(rf"{subject} +{status} ", finding), finding
    for text in (*texts, "->"):
        assert text in finding
    last = finished.stdout.splitlines()[-1]
    assert last.startswith(
        "Training would not work. Broken: " if status == "broken" else f"Training would work, with {num_warnings} warn"
    )


@pytest.mark.cold  # the fork server has imported TensorFlow and Keras, whose import is tested here
def test_without_faults_nothing_is_advised() -> None:
    finished = look()
    assert finished.rc == 0
    assert finished.stderr == ""
    assert "->" not in finished.stdout
    assert finished.stdout.splitlines()[-1] == "Training would work."
    assert re.search(r"built for TensorFlow .*; controllers: .*Gloo; operations: ", row(finished, "Horovod"))


@pytest.fixture(scope="module")
def two_warnings(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Without Horovod, in a tiny ``/dev/shm``."""
    python, _ = make_environment(tmp_path_factory.mktemp("two_warnings") / "env", without="horovod*")
    return look(python=python, wrapper=with_dev_shm("1m"))


def test_horovod_missing(two_warnings: Finished) -> None:
    assert_told(two_warnings, "Horovod", "warning", "cores sum natively, over MPI", "make setup", num_warnings=2)


def test_tiny_dev_shm(two_warnings: Finished) -> None:
    assert_told(two_warnings, "/dev/shm", "warning", "1 MiB, 1 MiB of it free", "--shm-size=1g", num_warnings=2)


def test_horovod_built_for_another_tensorflow(tmp_path: Path) -> None:
    """Its extension needs a symbol that this TensorFlow has not."""
    python, packages = make_environment(tmp_path / "env", without="horovod")
    shutil.copytree(SITE_PACKAGES / "horovod", packages / "horovod")
    (packages / "horovod/metadata.json").write_text(json.dumps({"tensorflow": "2.15.1"}))
    [extension] = (packages / "horovod/tensorflow").glob("mpi_lib*.so")
    symbols = extension.read_bytes()
    symbol = b"_ZTIN10tensorflow13AsyncOpKernelE\0"
    assert symbol in symbols
    extension.unlink()
    extension.write_bytes(symbols.replace(symbol, b"_ZTIN10tensorflow13AsyncOpKernalE\0"))
    finished = look(python=python)
    assert_told(finished, "Horovod", "broken", "built for TensorFlow 2.15.1, but", "does not load", "build it for this")


def test_legacy_keras(tmp_path: Path) -> None:
    """A stand-in for Keras 2, which says of itself what Keras 2.15.0 says."""
    python, packages = make_environment(tmp_path / "env", without="keras*")
    (packages / "keras").mkdir()
    (packages / "keras/__init__.py").write_text("__version__ = '2.15.0'\n")
    assert_told(look(python=python), "Keras", "broken", "2.15.0, but ringtrain trains models of Keras 3", "pip install")


@pytest.mark.slow
def test_mpi4py_that_looks_for_another_mpi() -> None:
    finished = look(env={"MPI4PY_MPIABI": "mpich"})
    assert_told(finished, "MPI", "broken", "mpi4py", "does not load", "libmpi.so.12", "pip install")


@pytest.mark.slow
def test_mpirun_of_another_mpi(tmp_path: Path) -> None:
    """A stand-in for MPICH's mpirun, which says of itself what that one says."""
    mpirun = tmp_path / "mpirun"
    mpirun.write_text("#!/bin/sh\necho 'HYDRA build details:'\necho '    Version:         4.0.2'\n")
    mpirun.chmod(0o755)
    finished = look(env={"PATH": f"{tmp_path}{os.pathsep}{clean_environment()['PATH']}"})
    assert_told(finished, "MPI", "broken", f"{mpirun} is of MPICH 4.0.2", "first in PATH")


@pytest.mark.parametrize(("programs", "status"), [(["horovodrun"], "warning"), ([], "broken")])
def test_no_mpirun(tmp_path: Path, programs: list[str], status: str) -> None:
    for name in programs:
        (tmp_path / name).symlink_to(Path(sys.executable).with_name(name))
    remedy = "horovodrun --gloo" if programs else "put .venv/bin in PATH"
    assert_told(look(env={"PATH": str(tmp_path)}), "launchers", status, remedy, "openmpi-bin")


def with_dev_shm(size: str, *, then: str = "true") -> list[str]:
    """What runs a command with a ``/dev/shm`` of its own."""
    mount = f'mount -t tmpfs -o size={size} tmpfs /dev/shm && {then} && exec "$@"'
    user = [] if os.geteuid() == 0 else ["--map-root-user"]
    return ["unshare", *user, "--mount", "sh", "-c", mount, "sh"]


@pytest.mark.slow
def test_ranks_use_tcp_if_dev_shm_is_large_but_full() -> None:
    full = with_dev_shm("64m", then="head -c 64m /dev/zero > /dev/shm/filler")
    ranks = ["mpirun", "--oversubscribe", "--bind-to", "none", "-np", "2", sys.executable, "-m", "ringtrain", "doctor"]
    finished = run_command([*full, *ranks], env=clean_environment(**WITHOUT_GPUS), timeout=120)
    assert finished.rc == 0, finished.stdout + finished.stderr
    assert "0 MiB of it free: 2 ranks would talk by TCP, slowly" in row(finished, "/dev/shm")
    assert "the sums are right" in row(finished, "all-reduce")


@pytest.mark.cold  # the fork server has imported the package that does not load here
def test_the_doctor_reports_what_training_refuses(tmp_path: Path) -> None:
    (tmp_path / "yaml.py").write_text("raise RuntimeError('libyaml is broken')")
    env = {"PYTHONPATH": f"{REPOSITORY}{os.pathsep}{tmp_path}", "TF_NUM_INTRAOP_THREADS": "zz"}
    finished = look(env=env)
    assert finished.rc == 2, finished.stderr
    assert finished.stderr == ""
    said = " ".join(finished.stdout.split())
    assert "TF_NUM_INTRAOP_THREADS='zz' in the environment; it must be" in said
    assert "the package yaml does not load: RuntimeError: libyaml is broken" in said
    assert finished.stdout.splitlines()[-1].endswith("Broken: environment.")
    for words in (["ringtrain", "train"], ["ringtrain", "report"], ["launch", "local"]):
        refused = run_command([sys.executable, "-m", *words], env=clean_environment(**env), timeout=60)
        assert refused.rc == 2
        [line] = refused.stderr.splitlines()
        assert (
            f"what {' '.join(words).removeprefix('ringtrain ')} needs cannot be loaded: RuntimeError: libyaml is broken"
            in line
        )


@pytest.mark.cold  # the fork server has imported what is hidden here
@pytest.mark.parametrize(
    ("name", "what"),
    [("random", "Python's own module"), ("logging", "Python's own module"), ("numpy", "the installed package")],
)
def test_a_users_file_that_hides_a_module_is_named(tmp_path: Path, name: str, what: str) -> None:
    file = tmp_path / f"{name}.py"
    file.write_text("x = 1")
    env = clean_environment(PYTHONPATH=str(REPOSITORY), **WITHOUT_GPUS)
    for command in ("train", "doctor"):
        refused = run_command([sys.executable, "-m", "ringtrain", command], env=env, timeout=120, cwd=tmp_path)
        assert refused.rc == 2, refused.stdout + refused.stderr
        said = " ".join((refused.stdout + refused.stderr).split())
        hides = f"{file} hides {what} '{name}'"
        assert f"{hides}: rename it" in said or f"{hides} -> rename it" in said
        assert "Traceback" not in said


@pytest.mark.parametrize("launcher", ["mpirun", pytest.param("horovodrun --gloo", marks=pytest.mark.slow)])
def test_two_ranks_make_one_table(run_ringtrain: RunRingtrain, launcher: str) -> None:
    finished = run_ringtrain(["doctor"], launcher=launcher, env=WITHOUT_GPUS | {"TF_CPP_MIN_LOG_LEVEL": "2"})
    assert finished.rc == 0, finished.stdout + finished.stderr
    assert len(re.findall(TITLE, finished.stdout)) == 1
    shown = re.sub(r"^\[0\]<stdout>:", "", finished.stdout, flags=re.MULTILINE)
    assert "<stdout>" not in shown
    assert f"2 ranks, started by {'mpirun (Open MPI)' if launcher == 'mpirun' else launcher}" in shown
    finished = Finished(finished.rc, shown, finished.stderr, finished.left_behind, finished.seconds)
    assert "the same on all 2 ranks" in row(finished, "versions")
    assert re.search(r": rank 0: core.*, rank 1: core", row(finished, "plan"))
    carrier = "Gloo" if "gloo" in launcher else "MPI"
    long, short = r"[\d.]+ ms: [\d.]+ GB/s", r"4 KiB in [\d.]+ ms"
    reduced = rf"16 MiB among 2 ranks by Horovod over {carrier}.* in {long} .*; {short}; the sums are right"
    assert re.search(reduced, row(finished, "all-reduce"))
    assert shown.splitlines()[-1] == "Training would work."


@pytest.mark.slow
def test_a_launcher_of_another_mpi_makes_one_table_of_rank_0() -> None:
    """A lone process that believes a launcher's variables is what a foreign mpirun makes of each rank."""
    place = {"RANK": "0", "SIZE": "2", "LOCAL_RANK": "0", "LOCAL_SIZE": "2"}
    finished = look(env={f"OMPI_COMM_WORLD_{name}": value for name, value in place.items()})
    assert finished.rc == 2
    assert len(re.findall(TITLE, finished.stdout)) == 1
    assert re.search(r"2 processes, .* Horovod sees 1\b", row(finished, "joining"))
    assert "Traceback" not in finished.stdout + finished.stderr


def start_doctor(*pythons: Path | str) -> Finished:
    """``mpirun``, with an interpreter for each rank."""
    ranks: list[str] = []
    for python in pythons:
        ranks += [":", "-np", "1", "-x", f"PYTHONPATH={REPOSITORY}", str(python), "-m", "ringtrain", "doctor"]
    command = ["mpirun", "--oversubscribe", "--bind-to", "none", *ranks[1:]]
    finished = run_command(command, env=clean_environment(**WITHOUT_GPUS), timeout=120)
    assert not finished.left_behind
    assert "Traceback" not in finished.stdout + finished.stderr
    assert len(re.findall(TITLE, finished.stdout)) == 1, finished.stdout + finished.stderr
    return finished


@pytest.mark.slow
def test_a_rank_that_cannot_join_ends_the_look_of_all(tmp_path: Path) -> None:
    """Rank 1's interpreter has no Horovod and no mpi4py; rank 0, which waits for it, still shows its table."""
    python, packages = make_environment(tmp_path / "env", without="horovod*")
    for package in packages.glob("mpi4py*"):
        package.unlink()
    finished = start_doctor(sys.executable, python)
    assert finished.rc == 2
    assert "another rank ended first" in row(finished, "joining")
    assert re.search(r"rank 1 on \S+: Horovod: not installed\. .*make setup", finished.stderr)


@pytest.mark.slow
def test_what_all_ranks_lack_is_reported_once(tmp_path: Path) -> None:
    python, _ = make_environment(tmp_path / "env", without="horovod*")
    finished = start_doctor(python, python)
    assert finished.rc == 0
    assert "not installed" in row(finished, "Horovod")
    assert "among 2 ranks by MPI, sums natively" in row(finished, "all-reduce")
    assert "ringtrain" not in finished.stderr
