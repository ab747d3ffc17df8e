"""What `make dist` builds, installed where neither the checkout nor its ``launch`` can be imported."""

import hashlib
import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import ringtrain
from tests.world.environments import SITE_PACKAGES, make_environment, uv_install
from tests.world.processes import REPOSITORY, Finished, clean_environment, run_command
from tests.world.running import events

# A user's file. What mypy is to report of a line stands behind it.
TYPED = """
from pathlib import Path
from typing import Any

import keras
import numpy as np
import ringtrain
from ringtrain import Config, Sources, Workload, augment, from_arrays, from_generator
from ringtrain import moons  # ! attr-defined


class Right(Workload):
    defaults = {"epochs": 2, "optimizer": {"lr": 0.1}}

    def create_model(self) -> keras.Model:
        return keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])

    def create_sources(self, data_dir: Path | None, *, synthetic: bool) -> Sources:
        return Sources(train=from_arrays(np.zeros((8, 2)), np.zeros(8)))

    def loss(self, y: Any, outputs: Any) -> Any:
        return keras.losses.sparse_categorical_crossentropy(y, outputs, from_logits=True)

    def augment(self, x: Any, y: Any, keys: Any) -> tuple[Any, Any]:
        return augment.random_shift(x, keys, 2), y


class Wrong(Workload):
    def loss(self, outputs: Any) -> Any:  # ! override
        return outputs

    def metrics(self, y: Any, outputs: Any) -> list[Any]:  # ! override
        return [y]


def sources() -> Sources:
    return Sources(evaluation=from_arrays(0, 0))  # ! call-arg


if __name__ == "__main__":
    result = ringtrain.train(Right, Config(epochs=2))
    print(result.ending)  # ! union-attr
    ringtrain.train(Right(), {"epochs": 3})
    ringtrain.train(Sources)  # ! arg-type
    Config(epochs="many")  # ! arg-type
    from_generator(lambda rank: iter([]))  # ! arg-type
"""

RunInstalled = Callable[..., Finished]


