"""A batch script run by real bash, with programs of the cluster that write down how they were called."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# Each call appends to PROGRAM.calls how many arguments it has, and them, each ended by a NUL.
RECORD = r"""#!/bin/bash
printf '%s\0' "$#" "$@" >>"$CALLS/${0##*/}.calls"
"""
SITE = {
    "srun": 'exit "${SRUN_STATUS:-0}"',
    "horovodrun": "",
    "python": 'exit "${AFTER_STATUS:-0}"',
    "scontrol": "printf 'n1\\nn2\\n'",
    "sbatch": "",
}
JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_CPUS_PER_TASK": "3", "SLURM_NTASKS": "8"}


@dataclass(frozen=True, kw_only=True)
class Site:
    """A directory that a job was submitted in, and its cluster."""

    submit: Path
    programs: Path
    environ: dict[str, str]

    def calls(self, program: str) -> list[list[bytes]]:
        """The arguments of each call of a program."""
        file = self.programs / f"{program}.calls"
        words = file.read_bytes().split(b"\0")[:-1] if file.exists() else []
        calls = []
        while words:
            end = 1 + int(words[0])
            calls.append(words[1:end])
            words = words[end:]
        return calls

    def set(self, program: str, script: str) -> None:
        """What a program does after it has written down its arguments."""
        file = self.programs / program
        file.write_text(f"{RECORD}{script}\n")
        file.chmod(0o755)

    def start(
        self, text: str, variables: Mapping[str, str] | None = None, words: Sequence[str] = ()
    ) -> subprocess.Popen[str]:
        """Start a batch script as slurmd does: its copy, in the directory of the submission, in its own session."""
        copy = self.programs / "slurm_script"
        copy.write_text(text, encoding="utf-8")
        return subprocess.Popen(
            ["bash", str(copy), *words],
            cwd=self.submit,
            env={**self.environ, **(variables or {})},
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, text: str, variables: Mapping[str, str] | None = None, words: Sequence[str] = ()) -> tuple[int, str]:
        """Run a batch script: its exit code, and what it printed."""
        process = self.start(text, variables, words)
        printed, _ = process.communicate(timeout=60)
        return process.returncode, printed


def create_site(directory: Path) -> Site:
    """A cluster whose programs do nothing but say how they were called."""
    submit, programs = directory / "the run's place", directory / "bin"
    submit.mkdir(parents=True)
    programs.mkdir()
    environ = {
        **JOB,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(submit),
        "CALLS": str(programs),
        "HOME": str(directory),
    }
    site = Site(submit=submit, programs=programs, environ=environ)
    for program, script in SITE.items():
        site.set(program, script)
    return site
