"""A process that has imported TensorFlow and Keras, and forks for each Python program that the tests start.

A cold start of two ranks spends seconds of both cores on imports. A program that is started with the variables of
``ForkServers.environment`` runs `tests/world/forked/sitecustomize.py` first. That sends its environment, arguments,
working directory and standard streams to the server, and stays as the stand-in of the process that the server forks.
The forked process looks like a fresh interpreter: /proc/PID/environ and cmdline are those of its stand-in, and
os.getppid() is its stand-in.

It differs from a cold start in seven ways. TensorFlow, Keras and most of ringtrain are already imported, and Horovod's
library is loaded, so nothing is printed, filtered or read from the environment at import. All forked processes share
one hash seed. ``sched_yield`` sleeps (forked/sleeping_yield.c). Horovod looks for tensors less often. Memory comes from
tcmalloc. The operations of a graph do not know where they were made. At exit, Python's modules and the static objects
of C++ are not destroyed, and functions registered with C's atexit(3) do not run. Tests that depend on one of these are
marked ``cold``; RINGTRAIN_TEST_COLD=1 starts all programs cold.

The server refuses a program that needs what is read at import (other variables of TensorFlow or of Python), or that
lives in other namespaces, in another cgroup or under other resource limits. It starts cold then. The nodes of the
tests' Slurm have servers of their own.
"""

