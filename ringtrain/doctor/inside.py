"""Load the packages one by one and say what they are: the child process of ``ringtrain doctor``.

A broken extension can end the interpreter that loads it, or hang. So this is a process of its own, and says at each
step what it is about to load, so that its parent process knows where it ended.
"""

from __future__ import annotations

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
    """TensorFlow's version, the CUDA that it was built for, and the GPUs that it sees."""
    import tensorflow as tf

    cuda = dict(tf.sysconfig.get_build_info()).get("cuda_version")
    return {"version": tf.__version__, "cuda": cuda, "visible_gpus": len(tf.config.list_physical_devices("GPU"))}


def look_at_keras() -> dict[str, Any]:
    """Keras' version."""
    import keras

    return {"version": keras.__version__}


def look_at_horovod() -> dict[str, Any]:
    """Horovod's version, what it was built with, and the MPI that it has loaded."""
    import horovod.tensorflow as hvd

    parts = [part for part in ("mpi", "gloo", "nccl", "ccl", "cuda", "rocm") if getattr(hvd, f"{part}_built")()]
    nccl = hvd.nccl_built()
    return {
        "version": importlib.metadata.version("horovod"),
        "horovod_parts": parts,
        # NCCL's own coding of its version, from 2.9 on: major * 10000 + minor * 100 + patch (nccl.h).
        "nccl": f"{nccl // 10000}.{nccl % 10000 // 100}.{nccl % 100}" if nccl else None,
        "horovod_mpi": loaded_mpi_libraries(),
    }


def look_at_mpi4py() -> dict[str, Any]:
    """mpi4py's version and the MPI that it has loaded, without joining the ranks."""
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


# The keys are the names of ``facts.Stack``, except for the version.
STEPS: dict[str, Callable[[], dict[str, Any]]] = {
    "tensorflow": look_at_tensorflow,
    "keras": look_at_keras,
    "horovod": look_at_horovod,  # before mpi4py, as in a run
    "mpi4py": look_at_mpi4py,
}


def loaded_mpi_libraries() -> list[str]:
    """The files of MPI libraries that this process has loaded: Open MPI's and Intel's, MPICH's, Cray's."""
    mapped = re.findall(r"(/\S*/libmpi(?:ch|_cray|_gnu_\w+)?\.so\S*)", Path("/proc/self/maps").read_text())
    return list(dict.fromkeys(os.path.realpath(path) for path in mapped))


def describe_mpi(text: str) -> str | None:
    """Name and version of an MPI, from what its library or its mpirun says of itself; None if neither is known."""
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
    """An error's message as one line of moderate length."""
    text = " ".join(message.split())
    return text if len(text) <= MAX_MESSAGE else text[: MAX_MESSAGE - 3] + "..."


def main() -> None:
    """Look at one library after the other, and report each finding in a line of JSON at once: the next may crash."""
    # What libraries print must not get between the lines of the answer.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def tell(**values: Any) -> None:
        answer.write(json.dumps(values) + "\n")
        answer.flush()

    for name, look in STEPS.items():
        tell(begins=name)
        try:
            tell(ends=name, found=look())
        except BaseException as error:  # the next step may work all the same
            tell(ends=name, failure=describe_hiding(error) or shorten(f"{type(error).__name__}: {error}"))
    os._exit(0)  # libraries that were loaded only to be looked at have nothing to tidy up


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main()
