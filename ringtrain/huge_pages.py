"""Memory in pages of 2 MiB, where Linux gives them to a program that asks.

A processor knows by heart where some thousand pages lie (its TLB). In pages of 4 KiB that is a few MiB, less than one
activation of a convolution. glibc's malloc asks for large pages where ``GLIBC_TUNABLES`` says so, which it reads when
a program starts: so ``python -m ringtrain`` starts once more, as the same process, before it has done anything.
Sources: the GNU C Library's manual, "Memory Allocation Tunables"; Linux' Documentation/admin-guide/mm/transhuge.rst.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

VARIABLE = "GLIBC_TUNABLES"
TUNABLE = "glibc.malloc.hugetlb"
FIRST_GLIBC = (2, 35)  # that has it
RESTARTED = "RINGTRAIN_RESTARTED_WITH"  # the value that ringtrain chose; what this process starts has both as well
POLICY_FILE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
COMMANDS = (("-m", "ringtrain"), ("-m", "ringtrain.__main__"))
SCRIPT = "ringtrain"
IN_USE = ("mpi4py", "horovod", "tensorflow")  # imported already, where ringtrain runs inside another program
TAKE_A_VALUE = ("-X", "-W")


def choose_tunables(environ: Mapping[str, str], *, policy: str, libc: str) -> str:
    """The value of ``GLIBC_TUNABLES`` that asks for large pages; nothing where that is not ringtrain's to do.

    Args:
        environ: what the user already set; it wins.
        policy: what Linux does with large pages, such as ``"always [madvise] never"``.
        libc: name and version, such as ``"glibc 2.36"``.
    """
    version = re.fullmatch(r"glibc (\d+)\.(\d+).*", libc)
    present = environ.get(VARIABLE, "")
    if "[madvise]" not in policy or version is None or tuple(map(int, version.groups())) < FIRST_GLIBC:
        return ""
    if TUNABLE in present:
        return ""
    return ":".join(filter(None, [present, f"{TUNABLE}=1"]))


def choose_here(environ: Mapping[str, str]) -> str:
    """The same for this machine."""
    policy = libc = ""
    with contextlib.suppress(OSError):
        policy = POLICY_FILE.read_text()
    with contextlib.suppress(OSError, ValueError):  # another C library
        libc = os.confstr("CS_GNU_LIBC_VERSION") or ""
    return choose_tunables(environ, policy=policy, libc=libc)


def restart_with_huge_pages() -> None:
    """Start this command once more with large pages, as the same process, where it has none and may have some."""
    tunables = choose_here(os.environ)
    if not tunables or RESTARTED in os.environ or not is_whole_program(sys.orig_argv, sys.argv):
        return
    if any(name in sys.modules for name in IN_USE):
        return
    with contextlib.suppress(OSError):  # it goes on with small pages
        if not os.path.samefile("/proc/self/exe", sys.executable):  # a wrapper, which may undo this
            return
        os.execve(
            sys.executable,
            [sys.executable, *sys.orig_argv[1:]],
            {**os.environ, VARIABLE: tunables, RESTARTED: tunables},
        )


def is_whole_program(command: Sequence[str], argv: Sequence[str]) -> bool:
    """Whether a process was started to run ringtrain alone: not a debugger, or a program of the user's that came to it.

    Args:
        command: the whole command line, Python included.
        argv: the program and its own arguments.
    """
    head = command[: len(command) - len(argv) + 1]
    if tuple(head[-2:]) in COMMANDS:
        options = head[1:-2]
    elif Path(head[-1]).name == SCRIPT:
        options = head[1:-1]
    else:
        return False
    others = [
        word
        for word, before in zip(options, ["", *options], strict=False)
        if not word.startswith("-") and before not in TAKE_A_VALUE
    ]
    return not others and "-m" not in options
