"""The set-up's files agree with each other: pyproject.toml, the locks, environment.yml, Makefile, .ci."""

import functools
import importlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import ringtrain
from tests.no_silent_skips import parse_allowed_skips
from tests.world.processes import clean_environment, run_command

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[2]
NATIVE = "ringtrain/collectives/native"  # which the set-up compiles
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
EXTRAS = PROJECT["optional-dependencies"]
ENVIRONMENT = yaml.safe_load((ROOT / "environment.yml").read_text())
# Which Pythons each lock is for: those that its TensorFlow has wheels for.
PYTHONS = {
    "requirements.lock": ("3.10", "3.11", "3.12", "3.13"),
    "requirements-gpu.lock": ("3.10", "3.11", "3.12", "3.13"),
    ".ci/locks/tensorflow-2.20.lock": ("3.10", "3.11", "3.12", "3.13"),
    ".ci/locks/tensorflow-2.19.lock": ("3.10", "3.11", "3.12"),
    ".ci/locks/tensorflow-2.18.lock": ("3.10", "3.11", "3.12"),
}
DOCS_LOCK = ".ci/locks/docs.lock"
LOCKS = {name: (ROOT / name).read_text() for name in (*PYTHONS, DOCS_LOCK)}
# One entry: "name==version ; marker \", then its hashes, one a line.
ENTRY = re.compile(r"^(\S.*?) \\\n((?:    --hash=\S+(?: \\)?\n)+)", flags=re.MULTILINE)
EVERY_LOCK = pytest.mark.parametrize("lock", PYTHONS)
EVERY_LOCK_AND_PYTHON = pytest.mark.parametrize(
    ("lock", "python"), [(lock, python) for lock, pythons in PYTHONS.items() for python in pythons]
)

CONDA_ONLY = {"openmpi", "pip", "python"}  # PyPI has no Open MPI to depend on; the other two are not dependencies there


def ranges(requirements: list[str]) -> dict[str, str]:
    parsed = [Requirement(requirement.replace(" ", "")) for requirement in requirements]
    return {canonicalize_name(requirement.name): str(requirement.specifier) for requirement in parsed}


@functools.cache
def read_lock(lock: str) -> dict[str, list[Requirement]]:
    """Requirements of each package."""
    entries: dict[str, list[Requirement]] = {}
    for requirement in (Requirement(entry) for entry, _ in ENTRY.findall(LOCKS[lock])):
        entries.setdefault(canonicalize_name(requirement.name), []).append(requirement)
    return entries


def locked_version(name: str, python: str, lock: str = "requirements.lock") -> Version:
    """Return the one version of a package that a lock has for this Python on Linux."""
    environment = {"python_version": python, "python_full_version": f"{python}.1", "sys_platform": "linux"}
    versions = [
        str(requirement.specifier).removeprefix("==")
        for requirement in read_lock(lock).get(canonicalize_name(name), [])
        if requirement.marker is None or requirement.marker.evaluate(environment)
    ]
    assert len(versions) == 1, f"{lock} has {versions} of {name} for Python {python}; run make lock"
    return Version(versions[0])


def test_conda_environment_and_pyproject_name_the_same_ranges() -> None:
    conda = ranges(ENVIRONMENT["dependencies"])
    assert "openmpi" in conda
    assert conda.pop("python") == ranges([f"python{PROJECT['requires-python']}"])["python"]
    assert {name: conda[name] for name in conda if name not in CONDA_ONLY} == ranges(
        PROJECT["dependencies"] + EXTRAS["dev"] + EXTRAS["horovod"]
    )


@EVERY_LOCK_AND_PYTHON
def test_a_lock_holds_every_direct_dependency_in_its_range(lock: str, python: str) -> None:
    for requirement in map(Requirement, PROJECT["dependencies"] + EXTRAS["dev"] + EXTRAS["horovod"] + EXTRAS["build"]):
        version = locked_version(requirement.name, python, lock)
        assert version in requirement.specifier, f"{requirement}, but {lock} has {version}; run make lock"


