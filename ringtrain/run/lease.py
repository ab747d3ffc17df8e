"""The lease of a run directory: one writer at a time; a former writer notices.

A holder claims the next number by creating a file; the highest number holds the lease. Holders touch their file
regularly, so that lost hosts expire.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ringtrain.errors import RingtrainError, UsageError
from ringtrain.files.atomic import replace_text
from ringtrain.files.bounded import make_directory, open_directory, read_small
from ringtrain.messages.log import LOG
from ringtrain.runtime.processes import read_process
from ringtrain.runtime.shutdown import require_same_process

LEASE_DIRECTORY = ".lease"
BEAT_SECONDS = 5.0
EXPIRY_SECONDS = 45.0  # without a heartbeat; a local dead process is detected at once
RESTART_VARIABLE = "SLURM_RESTART_COUNT"
NUMBER = re.compile(r"\d{6,9}", re.ASCII)  # names of leases; other files are ignored
JOB_VARIABLES = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID")


class Holder(NamedTuple):
    job: str | None  # of a batch system
    is_alive: bool


class LeaseLostError(RingtrainError):
    pass


class Lease:
    def __init__(self, directory: Path, number: int) -> None:
        self.number = number
        self._directory, self._file = directory, directory / _file_name(number)
        self._pid = os.getpid()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise LeaseLostError if the lease is lost, RingtrainError in a process forked from its holder."""
        require_same_process(self._pid)
        try:
            newest = _newest_number(self._directory)
        except OSError as error:
            raise LeaseLostError(
                f"the run directory {str(self._directory.parent)!r} cannot be read any more: {error.strerror}. Nothing "
                "more is written; bring it back, and start the same command again."
            ) from error
        if newest == self.number:
            return
        holder = read_small(self._directory / _file_name(newest))
        raise LeaseLostError(
            f"the run directory {str(self._directory.parent)!r} has been taken over by {_describe(holder)}; this "
            "process writes nothing more. Slurm has started the job again, or this process had given no sign of life "
            "for a while."
        )

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        with contextlib.suppress(OSError):  # a removed directory has no holder
            if _newest_number(self._directory) == self.number:
                _release(self._file)

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_SECONDS):
            with contextlib.suppress(OSError):  # check() reports a takeover or an unavailable file system
                os.utime(self._file, follow_symlinks=False)


def acquire_lease(run: Path, *, environ: Mapping[str, str]) -> Lease:
    """Become the writer; wait at most ``EXPIRY_SECONDS`` for a remote holder that may be gone."""
    directory = run / LEASE_DIRECTORY
    try:
        run.mkdir(parents=True, exist_ok=True)
        make_directory(directory)
        for _ in range(100):
            newest = _newest_number(directory)
            if newest:
                _wait_until_free(directory / _file_name(newest), run, environ)
            if not _claim(directory, newest + 1, environ):
                continue
            if _newest_number(directory) != newest + 1:  # a former holder's number: others came and went
                _remove(directory, newest + 1)
                continue
            for number in range(newest, 0, -1):
                if not _remove(directory, number):
                    break
            return Lease(directory, newest + 1)
    except OSError as error:
        raise UsageError(
            f"nothing can be written into the run directory {str(run)!r}: {error.strerror}. Give another with --out."
        ) from error
    raise UsageError(
        f"the run directory {str(run)!r} is wanted by too many runs at once, or something else wrote into "
        f"{str(directory)!r}. Give each run its own --out; if none is running, remove that directory."
    )


def read_holder(run: Path) -> Holder | None:
    """Read, without waiting, who writes a run, or did so last. Raise OSError if that cannot be read."""
    directory = run / LEASE_DIRECTORY
    number = _newest_number(directory) if directory.is_dir() else 0
    file = directory / _file_name(number)
    holder = read_small(file)
    if not number or not holder:
        return None
    is_alive = _is_alive_here(holder)
    if is_alive is None:
        try:
            now = _file_system_time(directory)
        except OSError:  # another user's
            now = time.time()
        is_alive = now - _modified(file) < EXPIRY_SECONDS
    return Holder(holder.get("job"), is_alive and not holder.get("released"))


def take_over(run: Path, number: int, *, environ: Mapping[str, str]) -> bool:
    """Release lease ``number`` of an unresponsive rank, so that the next run need not wait.

    False if already released or taken over; OSError if the directory is unreachable.
    """
    directory = run / LEASE_DIRECTORY
    if _newest_number(directory) != number or read_small(directory / _file_name(number)).get("released"):
        return False
    if not _claim(directory, number + 1, environ):
        return False
    _release(directory / _file_name(number + 1))
    return True


