"""Child process of ``ringtrain doctor`` that loads the packages one by one.

Broken extensions may crash or hang the interpreter; the parent then blames the first package without an answer.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ringtrain.messages.hiding import describe_hiding

MAX_MESSAGE = 160


def look_at_tensorflow() -> dict[str, Any]:
    import tensorflow as tf

    cuda = dict(tf.sysconfig.get_build_info()).get("cuda_version")
    return {"version": tf.__version__, "cuda": cuda, "visible_gpus": len(tf.config.list_physical_devices("GPU"))}


def look_at_horovod() -> dict[str, Any]:
    import horovod.tensorflow as hvd

    parts = [part for part in ("mpi", "gloo", "nccl", "ccl", "cuda", "rocm") if getattr(hvd, f"{part}_built")()]
    nccl = hvd.nccl_built()
    return {
        "version": importlib.metadata.version("horovod"),
        "horovod_parts": parts,
        # NCCL's version code since 2.9: major * 10000 + minor * 100 + patch (nccl.h).
        "nccl": f"{nccl // 10000}.{nccl % 10000 // 100}.{nccl % 100}" if nccl else None,
        "horovod_mpi": loaded_mpi_libraries(),
    }


def look_at_mpi4py() -> dict[str, Any]:
    import mpi4py

    already_loaded = set(loaded_mpi_libraries())
    mpi4py.rc.initialize = False  # under a launcher it would join the ranks
    from mpi4py import MPI

    loaded = loaded_mpi_libraries()
    return {
        "version": mpi4py.__version__,
        "mpi_library": describe_mpi(MPI.Get_library_version()),
        "mpi4py_mpi": [path for path in loaded if path not in already_loaded] or loaded,
    }


# Keys are fields of ``facts.Stack``.
STEPS: dict[str, Callable[[], dict[str, Any]]] = {
    "tensorflow": look_at_tensorflow,
    "keras": lambda: {"version": importlib.import_module("keras").__version__},
    "horovod": look_at_horovod,  # before mpi4py, as in a run
    "mpi4py": look_at_mpi4py,
}


def loaded_mpi_libraries() -> list[str]:
    """Find Open MPI's, Intel's, MPICH's and Cray's."""
    mapped = re.findall(r"(/\S*/libmpi(?:ch|_cray|_gnu_\w+)?\.so\S*)", Path("/proc/self/maps").read_text())
    return list(dict.fromkeys(os.path.realpath(path) for path in mapped))


def describe_mpi(text: str) -> str | None:
    openmpi = re.search(r"Open MPI\W+v?([\d.]+\d)", text)
    if openmpi or "Open MPI" in text or "OpenRTE" in text:
        return f"Open MPI {openmpi[1]}" if openmpi else "Open MPI"
    for name, pattern in (
        ("Intel MPI", r"Intel\(R\) MPI Library.*?([\d.]+\d)"),
        ("MPICH", r"(?:MPICH Version|HYDRA build details).*?([\d.]+\w*)"),
    ):
        match = re.search(pattern, text, re.DOTALL)
        if match:
            return f"{name} {match[1]}"
    return None


def shorten(message: str) -> str:
    text = " ".join(message.split())
    return text if len(text) <= MAX_MESSAGE else text[: MAX_MESSAGE - 3] + "..."


def main() -> None:
    """Report each result as a line of JSON at once: the next package may crash."""
    # Output of libraries must not mix with the answer.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def tell(**values: Any) -> None:
        answer.write(json.dumps(values) + "\n")
        answer.flush()

    tell(name="python", found={})
    for name, look in STEPS.items():
        try:
            tell(name=name, found=look())
        except BaseException as error:  # later steps may still work
            tell(name=name, failure=describe_hiding(error) or shorten(f"{type(error).__name__}: {error}"))
    os._exit(0)  # no cleanup of the loaded libraries


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main()
