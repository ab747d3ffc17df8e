"""Hand this start of Python over to the fork server of the tests, if that can take it; else start as usual.

This directory is on the PYTHONPATH of what the tests start. The process remains as the stand-in of the one that the
server forks: it passes signals on, exits with its code, and takes it along when it is killed itself.
"""

import contextlib
import sys


def is_program(words: list[str]) -> bool:
    """True for modules that start ranks, and for scripts; not for options of the interpreter, nor console scripts."""
    is_module = words[:1] == ["-m"] and (words[1] == "ringtrain" or words[1].startswith("tests."))
    return is_module or (bool(words) and words[0].endswith(".py"))


def hand_over() -> None:
    """Have the server fork; return if it refuses."""
    import array
    import json
    import os
    import resource
    import signal
    import socket

    handled = {signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}
    handled |= {signal.SIGCONT, signal.SIGWINCH}
    ignored = [number for number in handled if signal.getsignal(number) == signal.SIG_IGN]
    umask = os.umask(0o22)
    os.umask(umask)
    with open("/proc/self/cgroup") as file:
        cgroup = file.read()
    request = {
        "argv": sys.orig_argv,
        "executable": sys.executable,
        "environ": dict(os.environ),
        "cwd": os.getcwd(),
        "pid": os.getpid(),
        "cores": sorted(os.sched_getaffinity(0)),
        "umask": umask,
        "ignored": ignored,
        "namespaces": [os.stat(f"/proc/self/ns/{name}").st_ino for name in ("net", "mnt", "pid", "ipc")],
        "cgroup": cgroup,
        "limits": [resource.getrlimit(number) for number in range(16)],  # RLIM_NLIMITS
    }
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(os.environ["RINGTRAIN_TEST_FORK_SERVER"])
        streams = array.array("i", [0, 1, 2])
        connection.sendmsg([json.dumps(request).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
        pid = json.loads(connection.recv(1 << 16) or b"{}").get("pid")
        if pid is None:
            return
        with open("/proc/self/comm", "w") as file:
            file.write("stand-in")  # which tests that look for ranks pass over
        for number in handled.difference(ignored):
            signal.signal(number, lambda number, frame: os.kill(pid, number))
        end = json.loads(connection.recv(1 << 16) or '{"signal": 9}')  # the server is gone, and with it what it forked
    if "signal" in end:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if end["signal"] != signal.SIGKILL:
            signal.signal(end["signal"], signal.SIG_DFL)
        os.kill(os.getpid(), end["signal"])
    os._exit(end["code"])


if is_program(sys.orig_argv[1:]):
    with contextlib.suppress(OSError, KeyError):  # no server, a closed stream, no working directory
        hand_over()