def is_held(run: Path) -> bool:
    """Without waiting: a holder on another host counts until ``EXPIRY_SECONDS`` after its last heartbeat."""
    holder = read_holder(run)
    return holder is not None and holder.is_alive


def _claim(directory: Path, number: int, environ: Mapping[str, str]) -> bool:
    """Create a number's file atomically; return False if it exists."""
    holder = {"host": socket.gethostname(), "pid": os.getpid(), **_job(environ), **_process_identity(os.getpid())}
    temporary = f".{secrets.token_hex(8)}"
    with open_directory(directory) as descriptor:
        try:
            with open(
                temporary, "x", opener=lambda path, flags: os.open(path, flags, 0o666, dir_fd=descriptor)
            ) as file:
                json.dump(holder, file)
            os.link(temporary, _file_name(number), src_dir_fd=descriptor, dst_dir_fd=descriptor)
        except FileExistsError:
            return False
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=descriptor)
    return True


def find_job(environ: Mapping[str, str]) -> str | None:
    """Return the scheduler's id of this job."""
    return next((environ[name] for name in JOB_VARIABLES if environ.get(name)), None)


def _job(environ: Mapping[str, str]) -> dict[str, Any]:
    restarts = environ.get(RESTART_VARIABLE, "")
    return {
        "job": find_job(environ),
        "restarts": int(restarts) if restarts.isdecimal() else 0,
    }


def _wait_until_free(file: Path, run: Path, environ: Mapping[str, str]) -> None:
    holder = read_small(file)
    if not holder or holder.get("released"):
        return
    mine, before = _job(environ), holder.get("restarts")
    # An earlier start of this job may still run on a lost node.
    if mine["job"] is not None and holder.get("job") == mine["job"] and before in range(mine["restarts"]):
        LOG.info(f"taking over from {_describe(holder)}: Slurm has started the job again")
        return
    is_alive = _is_alive_here(holder)
    if is_alive is False:
        return
    if is_alive is None:
        is_alive = _beats(file, holder)
    if is_alive:
        raise UsageError(
            f"the run directory {str(run)!r} is being written by {_describe(holder)}. Wait until that run has ended, "
            "end it, or give another directory with --out."
        )


def _is_alive_here(holder: Mapping[str, Any]) -> bool | None:
    """Return None if the holder is on another host or in another container."""
    mine = _process_identity(os.getpid())
    if any(holder.get(key) != mine[key] for key in ("boot", "pid_namespace")):
        return None
    seen = _process_identity(holder.get("pid"))
    return seen["started"] is not None and seen["started"] == holder.get("started")


def _beats(file: Path, holder: Mapping[str, Any]) -> bool:
    first = _modified(file)
    age = max(0.0, _file_system_time(file.parent) - first)  # negative if the clock was set back
    if age < EXPIRY_SECONDS:
        LOG.info(
            f"waiting up to {EXPIRY_SECONDS - age:.0f} s for a sign of life of the last writer, {_describe(holder)}"
        )
    end = time.monotonic() + EXPIRY_SECONDS - age
    while time.monotonic() < end:
        time.sleep(min(1.0, max(0.0, end - time.monotonic())))
        if _modified(file) != first:
            now = read_small(file)
            return bool(now) and not now.get("released")  # no file: another process took over
    return False


def _process_identity(pid: int | None) -> dict[str, Any]:
    """``started`` distinguishes reused process ids; None if gone."""
    process = read_process(pid)
    started = process.born if process and not process.has_ended else None
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return {"started": started, "boot": boot, "pid_namespace": os.readlink("/proc/self/ns/pid")}


def _file_system_time(directory: Path) -> float:
    """Maybe another host's clock."""
    with open_directory(directory), tempfile.TemporaryFile(dir=directory) as probe:
        os.utime(probe.fileno())
        return os.fstat(probe.fileno()).st_mtime


def _modified(file: Path) -> float:
    try:
        return file.lstat().st_mtime
    except FileNotFoundError:
        return 0.0


def _newest_number(directory: Path) -> int:
    with open_directory(directory) as descriptor:
        return max((int(name) for name in os.listdir(descriptor) if NUMBER.fullmatch(name)), default=0)


def _file_name(number: int) -> str:
    return f"{number:06d}"


def _release(file: Path) -> None:
    replace_text(file, json.dumps({**read_small(file), "released": True}))


def _remove(directory: Path, number: int) -> bool:
    try:
        with open_directory(directory) as descriptor:
            os.unlink(_file_name(number), dir_fd=descriptor)
    except FileNotFoundError:
        return False
    except IsADirectoryError:
        pass
    return True


def _describe(holder: Mapping[str, Any]) -> str:
    job = f", job {holder['job']}" if holder.get("job") else ""
    return f"process {holder.get('pid', '?')} on {holder.get('host', '?')}{job}"