@pytest.mark.parametrize("python", PYTHONS["requirements.lock"])
def test_the_docs_lock_contains_the_docs_dependencies(python: str) -> None:
    for requirement in map(Requirement, PYPROJECT["dependency-groups"]["docs"]):
        assert locked_version(requirement.name, python, DOCS_LOCK) in requirement.specifier


def test_the_locks_span_the_range_of_tensorflow() -> None:
    pattern = re.compile(r"^tensorflow==(\d+\.\d+)", flags=re.MULTILINE)
    releases = [pattern.findall(LOCKS[lock]) for lock in PYTHONS]
    assert releases == [["2.21"], ["2.21"], ["2.20"], ["2.19"], ["2.18"]]
    assert ranges(PROJECT["dependencies"])["tensorflow"] == "<2.23,>=2.18"
    assert PROJECT["requires-python"] == ">=3.10,<3.14"


def test_the_gpu_lock_adds_only_nvidia_packages() -> None:
    ours, gpu = (entries_of(LOCKS[name]) for name in ("requirements.lock", "requirements-gpu.lock"))
    assert ours < gpu
    added = {entry.partition("==")[0] for entry in gpu - ours}
    assert {"nvidia-nccl-cu12", "nvidia-cuda-runtime-cu12", "nvidia-cudnn-cu12"} <= added
    assert all(name.startswith("nvidia-") for name in added)


def entries_of(lock: str) -> set[str]:
    """Each package with its version, marker and hashes."""
    return set(re.findall(r"^\S+==.*\n(?:    --hash=.*\n)+", lock, flags=re.MULTILINE))


@pytest.mark.parametrize("lock", LOCKS)
def test_lock_lines_are_exact_versions_hashes_or_comments(lock: str) -> None:
    entries = ENTRY.findall(LOCKS[lock])
    lines = [line for line in LOCKS[lock].splitlines() if not line.lstrip().startswith("#")]
    num_hashes = sum(hashes.count("--hash=sha256:") for _, hashes in entries)
    assert len(lines) == len(entries) + num_hashes
    assert all(re.match(r"[\w.-]+==[\w.]+( ; .+)?$", entry) for entry, _ in entries)


@EVERY_LOCK
def test_a_lock_holds_no_address(lock: str) -> None:
    assert not re.search(r"://|\b(index-url|find-links)\b| @ |file:", LOCKS[lock])


def test_the_compiled_horovod_fits_the_installed_tensorflow() -> None:
    """It was compiled against this very version, and what it leaves undefined TensorFlow has."""
    import horovod
    import horovod.tensorflow  # the linker's verdict

    built_for = json.loads((Path(horovod.__file__).parent / "metadata.json").read_text())["tensorflow"]
    installed = importlib.metadata.version("tensorflow")
    assert Version(built_for) == Version(installed), (
        f"Horovod is built for TensorFlow {built_for}, not {installed}: run make setup"
    )
    assert horovod.tensorflow.mpi_built()
    assert horovod.tensorflow.gloo_built()


def test_horovods_stated_requirements_are_for_the_locked_version() -> None:
    (metadata,) = PYPROJECT["tool"]["uv"]["dependency-metadata"]
    assert Version(metadata["version"]) == locked_version("horovod", "3.11")


def test_all_files_name_the_same_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    [(latest, date), *_] = re.findall(r"^## \[([\d.]+)\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert PROJECT["version"] == ringtrain.__version__ == citation["version"] == latest
    assert str(citation["date-released"]) == date
    assert f"version {latest.rpartition('.')[0]}." in (ROOT / "README.md").read_text()


def test_the_workflow_runs_the_whole_check_with_pinned_actions() -> None:
    [job] = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())["jobs"].values()
    assert job["steps"][-1] == {"run": ".ci/run"}
    assert all(re.search(r"@[0-9a-f]{40}$", step["uses"]) for step in job["steps"] if "uses" in step)


