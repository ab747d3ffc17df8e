"""Programs whose own code leaves something running at their end, such as ``python keeping.py HOW OUT``."""

import atexit
import concurrent.futures
import ctypes
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from ringtrain.workloads.base import Sources
from tests.world.workloads.endings import Line

FOR_EVER = 3600.0
kept: list[object] = []


def wait_for_ever() -> None:
    time.sleep(FOR_EVER)


class Clinging:
    """It waits where no thread of Python can run any more: when the interpreter forgets its last objects."""

    def __del__(self) -> None:
        ctypes.PyDLL(None).sleep(int(FOR_EVER))


def keep(how: str) -> None:
    """Start what does not end by itself."""
    if how == "thread":
        threading.Thread(target=wait_for_ever, name="uploader").start()
    elif how == "pool":
        kept.append(pool := concurrent.futures.ThreadPoolExecutor(1, "reader"))
        pool.submit(wait_for_ever)
    elif how == "atexit":
        atexit.register(wait_for_ever)
    elif how == "atexit in C":  # in which no thread of Python runs
        atexit.register(ctypes.PyDLL(None).sleep, int(FOR_EVER))
    elif how == "child":
        multiprocessing.get_context("spawn").Process(target=time.sleep, args=(FOR_EVER,), name="decoder").start()
    elif how == "destructor":
        kept.append(Clinging())
    elif how == "daemon":
        threading.Thread(target=wait_for_ever, daemon=True).start()
    elif how == "detached":  # nobody waits for it, but it holds this process' stdout
        kept.append(subprocess.Popen(["sleep", str(FOR_EVER)]))


class Keeping(Line):
    """What ``RINGTRAIN_TEST_KEEP`` names is left running, on the rank of ``RINGTRAIN_TEST_KEEP_RANK`` (1)."""

    def create_sources(self, data_dir: Path | None, *, synthetic: bool) -> Sources:
        if os.environ.get("OMPI_COMM_WORLD_RANK", "0") == os.environ.get("RINGTRAIN_TEST_KEEP_RANK", "1"):
            keep(os.environ["RINGTRAIN_TEST_KEEP"])
        return super().create_sources(data_dir, synthetic=synthetic)


if __name__ == "__main__":
    import ringtrain

    how, out, code = sys.argv[1:]
    ringtrain.train(Line, {"out": out, "exit_timeout": 1})
    keep(how)
    time.sleep(3)  # longer than the time that is given to what is left, once this ends
    print("the script goes on", flush=True)
    if code == "error":
        raise ZeroDivisionError("of the script")
    sys.exit(int(code))
