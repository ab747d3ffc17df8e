"""The first process of a virtual host: it gives the host its name, network and mounts, and starts its daemons.

`tests.slurm.cluster` runs it in name spaces of its own. When this process ends, in whatever way, the kernel ends every
other process of the host with it and takes the mounts away, as when a machine loses its power.
"""

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ADDRESS = "192.0.2.1"  # reserved for documentation (RFC 5737)


def start_network() -> None:
    """An interface whose other end is here, too: nothing outside this name space reaches it.

    Loopback alone would not do. Open MPI connects hosts by other interfaces only, and Slurm looks names up for those
    kinds of addresses that a host has, where 127.0.0.1 does not count (getaddrinfo(3), AI_ADDRCONFIG).
    """
    for what in (
        "link set lo up",
        "link add eth0 type veth peer name eth1",
        "link set eth0 up",
        "link set eth1 up",
        f"address add {ADDRESS}/24 dev eth0",
    ):
        subprocess.run(["ip", *what.split()], check=True)


def mount(*arguments: str | Path) -> None:
    subprocess.run(["mount", *map(str, arguments)], check=True)


def start(command: Sequence[str | Path], log: Path) -> None:
    with log.open("ab") as file:
        subprocess.Popen(list(map(str, command)), stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)


def start_login(site: Path) -> None:
    """The host of the controller, from which users submit."""
    start_network()
    mount("--bind", site / "hosts", "/etc/hosts")
    files = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munged.pid", "seed-file": "munge.seed"}
    start(["munged", "--foreground", *(f"--{name}={site / file}" for name, file in files.items())], site / "munged.log")
    while not (site / "munge.socket").exists():  # cluster.py limits the time
        time.sleep(0.02)
    start(["slurmctld", "-D", "-c"], site / "slurmctld.log")


def start_node(site: Path, name: str) -> None:
    mount("-t", "tmpfs", "tmpfs", site / "tmp")
    mount("-t", "tmpfs", "tmpfs", "/dev/shm")
    start(["slurmd", "-D", "-N", name], site / name / "slurmd.log")


def main(name: str, site: Path) -> None:
    socket.sethostname(name)
    if name == "login":
        start_login(site)
    else:
        start_node(site, name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel lets no orphan become a zombie
    while True:
        signal.pause()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