def test_make_help_names_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z][a-z-]*):(?!=)", makefile, flags=re.MULTILINE))
    output = subprocess.run(["make", "-C", str(ROOT)], capture_output=True, text=True, check=True).stdout
    assert set(re.findall(r"^make (\S+) +\S", output, flags=re.MULTILINE)) == targets
    assert {"help", "setup", "train", "test", "test-all", "test-next", "lint", "lock", "outdated", "clean"} <= targets


def test_console_script_exists() -> None:
    [(name, place)] = PROJECT["scripts"].items()
    module, function = place.split(":")
    assert (name, module) == ("ringtrain", "ringtrain.__main__")
    assert callable(getattr(importlib.import_module(module), function))


def run_setup(
    folder: Path,
    *,
    without: set[str],
    python: str = sys.executable,
    script: str = "setup",
    gpu: str = "",
    tensorflow: str = "",
    made_with: str = "",
) -> subprocess.CompletedProcess[str]:
    """Run a script of .ci in a copy of its files, as a user other than root, on a system that lacks some commands."""
    shutil.copytree(ROOT / ".ci", folder / ".ci")
    shutil.copytree(ROOT / NATIVE, folder / NATIVE)
    for name in ("pyproject.toml", "requirements.lock", "requirements-gpu.lock"):
        shutil.copy(ROOT / name, folder)
    if made_with:
        (folder / ".venv").mkdir()
        (folder / ".venv/made-with").write_text(f"{made_with}\n")
    commands = folder / "bin"
    commands.mkdir()
    for command in ("bash", "cat", "dirname", "flock", "mkdir", "sha256sum"):
        (commands / command).symlink_to(str(shutil.which(command)))
    stand_ins = {"apt-get": "exit 1", "g++": "", "id": "echo 1000", "mpicc": "", "mpirun": "", "python3": "exit 1"}
    for command in stand_ins.keys() - without:
        write_command(commands / command, stand_ins[command])
    environment = {
        "PATH": str(commands),
        "PYTHON": python,
        "GPU": gpu,
        "TENSORFLOW": tensorflow,
        "CUDA_HOME": str(folder / "cuda"),
    }
    return subprocess.run([folder / ".ci" / script], capture_output=True, text=True, env=environment)


def write_command(path: Path, shell: str) -> None:
    path.write_text(f"#!/bin/sh\n{shell}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("script", "without", "packages"),
    [
        ("setup", {"g++", "mpicc", "mpirun"}, "g++ openmpi-bin libopenmpi-dev"),
        ("setup-tests", set(), "slurm-wlm munge iproute2 shellcheck chromium"),
    ],
)
def test_setup_without_root_names_missing_packages_in_one_line(
    tmp_path: Path, script: str, without: set[str], packages: str
) -> None:
    done = run_setup(tmp_path, without=without, script=script)
    assert done.returncode == 1
    assert done.stderr == f"set-up: missing, and only root can install it: sudo apt-get install {packages}\n"


def test_setup_without_apt_names_missing_packages_in_one_line(tmp_path: Path) -> None:
    done = run_setup(tmp_path, without={"g++", "apt-get"})
    assert done.returncode == 1
    assert done.stderr.startswith("set-up: missing: install what this system calls g++")
    assert done.stderr.count("\n") == 1


def test_setup_refuses_an_unsuitable_python(tmp_path: Path) -> None:
    unsuitable = tmp_path / "python3.99"
    write_command(unsuitable, "exit 1")
    done = run_setup(tmp_path, without=set(), python=str(unsuitable))
    assert done.returncode == 1
    assert done.stderr == f"set-up: PYTHON={unsuitable} is no Python 3.10 to 3.13, for which requirements.lock is\n"


@pytest.mark.parametrize(
    ("tensorflow", "gpu", "message"),
    [
        ("2.17", "", "TENSORFLOW=2.17; it must be one of 2.18, 2.19, 2.20 and 2.21"),
        ("newest", "", "TENSORFLOW=newest; it must be one of 2.18, 2.19, 2.20 and 2.21"),
        ("2.18 2.19", "", "TENSORFLOW=2.18 2.19; it must be one of 2.18, 2.19, 2.20 and 2.21"),
        ("2.18", "1", "TENSORFLOW=2.18 with GPU=1; Horovod with NCCL is compiled for 2.21 only"),
    ],
)
def test_setup_refuses_a_tensorflow_without_a_lock(tmp_path: Path, tensorflow: str, gpu: str, message: str) -> None:
    done = run_setup(tmp_path, without=set(), tensorflow=tensorflow, gpu=gpu)
    assert (done.returncode, done.stderr) == (1, f"set-up: {message}\n")


