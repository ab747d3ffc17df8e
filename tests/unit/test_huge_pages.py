"""Whether a program starts once more to have large pages, and that it is then the same program."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ringtrain.devices import plan_settings
from ringtrain.huge_pages import RESTARTED, TUNABLE, VARIABLE, choose_here, choose_tunables, is_whole_program
from ringtrain.world import read_world

ASKED = "always [madvise] never"
MINE = "glibc.malloc.check=3"
WORKLOAD = f"""
import os, sys
from ringtrain.workloads.polynomial import Polynomial as Mine
print("starts", os.getpid(), os.environ.get({VARIABLE!r}), sys.argv[1:], flush=True)
"""


@pytest.mark.parametrize(
    ("environ", "policy", "libc", "tunables"),
    [
        ({}, ASKED, "glibc 2.36", f"{TUNABLE}=1"),
        ({}, ASKED, "glibc 2.35", f"{TUNABLE}=1"),
        ({}, ASKED, "glibc 3.0", f"{TUNABLE}=1"),
        ({VARIABLE: MINE}, ASKED, "glibc 2.36", f"{MINE}:{TUNABLE}=1"),
        ({VARIABLE: f"{TUNABLE}=0"}, ASKED, "glibc 2.36", ""),  # the user's own wins
        ({VARIABLE: f"{MINE}:{TUNABLE}=1"}, ASKED, "glibc 2.36", ""),  # it has been started once more
        ({}, "[always] madvise never", "glibc 2.36", ""),  # all have them
        ({}, "always madvise [never]", "glibc 2.36", ""),
        ({}, "", "glibc 2.36", ""),
        ({}, ASKED, "glibc 2.34", ""),
        ({}, ASKED, "", ""),
    ],
)
def test_large_pages_are_asked_for_where_that_helps(
    environ: dict[str, str], policy: str, libc: str, tunables: str
) -> None:
    assert choose_tunables(environ, policy=policy, libc=libc) == tunables


@pytest.mark.parametrize(
    ("command", "argv", "is_whole"),
    [
        (["python", "-m", "ringtrain"], ["-m"], True),
        (["python", "-X", "dev", "-m", "ringtrain", "eval", "RUN"], ["__main__.py", "eval", "RUN"], True),
        (["python", "/env/bin/ringtrain", "--steps", "5"], ["/env/bin/ringtrain", "--steps", "5"], True),
        (["python", "-I", "-W", "error", "/env/bin/ringtrain"], ["/env/bin/ringtrain"], True),
        (["python", "-m", "pdb", "-m", "ringtrain"], ["ringtrain"], False),
        (["python", "-m", "debugpy", "--listen", "5678", "-m", "ringtrain", "eval"], ["ringtrain", "eval"], False),
        (["python", "/env/bin/coverage", "run", "-m", "ringtrain"], ["ringtrain"], False),
        (["python", "mine.py"], ["mine.py"], False),
        (["python", "mine.py", "-m", "ringtrain"], ["mine.py", "-m", "ringtrain"], False),
        (["python", "-m", "pytest", "ringtrain"], ["pytest", "ringtrain"], False),
        (["python", "-c", "run()"], ["-c"], False),
        (["python"], [""], False),
    ],
)
def test_a_program_of_the_users_is_not_started_twice(command: list[str], argv: list[str], is_whole: bool) -> None:
    assert is_whole_program(command, argv) == is_whole


@pytest.mark.parametrize("command", [["-m", "ringtrain"], [str(Path(sys.executable).with_name("ringtrain"))]])
@pytest.mark.parametrize(
    "environ",
    [
        {},
        {VARIABLE: MINE},
        {VARIABLE: f"{TUNABLE}=0"},
        {RESTARTED: f"{TUNABLE}=1"},  # and something took the variable away: not again and again
    ],
)
def test_the_command_line_starts_once_more_as_the_same_process(
    command: list[str], environ: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(WORKLOAD)
    arguments = ["--workload", "mine.py:Mine", "--print_config"]
    inherited = {name: value for name, value in os.environ.items() if name not in (VARIABLE, RESTARTED)}
    program = subprocess.Popen(
        [sys.executable, *command, *arguments],
        cwd=tmp_path,
        env={**inherited, **environ},
        stdout=subprocess.PIPE,
        text=True,
    )
    said, _ = program.communicate(timeout=60)
    assert program.returncode == 0
    [line] = [line for line in said.splitlines() if line.startswith("starts")]
    expected = environ.get(VARIABLE) if RESTARTED in environ else choose_here(environ) or environ.get(VARIABLE)
    assert line == f"starts {program.pid} {expected} {arguments}"


def test_the_log_says_who_chose_the_pages() -> None:
    ours, theirs = f"{TUNABLE}=1", f"{TUNABLE}=0"
    for environ, source in (({VARIABLE: ours, RESTARTED: ours}, "ringtrain"), ({VARIABLE: theirs}, "environment")):
        [setting] = [
            each
            for each in plan_settings(read_world({}), environ, may_have_gpus=False, deterministic=False)
            if each.name == VARIABLE
        ]
        assert (setting.value, setting.source) == (environ[VARIABLE], source)
    assert VARIABLE not in [
        each.name for each in plan_settings(read_world({}), {}, may_have_gpus=False, deterministic=False)
    ]
