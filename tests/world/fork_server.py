"""A process that has imported TensorFlow and Keras, and forks for each Python program that the tests start.

A cold start of two ranks spends seconds of both cores on imports. A program that is started with the variables of
``ForkServer.environment`` runs `tests/world/forked/sitecustomize.py` first. That sends its environment, arguments,
working directory and standard streams to the server, and stays as the stand-in of the process that the server forks.
The forked process looks like a fresh interpreter: /proc/PID/environ and cmdline are those of its stand-in, and
os.getppid() is its stand-in.

It differs from a cold start in three ways: all forked processes share one seed of Python's hashes; ``sched_yield``
sleeps (forked/patient.c); and at the end, after threads and ``atexit``, Python's modules are not destroyed. Tests that
depend on these are marked ``cold``, and RINGTRAIN_TEST_COLD=1 starts all programs cold.

The server refuses a program that needs what is read at import (other variables of TensorFlow or of Python), or that
lives in other namespaces, in another cgroup or under other resource limits. It starts cold then.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import resource
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

REPOSITORY = Path(__file__).resolve().parents[2]
BASE_PATH: list[str] = []  # where modules are looked for, after a program's own directory and PYTHONPATH
STAND_IN = str(Path(__file__).with_name("forked"))
SERVER_VARIABLE = "RINGTRAIN_TEST_FORK_SERVER"
SWITCH = "RINGTRAIN_TEST_COLD"  # 1: every start is a cold one, as a user's
# Variables that Python, TensorFlow, Keras and NumPy read when they are imported.
READ_AT_IMPORT = ("PYTHON", "TF_", "XLA_", "KERAS_", "OMP_", "OPENBLAS_", "MKL_", "LD_", "MALLOC_", "LC_", "LANG", "TZ")
# Values that ranks set for their children, and variables that are read later.
HARMLESS = {
    "TF_CPP_MIN_LOG_LEVEL": ("2", "3"),
    "KERAS_BACKEND": ("tensorflow",),
    "LD_LIBRARY_PATH": ("/usr/lib:/usr/lib",),  # of a mpirun that a rank starts
}
READ_LATER = ("PYTHONPATH", "TF_DETERMINISTIC_OPS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "TF_CONFIG")
PADDING = 1 << 16  # bytes of arguments and of variables that a request may have
PR_SET_PDEATHSIG = 1
STDIN = 0
# What a run imports, except modules that read the environment or load MPI or Horovod.
MODULES = (
    "tensorflow", "keras", "yaml", "rich.progress", "jinja2", "tensorboard.compat.proto.summary_pb2", "mpi4py",
    "concurrent.futures.thread", "multiprocessing.pool", "numpy.testing",
    "ringtrain.script", "ringtrain.training.loop", "ringtrain.training.job", "ringtrain.training.together",
    "ringtrain.commands.train", "ringtrain.report.page", "ringtrain.workloads.digits",
)  # fmt: skip


class ForkServer:
    """The server of this test process; it starts with the first request for it, and ends with the tests."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._directory = Path()

    def environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """Variables of a command whose Python programs are to be forked."""
        if os.environ.get(SWITCH) == "1":
            return dict(env)
        if self._process is None:
            self._start()
        path = os.pathsep.join([STAND_IN, *filter(None, [env.get("PYTHONPATH")])])
        return {**env, "PYTHONPATH": path, SERVER_VARIABLE: str(self._directory / "socket")}

    def _start(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="ringtrain-forks-"))
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        env = {**kept, "TF_CPP_MIN_LOG_LEVEL": "2", "KERAS_BACKEND": "tensorflow", "ZPADDING": "z" * PADDING}
        env |= {"LD_PRELOAD": str(self._build_patience())}
        command = [sys.executable, "-m", __name__, str(self._directory / "socket"), "z" * PADDING]
        log = self._directory / "log"
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                command,
                env=env,
                cwd=REPOSITORY,
                stdin=subprocess.PIPE,  # the server exits when this end is closed
                stdout=subprocess.PIPE,
                stderr=file,
                start_new_session=True,
            )
        atexit.register(self.close)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n", log.read_text()

    def _build_patience(self) -> Path:
        library = self._directory / "patient.so"
        subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", library, Path(STAND_IN, "patient.c")], check=True)
        return library

    def close(self) -> None:
        """End the server, and with it what it has forked."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
            shutil.rmtree(self._directory, ignore_errors=True)


SERVER = ForkServer()


class Request:
    """A start of Python, as its stand-in describes it."""

    def __init__(self, values: Mapping[str, Any], streams: list[int]) -> None:
        self.values, self.streams = values, streams

    def why_cold(self) -> str:
        """Reason why the server cannot fork this process; empty if it can."""
        environ = self.values["environ"]
        for name in {*environ, *os.environ}:
            if not name.startswith(READ_AT_IMPORT) or name in READ_LATER:
                continue
            if environ.get(name) not in (os.environ.get(name), None, *HARMLESS.get(name, ())):
                return f"{name}={environ.get(name)}"
        for name, value in describe_surroundings().items():
            if self.values[name] != value:
                return f"other {name}"
        if self.values["executable"] != sys.executable:
            return "another interpreter"
        if len(_joined(self.values["argv"])) > PADDING or len(_joined(_pairs(environ))) > PADDING:
            return "too many arguments or variables"
        return ""

    def become(self) -> None:
        """Make this process look like its stand-in, from outside and to itself."""
        values = self.values
        for number, descriptor in enumerate(self.streams):
            os.dup2(descriptor, number)
            os.close(descriptor)
        sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]
        os.setsid()
        os.chdir(values["cwd"])
        os.umask(values["umask"])
        os.sched_setaffinity(0, values["cores"])
        for number in values["ignored"]:
            signal.signal(number, signal.SIG_IGN)
        overwrite_command_line(values["argv"], values["environ"])
        for name in list(os.environ):
            del os.environ[name]
        os.environ.update(values["environ"])
        os.getppid = lambda: values["pid"]  # launchers are found among the ancestors
        tempfile.tempdir = None
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()  # each process has its own; Python's is seeded by fork itself

    def run(self) -> None:
        """Run the program, as the interpreter does."""
        words = self.values["argv"][1:]
        module = words[1] if words[0] == "-m" else None
        first = self.values["cwd"] if module else str(Path(words[0]).resolve().parent)
        extra = self.values["environ"].get("PYTHONPATH", "")
        sys.path[:] = [first, *filter(None, extra.split(os.pathsep)), *BASE_PATH]
        sys.orig_argv[:] = self.values["argv"]
        sys.argv[:] = words[1:] if module else words
        importlib.invalidate_caches()
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        if module:
            runpy._run_module_as_main(module)  # type: ignore[attr-defined]
            return
        vars(main).update(__file__=words[0], __builtins__=__builtins__, __cached__=None)
        code = compile(Path(words[0]).read_bytes(), words[0], "exec")
        exec(code, vars(main))


def overwrite_command_line(argv: list[str], environ: Mapping[str, str]) -> None:
    """Have /proc/PID/cmdline and environ show these, which tests find a run's processes by.

    Both lie in this process' own memory, which the server's padding has made large enough (proc(5), stat).
    """
    fields = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
    start_of_words, end_of_words, start_of_variables, end_of_variables = map(int, fields[45:49])
    for start, end, strings in (
        (start_of_words, end_of_words, argv),
        (start_of_variables, end_of_variables, _pairs(environ)),
    ):
        data = _joined(strings)
        assert len(data) < end - start
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, data, len(data))


def _pairs(environ: Mapping[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in environ.items()]


def _joined(strings: list[str]) -> bytes:
    return b"".join(os.fsencode(string) + b"\0" for string in strings)


def describe_surroundings() -> dict[str, Any]:
    """What a process has from where it was started, and cannot change by itself."""
    return {
        "namespaces": [os.stat(f"/proc/self/ns/{name}").st_ino for name in ("net", "mnt", "pid", "ipc")],
        "cgroup": Path("/proc/self/cgroup").read_text(),
        "limits": [list(resource.getrlimit(number)) for number in range(16)],
    }


def serve(listener: socket.socket) -> Request:
    """Fork for each request; returns in the forked processes alone."""
    connections: dict[int, socket.socket] = {}  # of the stand-ins, by the pids of what was forked for them
    exits: dict[int, int] = {}  # pids, by the descriptors that become readable at their end
    while True:
        poll = select.poll()
        for descriptor in (STDIN, listener.fileno(), *exits, *(each.fileno() for each in connections.values())):
            poll.register(descriptor, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll()}
        if STDIN in ready:  # the test process has ended, and what was forked ends with this one
            os._exit(0)
        for descriptor in ready & exits.keys():
            pid = exits.pop(descriptor)
            os.close(descriptor)
            _, status = os.waitpid(pid, 0)
            code = os.waitstatus_to_exitcode(status)
            connection = connections.pop(pid, None)
            if connection is not None:
                with contextlib.suppress(OSError):
                    connection.send(json.dumps({"code": code} if code >= 0 else {"signal": -code}).encode())
                connection.close()
        for pid in [pid for pid, each in connections.items() if each.fileno() in ready]:
            connections.pop(pid).close()  # its stand-in was killed
            os.kill(pid, signal.SIGKILL)
        if listener.fileno() in ready:
            connection, _ = listener.accept()
            request = _receive(connection)
            if request is None:
                connection.close()
                continue
            pid = os.fork()
            if pid == 0:
                ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                for each in (listener, connection, *connections.values()):
                    each.close()
                for descriptor in exits:
                    os.close(descriptor)
                return request
            for descriptor in request.streams:
                os.close(descriptor)
            connections[pid] = connection
            exits[os.pidfd_open(pid)] = pid
            with contextlib.suppress(OSError):
                connection.send(json.dumps({"pid": pid}).encode())


def _receive(connection: socket.socket) -> Request | None:
    """What a stand-in asks for; None where that is to start as usual."""
    data, ancillary, _, _ = connection.recvmsg(4 * PADDING, socket.CMSG_SPACE(3 * array.array("i").itemsize))
    streams = array.array("i")
    for _, _, content in ancillary:
        streams.frombytes(content[: len(content) - len(content) % streams.itemsize])
    if not data:
        return None
    request = Request(json.loads(data), list(streams))
    reason = request.why_cold()
    if reason:
        print(f"{request.values['argv']} starts cold: {reason}", file=sys.stderr, flush=True)
        for descriptor in streams:
            os.close(descriptor)
        return None
    return request


def start_serving() -> Request:
    """Import, listen, and say so; returns in a forked process, with what it is to be."""
    BASE_PATH[:] = sys.path[1:]
    for module in MODULES:
        importlib.import_module(module)
    assert not {"mpi4py.MPI", "horovod"} & sys.modules.keys(), "imported by those modules: it must come after the fork"
    gc.collect()
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(sys.argv[1])
    listener.listen(64)
    print("ready", flush=True)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return serve(listener)


def exit_soon(code: int) -> NoReturn:
    """End as Python does, without the destruction of all modules, which takes 0.1 s."""
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    ctypes.CDLL(None).exit(code)
    raise AssertionError("exit(3) has returned")


def main() -> NoReturn:
    """Serve; in a forked process, be the program."""
    request = start_serving()
    request.become()
    code = 0
    try:
        request.run()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException as error:
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        code = 1
    exit_soon(code & 0xFF)


if __name__ == "__main__":
    main()