def build(folder: Path) -> dict[str, Path]:
    """Return the archives that `make dist` builds, by suffix; without its set-up, which is this environment's."""
    subprocess.run([".ci/dist", folder], cwd=REPOSITORY, check=True, capture_output=True)
    return {path.suffix: path for path in folder.iterdir()}


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return build(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def wheel(archives: dict[str, Path]) -> Path:
    return archives[".whl"]


def install(archive: Path, environment: Path, packages: Path) -> Path:
    """Install into a new environment, which finds its dependencies in ``packages``, and return its programs.

    A ``.pth`` file in ``packages``, such as that of the editable installation, has no effect there.
    """
    venv.create(environment)
    [own] = environment.glob("lib/python*/site-packages")
    (own / "others.pth").write_text(str(packages))
    uv_install(environment / "bin/python", "--no-index", "--no-build-isolation", str(archive))
    return environment / "bin"


@pytest.fixture(scope="module")
def programs(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(wheel, tmp_path_factory.mktemp("wheel") / "environment", SITE_PACKAGES)


def run_in(tmp_path: Path, programs: Path, *command: str) -> Finished:
    """Run a command, which finds the programs first, in an empty directory, to a good end."""
    env = clean_environment(PYTHONPATH="", COLUMNS="80")
    env["PATH"] = os.pathsep.join([str(programs), env["PATH"]])
    finished = run_command(command, env=env, timeout=120, cwd=tmp_path)
    assert finished.rc == 0, finished.stdout + finished.stderr
    return finished


@pytest.fixture
def run_installed(programs: Path, tmp_path: Path) -> RunInstalled:
    return lambda name, *arguments: run_in(tmp_path, programs, str(programs / name), *arguments)


def test_it_installs_a_single_top_level_package(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"ringtrain"}
    assert {"ringtrain/py.typed", "ringtrain/launch/rank.py", "ringtrain/launch/templates/srun.sh.j2"} <= set(names)
    assert "ringtrain/collectives/native/libringtrain.so" in names
    assert not any("containers" in name for name in names), "they need a checkout"
    assert {"ringtrain/workloads/digits.npz", "ringtrain/workloads/digits.txt"} <= set(names)
    assert re.search(r"-py3-none-manylinux_2_\d+_\w+\.whl$", wheel.name), "it says which C library it needs"


@pytest.mark.slow  # compiles twice
def test_two_builds_have_the_same_bytes(archives: dict[str, Path], tmp_path: Path) -> None:
    again = build(tmp_path)
    commit = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=REPOSITORY, check=True, capture_output=True)
    with tarfile.open(archives[".gz"]) as members:
        assert {member.mtime for member in members} == {int(commit.stdout)}
    assert again.keys() == archives.keys() == {".whl", ".gz"}
    for suffix, archive in archives.items():
        assert again[suffix].name == archive.name
        assert hashlib.sha256(again[suffix].read_bytes()).digest() == hashlib.sha256(archive.read_bytes()).digest()


@pytest.mark.slow  # makes an environment for each, and starts as a user does
@pytest.mark.cold
@pytest.mark.native
@pytest.mark.parametrize(
    ("suffix", "without", "communication"),
    [
        (".whl", "horovod*", "communication: MPI, sums natively"),
        (".whl", "", "communication: Horovod over MPI"),
        (".gz", "horovod*", "communication: MPI, sums natively"),
    ],
)
def test_two_ranks_train_from_an_archive(
    suffix: str, without: str, communication: str, archives: dict[str, Path], tmp_path: Path
) -> None:
    _, packages = make_environment(tmp_path / "others", without=without)
    programs = install(archives[suffix], tmp_path / "environment", packages)
    assert "ringtrain" not in {path.name for path in packages.iterdir()}
    (tmp_path / "empty").mkdir()
    mpirun = ["mpirun", "--oversubscribe", "--bind-to", "none", "-np", "2"]
    finished = run_in(tmp_path / "empty", programs, *mpirun, "ringtrain", "--steps", "5", "--out", "run")
    assert communication in finished.stdout
    [start] = events(tmp_path / "empty/run", "start")
    assert (start["size"], start["versions"]["ringtrain"]) == (2, ringtrain.__version__)
    assert [event["exit_code"] for event in events(tmp_path / "empty/run", "end")] == [0]


def test_it_trains_a_users_file(run_installed: RunInstalled, tmp_path: Path) -> None:
    look = "import importlib.util, ringtrain; print(importlib.util.find_spec('launch'), ringtrain.__file__)"
    place = run_installed("python", "-c", look).stdout.split()
    assert place[0] == "None"
    assert "environment" in Path(place[1]).parts
    assert "  launch  " in run_installed("ringtrain", "--help").stdout
    run_installed("ringtrain", "init", "mine.py")
    run_installed("ringtrain", "--workload", "mine.py", "--steps", "2", "--out", "run")
    assert [event["exit_code"] for event in events(tmp_path / "run", "end")] == [0]


@pytest.mark.slow
@pytest.mark.parametrize("controller", ["mpi", "gloo"])
def test_it_starts_two_ranks(controller: str, run_installed: RunInstalled, tmp_path: Path) -> None:
    run_installed("ringtrain", "init", "mine.py")
    start = ["ringtrain", "launch", "local", "-np", "2", "--controller", controller, "--"]
    backend = "native" if controller == "mpi" else "auto"  # native communication needs MPI; auto sums natively
    finished = run_installed(*start, "--workload", "mine.py", "--steps", "2", "--backend", backend, "--out", "run")
    assert "[0] " in finished.stdout
    assert " natively" in finished.stdout
    assert [event["size"] for event in events(tmp_path / "run", "start")] == [2]


def test_it_names_itself_in_a_batch_script(run_installed: RunInstalled) -> None:
    request = ["--nodes", "2", "--ranks_per_node", "4", "--mpi", "pmix", "--", "--workload", "digits"]
    *_, last = run_installed("ringtrain", "launch", "slurm", "render", *request).stdout.splitlines()
    [called] = re.findall(r"exec (python -m ringtrain\.launch slurm after) ", last)
    run_installed(*called.split(), "--help")


@pytest.mark.parametrize("command", ["", "local", "slurm", "slurm render", "slurm submit"])
def test_the_screens_of_launch_fit_a_terminal(command: str, run_installed: RunInstalled) -> None:
    text = run_installed("ringtrain", "launch", *command.split(), "--help").stdout
    assert max(map(len, text.splitlines())) <= 80
    assert f"  {' '.join(['python -m ringtrain launch', *command.split()])} " in text.partition("example")[2]


def test_mypy_checks_a_users_file(programs: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(TYPED)
    options = ["--strict", "--ignore-missing-imports", "--disable-error-code", "misc"]  # classes of Keras are Any
    mypy = [sys.executable, "-m", "mypy", *options, "--python-executable", str(programs / "python"), file.name]
    finished = subprocess.run(mypy, cwd=tmp_path, env=clean_environment(PYTHONPATH=""), capture_output=True, text=True)
    found = re.findall(r"^mine\.py:(\d+): error: .*\[([a-z-]+)\]$", finished.stdout, re.MULTILINE)
    lines = enumerate(TYPED.splitlines(), 1)
    expected = [(str(number), line.partition("# ! ")[2]) for number, line in lines if "# ! " in line]
    assert found == expected, finished.stdout + finished.stderr
