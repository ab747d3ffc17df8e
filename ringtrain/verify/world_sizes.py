"""Train with each world size in turn, in child processes."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ringtrain.errors import EXIT_CODES, ReplicasDifferError, RingtrainError, UsageError
from ringtrain.verify.compare import AUGMENT, AUGMENT_NEEDED, Record, describe_findings, describe_oracle, load_record

DEFAULT_STEPS = 20
DEFAULT_GLOBAL_BATCH_SIZE = 100
MAX_DEFAULT_STEPS = 100  # of a workload's default; more takes too long
RUN_TIMEOUT_SECONDS = 1800


def plan_command(size: int, arguments: Sequence[str]) -> list[str]:
    program = [sys.executable, "-m", "ringtrain", *arguments]
    if size == 1:
        return program
    if mpirun := shutil.which("mpirun"):
        return [mpirun, "-np", str(size), "--oversubscribe", "--bind-to", "none", *program]
    if horovodrun := shutil.which("horovodrun"):
        return [horovodrun, "--gloo", "-np", str(size), *program]
    raise UsageError(
        f"a world size of {size} needs mpirun or horovodrun, and neither is in PATH. Run `make setup`, or activate the "
        "environment that holds them."
    )


def run_group(size: int, arguments: Sequence[str]) -> None:
    code, output = run_processes(size, arguments, timeout=RUN_TIMEOUT_SECONDS)
    if code:
        failed = f"training with {size} processes failed with exit code {code}:"
        raise EXIT_CODES.get(code, RingtrainError)("\n  ".join([failed, *output.strip().split("\n")]), reach="run")


def run_processes(
    size: int, arguments: Sequence[str], *, timeout: float | None, shows_output: bool = False
) -> tuple[int, str]:
    """Run a command of ringtrain in ``size`` processes; return exit code and output, unless it is shown."""
    command = plan_command(size, arguments)
    environment = os.environ | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    environment |= {"TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2")}
    pipe = None if shows_output else subprocess.PIPE
    errors = None if shows_output else subprocess.STDOUT
    # As Ctrl-C: the exception ends the processes.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    process = subprocess.Popen(command, env=environment, stdout=pipe, stderr=errors, text=True, start_new_session=True)
    try:
        output, _ = process.communicate(timeout=timeout)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        if isinstance(error, subprocess.TimeoutExpired):
            raise RingtrainError(f"{size} processes were not done after {timeout} s.") from None
        raise
    return process.returncode, output or ""


def parse_world_sizes(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(re.fullmatch(r"[1-9][0-9]{0,5}", word) for word in words) or len(set(words)) < 2:
        raise UsageError(
            f"world_sizes is {text!r}; it must be at least two different numbers of processes, such as 1,2,3."
        )
    return list(dict.fromkeys(int(word) for word in words))


def choose_steps(defaults: Mapping[str, Any]) -> int:
    steps = defaults.get("steps") or DEFAULT_STEPS
    return steps if steps <= MAX_DEFAULT_STEPS else DEFAULT_STEPS


def try_without_augment(
    sizes: Sequence[int],
    records: Mapping[int, Mapping[str, Record]],
    run_without: Callable[[int, str], dict[str, Record]],
) -> list[str]:
    """Train the reference and a size that differs from it without augment(), and compare.

    Args:
        sizes: the reference size, and the others.
        records: of all sizes, of which at least one differs.
        run_without: (size, "reference" or "other") -> its records without augment().

    Returns:
        The line for the report; none if augment() is not the cause.
    """
    reference, *others = sizes
    for size in others:
        _, agrees = describe_findings([reference, size], records)
        if not agrees:
            break
    try:
        without = {reference: run_without(reference, "reference"), size: run_without(size, "other")}
    except RingtrainError:
        return [AUGMENT_NEEDED]
    _, agrees = describe_findings([reference, size], without)
    return [AUGMENT] if agrees else []


def verify(
    sizes: Sequence[int],
    arguments: Sequence[str],
    directory: Path,
    *,
    with_oracle: bool,
    print_line: Callable[[str], None],
) -> list[str]:
    """Write records to an empty directory and compare. ReplicasDifferError contains the report if sizes differ."""

    def run(size: int, role: str, words: str, *options: str) -> dict[str, Record]:
        target = directory / f"{role}-{size}{''.join(options)}"
        target.mkdir()
        begin = time.monotonic()
        run_group(size, ["_record", "--record_to", str(target), "--record_as", role, *options, *arguments])
        records = {
            path.stem: load_record(path)
            for path in sorted(target.glob("*.npz"), key=lambda path: path.stat().st_mtime_ns)
        }
        steps = len(records["float64"]["losses"])
        print_line(f"{words}: {steps} step{'s' if steps > 1 else ''}, {time.monotonic() - begin:.0f} s")
        return records

    names = {size: f"{size} process{'es' if size > 1 else ''}" for size in sizes}
    records = {size: run(size, "reference" if size == sizes[0] else "other", names[size]) for size in sizes}
    lines, passed = describe_findings(sizes, records)
    if not passed and records[sizes[0]]["float64"]["has_augment"]:

        def run_without(size: int, role: str) -> dict[str, Record]:
            words = f"{names[size]}, without augment()"
            return run(size, role, words, "--without_augment", "true")

        lines = [*try_without_augment(sizes, records, run_without), *lines]
    if with_oracle:
        more, is_right = describe_oracle(run(1, "oracle", "1 process and plain Keras"))
        lines, passed = lines + more, passed and is_right
    if not passed:
        named = ", ".join(map(str, sizes))
        raise ReplicasDifferError("\n  ".join([f"the world sizes {named} do not train the same.", *lines]))
    return lines
