"""Where all ranks are on one node, nobody else can connect to them."""

import ipaddress
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.world.running import running

LISTENING = "0A"  # proc(5), /proc/net/tcp
MPIRUN = ["mpirun", "-np", "2", "--oversubscribe", sys.executable, "-m", "ringtrain"]
LAUNCH = [sys.executable, "-m", "launch", "local", "-np", "2"]


def listening(pid: int) -> set[str]:
    """The addresses at which a process takes connections."""
    sockets = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            sockets.add(os.readlink(descriptor))
        except OSError:
            continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING and f"socket:[{fields[9]}]" in sockets:
                words = re.findall("." * 8, fields[1].partition(":")[0])  # of 32 bits, the last byte first
                found.add(str(ipaddress.ip_address(b"".join(bytes.fromhex(word)[::-1] for word in words))))
    return found


@pytest.mark.parametrize(
    ("start", "also"),
    [
        pytest.param(MPIRUN, [], id="mpirun"),
        pytest.param([*LAUNCH, "--"], [], id="launch", marks=pytest.mark.slow),
        pytest.param([*LAUNCH, "--controller", "gloo", "--"], ["horovodrun"], id="launch over Gloo"),
    ],
)
def test_ranks_of_one_node_listen_on_the_loopback_alone(start: Sequence[str], also: list[str], tmp_path: Path) -> None:
    with running(tmp_path / "run", "--epochs", "1000", "--eval_every_epochs", "1000", start=start) as run:
        run.wait_for_step(5)
        pids = [run.rank_pid(0), run.rank_pid(1), *(pid for program in also for pid in run.pids_of(program))]
        heard = {pid: listening(pid) for pid in pids}
        (tmp_path / "run/stop").touch()  # if killed, horovodrun leaves its semaphores in /dev/shm
        assert run.wait() == 75, run.text()
    assert len(pids) >= 2 + len(also)
    assert heard[pids[0]]  # the watchdog's
    assert {address for addresses in heard.values() for address in addresses} <= {"127.0.0.1", "::1"}


def test_a_listener_on_all_interfaces_is_seen() -> None:
    import socket

    with socket.create_server(("", 0)), socket.create_server(("127.0.0.1", 0)):
        assert {"0.0.0.0", "127.0.0.1"} <= listening(os.getpid())