import array
import atexit
import contextlib
import ctypes
import ctypes.util
import gc
import importlib
import importlib.util
import inspect
import marshal
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
import time
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[2]
BASE_PATH: list[str] = []  # where modules are looked for, after a program's own directory and PYTHONPATH
STAND_IN = str(Path(__file__).with_name("forked"))
SERVERS_VARIABLE = "RINGTRAIN_TEST_FORK_SERVERS"
SWITCH = "RINGTRAIN_TEST_COLD"  # 1: all programs start cold
START_SECONDS = 120
# Milliseconds until Horovod's thread looks for tensors again. With ringtrain's 1, two ranks of a short run take a sixth
# more processor time.
LESS_POLLING = {"HOROVOD_CYCLE_TIME": "5"}
# Variables that Python, TensorFlow, Keras and NumPy read when they are imported.
READ_AT_IMPORT = ("PYTHON", "TF_", "XLA_", "KERAS_", "OMP_", "OPENBLAS_", "MKL_", "LD_", "MALLOC_", "LC_", "LANG", "TZ")
READ_LATER = ("PYTHONPATH", "TF_DETERMINISTIC_OPS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "TF_CONFIG")
# The server's own variables, with the other values that ranks set for their children.
ACCEPTED_VALUES = {"TF_CPP_MIN_LOG_LEVEL": ("2", "3"), "KERAS_BACKEND": ("tensorflow",), "LD_PRELOAD": ()}
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


def hand_on_no_ignored_signals() -> None:
    """Let programs start with the signal handlers that they have in a user's shell.

    What runs the tests may have been started in the background, or by nohup, and ignored signals are inherited. A
    handler that does nothing is not: exec(2) resets it. A ``preexec_fn`` would fork all of this process' memory.
    """
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


def preload(*libraries: str) -> str:
    """Value of LD_PRELOAD for these libraries and tcmalloc, if the system has it.

    A program that builds graphs and trains tiny models takes an eighth less processor time with it than with the C
    library's own malloc.
    """
    return ":".join(filter(None, [*libraries, ctypes.util.find_library("tcmalloc_minimal")]))


def keep_stack_traces(are_kept: bool) -> bool:
    """Let each operation of a graph keep the Python stack that made it, or not; returns how it was.

    TensorFlow keeps it for the texts of errors. That takes a tenth of the time in which a graph is built.
    """
    create = sys.modules["tensorflow.python.framework.ops"]._create_c_op.__wrapped__
    *others, were_kept = create.__defaults__
    assert [*inspect.signature(create).parameters][-1] == "extract_traceback"
    create.__defaults__ = (*others, are_kept)
    return bool(were_kept)


def load_operations_of_horovod() -> None:
    """Load its library, if it is installed, but none of its modules: linking takes more than half of their import."""
    spec = importlib.util.find_spec("horovod")
    for directory in (spec and spec.submodule_search_locations) or []:
        for library in Path(directory).glob("tensorflow/mpi_lib.*.so"):
            importlib.import_module("tensorflow").load_op_library(str(library))


def build_sleeping_yield(directory: Path) -> str:
    """Compile a library for LD_PRELOAD, unless that is done; returns its path."""
    library, source = directory / "sleeping_yield.so", Path(STAND_IN, "sleeping_yield.c")
    if not library.exists():
        subprocess.run(["gcc", "-shared", "-fPIC", "-O2", "-o", library, source], check=True)
    return str(library)


class ForkServers:
    """The servers of a test run, one on each host that needs one; each ends with the process that has started it."""

    def __init__(self) -> None:
        self._processes: dict[str, subprocess.Popen[bytes]] = {}  # by the names of their hosts
        self._is_inherited = SERVERS_VARIABLE in os.environ  # this worker of pytest-xdist has that of its controller
        self._lock = threading.Lock()  # tests may start programs from several threads

    def environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """Variables of a command whose Python programs are to be forked."""
        if os.environ.get(SWITCH) == "1":
            return dict(env)
        self.start()
        self.wait_for(os.uname().nodename)
        path = os.pathsep.join([STAND_IN, *filter(None, [env.get("PYTHONPATH")])])
        return {**LESS_POLLING, **env, "PYTHONPATH": path, SERVERS_VARIABLE: os.environ[SERVERS_VARIABLE]}

    def start(self) -> None:
        """Start the server of this host, unless it has one or all programs are to start cold."""
        if not self._is_inherited:
            self.start_on(os.uname().nodename, os.environ)

    def start_on(self, host: str, environ: Mapping[str, str], enter: Sequence[str] = ()) -> None:
        """Start the server of a host, unless it has one or all programs are to start cold.

        Args:
            environ: environment of the programs that it is to fork.
            enter: command that runs another one on the host.
        """
        with self._lock:
            process = self._processes.get(host)
            if os.environ.get(SWITCH) != "1" and (process is None or process.poll() is not None):
                self._processes[host] = self._start_on(host, environ, enter)

    def wait_for(self, host: str) -> None:
        """Wait until the server of a host is ready, unless all programs are to start cold."""
        if os.environ.get(SWITCH) == "1":
            return
        address, end = Path(os.environ[SERVERS_VARIABLE], host), time.monotonic() + START_SECONDS
        while not address.exists():
            process = self._processes.get(host)
            is_starting = (process is None or process.poll() is None) and time.monotonic() < end
            assert is_starting, address.with_name(f"{host}.log").read_text()
            time.sleep(0.02)

    def _start_on(self, host: str, environ: Mapping[str, str], enter: Sequence[str]) -> subprocess.Popen[bytes]:
        if not self._processes:
            atexit.register(self.close)
        if SERVERS_VARIABLE not in os.environ:
            os.environ[SERVERS_VARIABLE] = tempfile.mkdtemp(prefix="ringtrain-forks-")
        directory = Path(os.environ[SERVERS_VARIABLE])
        kept = {name: value for name, value in environ.items() if name not in ("PYTHONPATH", "PYTHONWARNINGS")}
        env = {**kept, "TF_CPP_MIN_LOG_LEVEL": "2", "KERAS_BACKEND": "tensorflow", "ZPADDING": "z" * PADDING}
        env |= {"LD_PRELOAD": preload(build_sleeping_yield(directory))}
        address = directory / host
        address.unlink(missing_ok=True)
        program = [sys.executable, "-m", __name__, str(address), "z" * PADDING]
        with (directory / f"{host}.log").open("wb") as log:
            return subprocess.Popen(
                [*enter, "env", f"--chdir={REPOSITORY}", *program],
                env=env,
                stdin=subprocess.PIPE,  # the server exits when this end is closed
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def close(self) -> None:
        """End the servers that this process has started, and with them what they have forked."""
        for process in self._processes.values():
            assert process.stdin is not None
            process.stdin.close()
            process.kill()
            process.wait()
        self._processes.clear()
        if not self._is_inherited and SERVERS_VARIABLE in os.environ:
            shutil.rmtree(os.environ.pop(SERVERS_VARIABLE), ignore_errors=True)


SERVERS = ForkServers()


class Request:
    """A start of Python, as its stand-in describes it."""

    def __init__(self, values: Mapping[str, Any], streams: list[int]) -> None:
        self.values, self.streams = values, streams

    def why_cold(self) -> str:
        """Reason why the server cannot fork this process; empty if it can."""
        environ = self.values["environ"]
        for name in {*environ, *os.environ}:
            if not name.startswith(READ_AT_IMPORT) or name in READ_LATER or name == "LD_LIBRARY_PATH":
                continue
            if environ.get(name) == os.environ.get(name):
                continue
            if name not in ACCEPTED_VALUES or environ.get(name) not in (None, *ACCEPTED_VALUES[name]):
                return f"{name}={environ.get(name)}"
        for name, value in describe_surroundings().items():
            if self.values[name] != value:
                return f"other {name}"
        # mpirun prepends the library directory of its own prefix, which is searched anyway.
        libraries = str(Path(shutil.which("mpirun") or "/usr/bin/mpirun").parent.with_name("lib"))
        if set(filter(None, environ.get("LD_LIBRARY_PATH", "").split(os.pathsep))) - {libraries}:
            return f"LD_LIBRARY_PATH={environ['LD_LIBRARY_PATH']}"
        if self.values["executable"] != sys.executable:
            return "another interpreter"
        if len(_joined(self.values["argv"])) > PADDING or len(_joined(_pairs(environ))) > PADDING:
            return "too many arguments or variables"
        return ""

    def imitate_stand_in(self) -> None:
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
        os.sched_setscheduler(0, values["policy"], os.sched_param(0))
        for number in values["ignored"]:
            signal.signal(number, signal.SIG_IGN)
        for name in list(os.environ):
            del os.environ[name]  # first: libc's pointers lead into the memory that is overwritten next
        overwrite_command_line(values["argv"], values["environ"])
        os.environ.update(values["environ"])
        own_pid, own_getppid = os.getpid(), os.getppid
        # Launchers are searched among the ancestors.
        os.getppid = lambda: values["pid"] if os.getpid() == own_pid else own_getppid()
        tempfile.tempdir = None
        np.random.seed()  # different in each process; fork itself seeds Python's generator

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
    """Write these into /proc/PID/cmdline and environ, by which tests find the processes of a run.

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
    """Namespaces, cgroup and resource limits, which a forked process cannot take over."""
    return {
        "namespaces": [os.stat(f"/proc/self/ns/{name}").st_ino for name in ("net", "mnt", "pid", "ipc")],
        "cgroup": Path("/proc/self/cgroup").read_text(),
        "limits": [resource.getrlimit(number) for number in range(16)],
    }


def serve(listener: socket.socket) -> Request:
    """Fork for each request; returns in the forked processes only."""
    connections: dict[int, socket.socket] = {}  # to the stand-ins, by the pids of the processes forked for them
    exits: dict[int, int] = {}  # pids, by the descriptors that become readable when the process exits
    while True:
        ready = _wait_for(STDIN, listener.fileno(), *exits, *(each.fileno() for each in connections.values()))
        if STDIN in ready:  # the test process has ended; forked processes end with this one
            os._exit(0)
        for descriptor in ready & exits.keys():
            pid = exits.pop(descriptor)
            os.close(descriptor)
            _report_exit(pid, connections.pop(pid, None))
        for pid in [pid for pid, each in connections.items() if each.fileno() in ready]:
            connections.pop(pid).close()  # its stand-in was killed
            os.kill(pid, signal.SIGKILL)
        if listener.fileno() not in ready:
            continue
        connection, _ = listener.accept()
        request = _receive(connection)
        if request is None:
            connection.close()
            continue
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != server:
                os._exit(1)
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
            connection.send(marshal.dumps({"pid": pid}))


def _wait_for(*descriptors: int) -> set[int]:
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll()}


def _report_exit(pid: int, connection: socket.socket | None) -> None:
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if connection is not None:
        with contextlib.suppress(OSError):
            connection.send(marshal.dumps({"code": code} if code >= 0 else {"signal": -code}))
        connection.close()


def _receive(connection: socket.socket) -> Request | None:
    """Receive a request; None if the program must start cold."""
    connection.settimeout(5)
    try:
        data, ancillary, _, _ = connection.recvmsg(4 * PADDING, socket.CMSG_SPACE(3 * array.array("i").itemsize))
    except OSError:
        return None
    connection.settimeout(None)
    streams = array.array("i")
    for _, _, content in ancillary:
        streams.frombytes(content[: len(content) - len(content) % streams.itemsize])
    if not data:
        return None
    request = Request(marshal.loads(data), list(streams))
    reason = request.why_cold()
    if reason:
        print(f"{request.values['argv']} starts cold: {reason}", file=sys.stderr, flush=True)
        for descriptor in streams:
            os.close(descriptor)
        return None
    return request


def start_serving() -> Request:
    """Import TensorFlow and listen. Returns in each forked process, with its request."""
    BASE_PATH[:] = sys.path[1:]
    for module in MODULES:
        importlib.import_module(module)
    page = importlib.import_module("ringtrain.report.page")
    page.load_template(), page.read_own_files()  # a tenth of a second of each run that ends
    load_operations_of_horovod()
    assert not {"mpi4py.MPI", "horovod"} & sys.modules.keys(), "imported by those modules: it must come after the fork"
    keep_stack_traces(False)
    gc.collect()
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    address = sys.argv[1]
    listener.bind(f"{address}.new")
    listener.listen(64)
    os.rename(f"{address}.new", address)  # who waits for it can connect
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return serve(listener)


def exit_soon(code: int, *, is_interrupted: bool) -> NoReturn:
    """Exit as Python does, but do not destroy modules and static objects, nor run C's exit handlers: saves 0.1 s."""
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if is_interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    ctypes.CDLL(None).fflush(None)
    os._exit(code)


def main() -> NoReturn:
    """Serve requests; in a forked process, run the requested program."""
    request = start_serving()
    request.imitate_stand_in()
    code, is_interrupted = 0, False
    try:
        request.run()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException as error:
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        code, is_interrupted = 1, isinstance(error, KeyboardInterrupt)
    exit_soon(code & 0xFF, is_interrupted=is_interrupted)


if __name__ == "__main__":
    main()
