"""A process beside rank 0 that sends to a tracker what the run logs, while it trains.

A process, since a tracker's package takes seconds to import and may hold Python's lock, hang or crash.
"""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ringtrain.messages.defects import describe_defect
from ringtrain.messages.escaping import escape
from ringtrain.runtime.processes import MEANT_FOR_RANK, PACKAGES
from ringtrain.tracking.feed import Feed

PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 2.0, 60.0
LAST_SECONDS = 10.0  # for the last events and files, when the run has ended
# MLflow tries for minutes by default.
DEFAULTS = {
    "MLFLOW_LOGGING_LEVEL": "ERROR", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "WANDB_SILENT": "true",
}  # fmt: skip


@contextlib.contextmanager
def following(path: Path, trackers: Sequence[str], warn: Callable[[str], None]) -> Iterator[None]:
    """Follow a run of this process until it has logged its end."""
    code = f"import sys; sys.path.append({PACKAGES!r}); from {__name__} import main; main(*sys.argv[1:])"
    command = [sys.executable, "-c", code, str(path), repr(time.time())]
    processes = {
        name: subprocess.Popen(
            [*command, name], env=DEFAULTS | os.environ, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
        )
        for name in trackers
    }
    try:
        yield
    finally:
        end = time.monotonic() + LAST_SECONDS
        for process in processes.values():
            process.stdin.close()  # type: ignore[union-attr]
        for name, process in processes.items():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
            if process.poll() is None:
                process.kill()
            if process.wait():
                warn(f"{name} did not take all. The next start sends the rest, or: {describe_way_on(path, name)}")


def describe_way_on(path: Path, name: str) -> str:
    return f"python -m ringtrain track {shlex.quote(str(path))} --to {name}"


def main(path: str, begun: str, name: str) -> None:
    """Exit with 1 if something was not sent."""
    for number in MEANT_FOR_RANK:
        signal.signal(number, signal.SIG_IGN)
    os.nice(19)
    is_over = threading.Event()
    threading.Thread(target=wait_for_end, args=(os.getppid(), is_over), daemon=True).start()
    feed: Feed | None = None
    pause, has_warned = PAUSE_SECONDS, False
    while True:
        is_last = is_over.is_set()
        try:
            feed = feed or Feed(Path(path), name, begun=float(begun))
            feed.send(ends=is_last)
            pause, has_warned, is_sent = PAUSE_SECONDS, False, True
        except Exception as error:
            if not has_warned:
                why = escape(f"{name} cannot be reached: {describe_defect(error)}")
                print(f"ringtrain: warning: {why} Training goes on.", file=sys.stderr, flush=True)
            pause, has_warned, is_sent = min(2 * pause, LONGEST_PAUSE_SECONDS), True, False
        if is_last:
            sys.exit(not is_sent)
        is_over.wait(pause)


def wait_for_end(parent: int, is_over: threading.Event) -> None:
    """Set ``is_over`` when the run has written its last file, or its process has been killed.

    Launchers wait for this process, so it ends soon after.
    """
    while os.getppid() == parent and not select.select([0], [], [], 0.5)[0]:
        pass
    is_over.set()
    time.sleep(LAST_SECONDS)
    os._exit(1)
