"""The container images: two descriptions of one image, whose files and system packages exist."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONTAINERFILE = (ROOT / "launch/containers/Containerfile").read_text()
DEFINITION = (ROOT / "launch/containers/ringtrain.def").read_text()
INSTRUCTIONS = {"FROM", "ARG", "WORKDIR", "COPY", "RUN", "ENV", "CMD"}  # of the format, those in use
SECTIONS = {"arguments", "files", "post", "environment", "runscript"}


def parse_containerfile(text: str) -> list[tuple[str, str]]:
    """Return the instructions with their arguments; lines that end in a backslash are joined."""
    lines = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", "").splitlines()
    steps = [line.partition(" ")[::2] for line in lines if line.strip()]
    assert {name for name, _ in steps} <= INSTRUCTIONS
    assert all(arguments.strip() for _, arguments in steps)
    return steps


def parse_definition(text: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return the header and the sections of a definition file."""
    header, *sections = re.split(r"^%", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE), flags=re.MULTILINE)
    bodies = {name: body.replace("\\\n", "") for name, _, body in (section.partition("\n") for section in sections)}
    assert bodies.keys() == SECTIONS
    return dict(line.split(": ") for line in header.split("\n") if line), bodies


STEPS = parse_containerfile(CONTAINERFILE)
HEADER, BODIES = parse_definition(DEFINITION)
[COMMANDS] = [arguments for name, arguments in STEPS if name == "RUN"]


def copied_by_containerfile() -> dict[str, str]:
    """Return where each file of the checkout is copied to."""
    [folder] = [arguments for name, arguments in STEPS if name == "WORKDIR" and arguments.startswith("/opt/")]
    copies = [arguments.split() for name, arguments in STEPS if name == "COPY"]
    directories = {source: f"{folder}/{target[2:]}" for source, target in (copy for copy in copies if len(copy) == 2)}
    return directories | {source: f"{folder}/{source}" for copy in copies if copy[-1] == "./" for source in copy[:-1]}


def test_both_describe_the_same_image() -> None:
    [base] = [arguments for name, arguments in STEPS if name == "FROM"]
    assert {"Bootstrap": "docker", "From": base} == HEADER
    assert dict(line.split() for line in BODIES["files"].strip().splitlines()) == copied_by_containerfile()
    folder, gpu, *commands = [" ".join(line.split()) for line in BODIES["post"].strip().splitlines()]
    assert [folder, gpu] == ["cd /opt/ringtrain || exit", "GPU={{ GPU }}"]
    assert ("ARG", "GPU=0") in STEPS
    assert BODIES["arguments"].strip() == "GPU=0"
    assert commands == [" ".join(COMMANDS.split())]
    [path] = re.findall(r"PATH=\S+", dict(STEPS)["ENV"])
    assert BODIES["environment"].strip() == f"export {path}"


def test_what_they_copy_is_in_the_repository_and_all_that_the_set_up_reads() -> None:
    copied = copied_by_containerfile()
    assert [name for name in copied if not (ROOT / name).exists()] == []
    setup = (ROOT / ".ci/setup").read_text() + (ROOT / "Makefile").read_text()
    read = {path.name for path in ROOT.iterdir() if path.suffix in (".lock", ".toml") and path.name in setup}
    assert {"pyproject.toml", "requirements.lock", "requirements-gpu.lock"} <= read <= copied.keys()


@pytest.mark.parametrize("commands", [COMMANDS, BODIES["post"].replace("{{ GPU }}", "0"), BODIES["runscript"]])
def test_shellcheck_has_no_complaint(commands: str) -> None:
    checked = subprocess.run(["shellcheck", "--shell=sh", "-"], input=commands, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.slow  # reads the lists of Debian's packages
def test_debian_has_every_system_package() -> None:
    [first] = re.findall(r"apt-get install \S+ \S+ ([^&]*)&&", COMMANDS)
    setup = re.findall(r"missing\+=\((.*?)\)", (ROOT / ".ci/setup").read_text())  # which `make setup` installs
    packages = [*shlex.split(first), *(package for names in setup for package in names.split())]
    assert {"ca-certificates", "make", "g++", "openmpi-bin", "libopenmpi-dev", "python3-venv"} <= set(packages)
    subprocess.run(["apt-get", "update"], check=True, capture_output=True)
    shown = {name: subprocess.run(["apt-cache", "show", name], capture_output=True) for name in packages}
    assert [name for name, done in shown.items() if done.returncode] == []
