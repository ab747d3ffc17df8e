"""``doctor --batch_size auto``: the largest batch of a rank that fits, by training two steps with it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ringtrain.config import DEFAULT_BATCH_SIZE, Config
from ringtrain.doctor.judging import GIB, MIB
from ringtrain.errors import UsageError
from ringtrain.run.checkpoint import MANIFEST_FILE, read_manifest
from ringtrain.run.directory import find_events
from ringtrain.run.store import find_checkpoint
from ringtrain.runtime.machine import read_memory_limits

STEPS = 2
POLL_SECONDS = 0.02
MAX_TRIALS = 20
MOST = 2**20  # samples
GROWTH = 8  # between two trials, at most


class Trial(NamedTuple):
    fits: bool
    peak: int = 0  # bytes, of the GPU if there is one, else of the process
    is_on_gpu: bool = False
    samples: int | None = None  # of the workload
    state: int = 0  # bytes of the optimizer


def advise(flags: Sequence[str], config: Config, *, limit: int) -> list[str]:
    """Return lines about the largest batch that fits. ``limit``: bytes of this process. Raise UsageError."""
    trials: dict[int, Trial] = {}

    def attempt(batch_size: int) -> Trial:
        trials[batch_size] = train([*flags, f"--batch_size={batch_size}"], limit)
        return trials[batch_size]

    best = search(attempt, limit, config.batch_size or DEFAULT_BATCH_SIZE)
    if best is None:
        raise UsageError("not even one sample fits into the memory. Use a smaller model, or more memory.")
    found, too_large = trials[best], min((size for size, trial in trials.items() if not trial.fits), default=None)
    of = "" if found.is_on_gpu else f" of {format_bytes(limit)}"
    more = f"{too_large:,} do not fit" if too_large else "that is all there are" if best == found.samples else "or more"
    twice = train([*flags, f"--batch_size={best}", "--accumulate=2"], limit)
    needs = f"needs {format_bytes(twice.peak)}" if twice.fits else "does not fit"
    shares = ", ".join(f"{format_bytes(round(found.state * (1 - 1 / size)))} on {size} ranks" for size in (2, 4, 8))
    return [
        f"{best:,} samples per rank fit; they need {format_bytes(found.peak)}{of}; {more}",
        f"  --accumulate 2, for twice the global batch, {needs}",
        f"  --shard_optimizer needs less, by calculation: {shares}",
    ]


def search(attempt: Callable[[int], Trial], limit: int, first: int) -> int | None:
    """Return the largest batch that fits, or one that is smaller by 5 % at most."""
    fits: dict[int, int] = {}  # batch size, peak
    wanted, most, too_large = first, MOST, None
    for _ in range(MAX_TRIALS):
        trial = attempt(wanted)
        if trial.fits:
            fits[wanted] = trial.peak
            most = min(most, trial.samples or most)
        else:
            too_large, most = wanted, wanted - 1
        low = max(fits, default=0)
        if low >= most or (too_large and too_large - low <= low // 20):
            break
        guess = min(guess_next(fits, limit, is_on_gpu=trial.is_on_gpu), GROWTH * low) if fits else most // 4
        wanted = max(1, guess) if low < guess <= most or not fits else (low + most + 1) // 2 if too_large else most
    return max(fits, default=None)


def guess_next(fits: Mapping[int, int], limit: int, *, is_on_gpu: bool) -> int:
    """Memory grows in proportion to the batch; how much a GPU has for it is not known."""
    small, large = min(fits), max(fits)
    growth = fits[large] - fits[small]
    if is_on_gpu or growth <= 0:
        return 2 * large if is_on_gpu or small == large else GROWTH * large
    return int(large + 0.95 * (limit - fits[large]) * (large - small) / growth)


def train(flags: Sequence[str], limit: int) -> Trial:
    with tempfile.TemporaryDirectory(prefix="ringtrain-doctor-") as directory:
        run = Path(directory, "run")
        own = ["--epochs=null", f"--steps={STEPS}", "--global_batch_size=null", f"--out={run}", "--resume=auto"]
        command = [sys.executable, "-m", "ringtrain", "train", *flags, *own]
        with Path(directory, "output").open("w+") as output:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
            is_killed = wait(process, limit)
            output.seek(0)
            said = output.read().strip().rpartition("\n")[2]
        [start], [end] = (find_events(run, kind)[:1] or [{}] for kind in ("start", "end"))
        if is_killed or process.returncode == -signal.SIGKILL or end.get("status") == "outofmemory":
            return Trial(fits=False)
        if process.returncode != 0:
            raise UsageError(f"two steps with {flags[-1]} failed: {said}")
        [usage] = end["ranks"]
        manifest = read_manifest(find_checkpoint(run) / MANIFEST_FILE)
        state = sum(item["bytes"] for item in manifest["variables"] if item["name"].startswith("slots/"))
        peak, is_on_gpu = usage.get("peak_gpu_memory_mib", usage["peak_memory_mib"]), "peak_gpu_memory_mib" in usage
        return Trial(True, int(peak) * MIB, is_on_gpu, start.get("samples"), state)


def wait(process: subprocess.Popen[bytes], limit: int) -> bool:
    """Return whether it was killed for taking more than ``limit`` bytes, before the system kills any process."""
    while process.poll() is None:
        with contextlib.suppress(OSError, IndexError, ValueError):
            pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
            if pages * os.sysconf("SC_PAGE_SIZE") > limit:
                process.kill()
                process.wait()
                return True
        time.sleep(POLL_SECONDS)
    return False


def find_limit() -> int:
    """Bytes: of the cgroup or the machine."""
    limits = [limit for limit, _ in read_memory_limits(Path("/"))]
    return min([*limits, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")])


def format_bytes(number: int) -> str:
    return f"{number / GIB:.2f} GiB" if number >= GIB else f"{number / MIB:.3g} MiB"