@pytest.mark.parametrize(
    ("tensorflow", "gpu", "made_with", "lock"),
    [
        ("", "", "", "requirements.lock"),
        ("2.21", "", "", "requirements.lock"),
        ("2.18", "", "", ".ci/locks/tensorflow-2.18.lock"),
        ("2.20", "0", "requirements-gpu.lock", ".ci/locks/tensorflow-2.20.lock"),
        ("", "", ".ci/locks/tensorflow-2.19.lock", ".ci/locks/tensorflow-2.19.lock"),
        ("", "0", ".ci/locks/tensorflow-2.19.lock", "requirements.lock"),
        ("2.21", "", ".ci/locks/tensorflow-2.19.lock", "requirements.lock"),
        ("", "", "requirements-gpu.lock", "requirements-gpu.lock"),
        ("2.21", "", "requirements-gpu.lock", "requirements-gpu.lock"),
        ("", "", "cores", "requirements.lock"),  # as version 0.1 wrote it
        ("", "", "gpus", "requirements-gpu.lock"),
    ],
)
def test_setup_uses_the_requested_lock_and_keeps_it(
    tmp_path: Path, tensorflow: str, gpu: str, made_with: str, lock: str
) -> None:
    unsuitable = tmp_path / "python3.99"
    write_command(unsuitable, "exit 1")
    done = run_setup(
        tmp_path, without=set(), python=str(unsuitable), tensorflow=tensorflow, gpu=gpu, made_with=made_with
    )
    last = PYTHONS[lock][-1]
    assert done.stderr == f"set-up: PYTHON={unsuitable} is no Python 3.10 to {last}, for which {lock} is\n"


# Stand-ins for a machine with a GPU: its driver, a compiler that is too old, and a uv that "fetches" one of CUDA 13.
NVCC = 'case "$*" in *version*) echo "Cuda compilation tools, release {0}, V{0}.1" ;; esac'
UV = """case "$*" in
*--version) echo uv 99.0 ;;
venv*) mkdir -p .venv/bin ;;
*--target\\ .tools/cuda*)
    mkdir -p .tools/cuda/nvidia/cu13/bin .tools/cuda/nvidia/cu13/lib
    cp fetched-nvcc .tools/cuda/nvidia/cu13/bin/nvcc
    ;;
esac"""


@pytest.mark.parametrize("gpu", ["535.104, 8.0", "580.65, 7.0"])
def test_gpu_setup_refuses_gpus_unsupported_by_its_compiler(tmp_path: Path, gpu: str) -> None:
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    shutil.copytree(ROOT / NATIVE, tmp_path / NATIVE)
    for name in ("pyproject.toml", "requirements-gpu.lock"):
        shutil.copy(ROOT / name, tmp_path)
    write_command(tmp_path / "fetched-nvcc", NVCC.format("13.0"))
    (tmp_path / "bin").mkdir()
    for name, shell in {"nvcc": NVCC.format("11.8"), "nvidia-smi": f"echo {gpu!r}", "uv": UV}.items():
        write_command(tmp_path / "bin" / name, shell)
    environment = {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "CUDA_HOME": str(tmp_path / "cuda"), "GPU": "1",
        "PYTHON": sys.executable,
    }  # fmt: skip
    done = subprocess.run([tmp_path / ".ci/setup"], capture_output=True, text=True, env=environment)
    assert done.returncode == 1
    *lines, last = done.stderr.splitlines()
    assert f"set-up: {tmp_path / 'bin/nvcc'} does not suit" in lines
    assert last.startswith(
        "set-up: CUDA 13's compiler, the one in Python packages, takes a driver 580 or newer, and GPUs"
    )
    assert "Load the site's module of CUDA 12 (module load cuda)" in last


