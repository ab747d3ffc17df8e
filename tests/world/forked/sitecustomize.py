"""Let the fork server of the tests run this program; if it refuses, start as usual.

This directory is on the PYTHONPATH of what the tests start. This process stays as the stand-in of the forked one: it
forwards signals and exits with the same code; if it is killed, the forked process is killed too.

It imports no more than it needs: json, signal and socket would take as long as the rest of its start.
"""

import sys


def is_program(words):  # type: ignore[no-untyped-def]
    """True for scripts, horovodrun and modules that import TensorFlow; False for all else, such as ``-c`` and pip."""
    is_module = len(words) > 1 and words[0] == "-m"
    is_known = is_module and (words[1] in ("ringtrain", "ringtrain.doctor.inside") or words[1].startswith("tests."))
    return is_known or (bool(words) and words[0].endswith((".py", "/horovodrun")))


def describe_start():  # type: ignore[no-untyped-def]
    """Everything that this process was started with."""
    import _signal as signal  # type: ignore[import-not-found]
    import os
    import resource

    forwarded = {signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}
    forwarded |= {signal.SIGCONT, signal.SIGWINCH}
    umask = os.umask(0o22)
    os.umask(umask)
    with open("/proc/self/cgroup") as file:
        cgroup = file.read()
    return {
        "argv": sys.orig_argv,
        "executable": sys.executable,
        "environ": dict(os.environ),
        "cwd": os.getcwd(),
        "pid": os.getpid(),
        "cores": sorted(os.sched_getaffinity(0)),
        "policy": os.sched_getscheduler(0),
        "umask": umask,
        "forwarded": [number for number in forwarded if signal.getsignal(number) != signal.SIG_IGN],
        "ignored": [number for number in forwarded if signal.getsignal(number) == signal.SIG_IGN],
        "namespaces": [os.stat(f"/proc/self/ns/{name}").st_ino for name in ("net", "mnt", "pid", "ipc")],
        "cgroup": cgroup,
        "limits": [resource.getrlimit(number) for number in range(16)],  # RLIM_NLIMITS
    }


def request_fork():  # type: ignore[no-untyped-def]
    """The forked process' pid, the signals to forward to it, and the connection on which its end is reported.

    The pid is None if the server refuses.
    """
    import _socket as socket
    import marshal
    import os

    start = describe_start()
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(os.path.join(os.environ["RINGTRAIN_TEST_FORK_SERVERS"], os.uname().nodename))
    streams = b"".join(number.to_bytes(4, sys.byteorder) for number in (0, 1, 2))
    connection.sendmsg([marshal.dumps(start)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
    answer = connection.recv(1 << 16)
    return marshal.loads(answer)["pid"] if answer else None, start["forwarded"], connection


def stand_in_for(pid, forwarded, connection):  # type: ignore[no-untyped-def]
    """Forward signals to a forked process, and end as it does."""
    import _signal as signal
    import marshal
    import os
    import resource

    def forward(number, frame):  # type: ignore[no-untyped-def]
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return  # it has ended, which will be reported

    for number in forwarded:
        signal.signal(number, forward)
    with open("/proc/self/comm", "w") as file:
        file.write("stand-in")  # tests that look for ranks ignore it
    answer = connection.recv(1 << 16)
    end = marshal.loads(answer) if answer else {"signal": signal.SIGKILL}  # the server has ended, and what it forked
    if "signal" in end:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if end["signal"] != signal.SIGKILL:
            signal.signal(end["signal"], signal.SIG_DFL)
        os.kill(os.getpid(), end["signal"])
    os._exit(end["code"])


if is_program(sys.orig_argv[1:]):
    try:
        _fork = request_fork()
    except (OSError, KeyError):  # no server, a closed stream, no working directory
        _fork = None
    if _fork and _fork[0] is not None:
        stand_in_for(*_fork)