def test_setup_refuses_a_gpu_value_other_than_0_or_1(tmp_path: Path) -> None:
    done = run_setup(tmp_path, without=set(), gpu="yes")
    assert (done.returncode, done.stderr) == (1, "set-up: GPU=yes; it must be 1 (Horovod with NCCL) or 0 (for cores)\n")


def test_only_test_targets_install_test_dependencies() -> None:
    makefile = (ROOT / "Makefile").read_text()
    needs = dict(re.findall(r"^([a-z][a-z-]*):(?!=) *([a-z-]*) *##", makefile, flags=re.MULTILINE))
    need_setup_tests = {target for target, need in needs.items() if need == "setup-tests"}
    assert need_setup_tests == {"test", "test-all", "test-faults", "test-next"}
    assert needs["setup-tests"] == "setup"


def outdated(*packages: tuple[str, str, str]) -> list[str]:
    """What `make outdated` says of packages: name, installed version, newest version."""
    names = ("name", "version", "latest_version")
    listed = json.dumps([dict(zip(names, package, strict=True)) for package in packages])
    command = [sys.executable, ".ci/outdated.py"]
    done = subprocess.run(command, cwd=ROOT, input=listed, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_newer_releases_are_named_with_a_remedy() -> None:
    _, *lines = outdated(
        ("tensorflow", "2.20.0", "2.21.0"), ("tensorflow", "2.21.0", "2.99.0"), ("numpy", "2.4.0", "99.0"),
        ("PyYAML", "6.0", "6.99"), ("h5py", "3.14.0", "3.16.0"),
    )  # fmt: skip
    assert [" ".join(line.split()) for line in lines] == [
        "tensorflow 2.20.0 2.21.0 seen: requirements.lock",
        "tensorflow 2.21.0 2.99.0 not seen; outside of <2.23,>=2.18, whose reason is in pyproject.toml",
        "numpy 2.4.0 99.0 not seen; allowed: remove the locks, run make lock and make test-all",
        "PyYAML 6.0 6.99 not seen; allowed: remove the locks, run make lock and make test-all",
    ]


def test_no_newer_release_gives_one_line() -> None:
    assert outdated(("h5py", "3.14.0", "3.16.0")) == [
        "Of every direct dependency the newest release is installed, and the tests run with it."
    ]


def without_daemons(policy: Path, command: str) -> subprocess.CompletedProcess[bytes]:
    """Run a command as `.ci/lib.sh` runs apt-get, where a system keeps its policy for daemons elsewhere."""
    shell = f'source .ci/lib.sh; DAEMON_POLICY="{policy}"; without_daemons {command}'
    return subprocess.run(["bash", "-c", shell], cwd=ROOT, capture_output=True, start_new_session=True, timeout=10)


@pytest.mark.parametrize("ending", ["exit 0", "exit 7", "kill -INT 0", "kill -TERM 0"])
def test_no_daemon_starts_during_package_installation(tmp_path: Path, ending: str) -> None:
    policy, answer = tmp_path / "policy-rc.d", tmp_path / "answer"
    installer = tmp_path / "apt-get"
    write_command(installer, f"{policy} munge start; echo $? >{answer}; {ending}")
    done = without_daemons(policy, str(installer))
    assert answer.read_text() == "101\n"
    assert (done.returncode == 0) == (ending == "exit 0")
    assert not policy.exists()


def test_a_policy_for_daemons_that_is_there_stays(tmp_path: Path) -> None:
    policy = tmp_path / "policy-rc.d"
    policy.write_text("the administrator's")
    assert without_daemons(policy, "true").returncode == 0
    assert policy.read_text() == "the administrator's"


def run_pytest(
    pytester: pytest.Pytester, *options: str, test: str, allowed: str = "", select: str = ""
) -> pytest.RunResult:
    """Run one test file under the plugin, in a folder of its own."""
    pytester.mkdir(".ci").joinpath("allowed-skips.txt").write_text(allowed)
    pytester.makepyfile(test_it=f"import pytest\n{test}\ndef test_b(): pass\n")
    return pytester.runpytest_inprocess("-p", "tests.no_silent_skips", "-k", select, *options)


SKIPPING = {
    "skip": "@pytest.mark.skip(reason='too hot')\ndef test_a(): pass",
    "skip inside": "def test_a(): pytest.skip('too hot')",
    "xfail": "@pytest.mark.xfail(reason='too hot')\ndef test_a(): assert False",
    "xfail that passes": "@pytest.mark.xfail(reason='too hot')\ndef test_a(): pass",
    "skip in a fixture": "@pytest.fixture\ndef f(): pytest.skip('too hot')\ndef test_a(f): pass",
}


@pytest.mark.parametrize("test", SKIPPING.values(), ids=SKIPPING.keys())
def test_unlisted_skip_fails_the_run(pytester: pytest.Pytester, test: str) -> None:
    result = run_pytest(pytester, test=test)
    assert result.ret == 1
    result.stdout.fnmatch_lines(["test_it.py::test_a was skipped or expected to fail (too hot)*"])
    assert re.match(r"=+ 1 passed, 1 \w+ in ", result.outlines[-1])


@pytest.mark.parametrize("test", SKIPPING.values(), ids=SKIPPING.keys())
def test_listed_skip_does_not_fail_the_run(pytester: pytest.Pytester, test: str) -> None:
    assert run_pytest(pytester, test=test, allowed="test_it.py::test_a # it is hot").ret == 0


def test_a_folder_s_tests_may_be_skipped_or_run(pytester: pytest.Pytester) -> None:
    skipped_and_run = f"import pytest\n{SKIPPING['skip']}\ndef test_b(): pass\n"
    pytester.mkdir("hot").joinpath("test_hot.py").write_text(skipped_and_run)
    result = run_pytest(pytester, test="def test_a(): pass", allowed="hot/ # it is hot\n")
    assert (result.ret, result.parseoutcomes()) == (0, {"passed": 3, "skipped": 1})


@pytest.mark.parametrize("options", [(), ("-n", "1")], ids=["alone", "by a worker"])
def test_unlisted_skip_of_a_module_fails_the_run(pytester: pytest.Pytester, options: tuple[str, ...]) -> None:
    result = run_pytest(pytester, *options, test="pytest.skip('too hot', allow_module_level=True)")
    assert result.ret != 0
    result.stdout.fnmatch_lines(["test_it.py was skipped or expected to fail (too hot)*"])


@pytest.mark.parametrize(
    ("entry", "complaint"), [("test_it.py::test_a", "and ran"), ("test_it.py::test_gone", "and does not exist")]
)
def test_stale_entry_fails_the_run(pytester: pytest.Pytester, entry: str, complaint: str) -> None:
    result = run_pytest(pytester, test="def test_a(): pass", allowed=f"{entry} # it was hot")
    assert result.ret == 1
    result.stdout.fnmatch_lines([f"{entry} is listed in *{complaint}: remove it there"])


def test_entry_of_a_deselected_test_is_not_stale(pytester: pytest.Pytester) -> None:
    allowed = "test_it.py::test_a # it is hot"
    assert run_pytest(pytester, test=SKIPPING["skip"], allowed=allowed, select="test_b").ret == 0


def test_entry_without_a_reason_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'tests/test_it\.py::test_a' has no reason"):
        parse_allowed_skips("tests/test_it.py::test_a\n")


def test_the_tensorboard_command_starts(tmp_path: Path) -> None:
    """Before 2.21 it needs a module that later releases of setuptools lack."""
    script = tmp_path / "tensorboard.py"  # a copy of the command, so that the fork server may start it
    shutil.copyfile(Path(sys.executable).with_name("tensorboard"), script)
    finished = run_command([sys.executable, str(script), "--version_tb"], env=clean_environment(), timeout=60)
    assert finished.rc == 0, finished.stderr
    assert finished.stdout.strip() == importlib.metadata.version("tensorboard")
