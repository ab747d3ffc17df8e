"""Nodes of one machine: name spaces with a host name and a network of their own, joined by a bridge.

Each node has one interface, ``eth0``, whose other end is a port of the bridge. Nothing else reaches this network. Files
and processes are the machine's, and so are its cores, of which each node has one. It takes root's rights.

The first process of a name space ends with the test process, however that ends; the network goes with it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.world import delay

ADDRESS = "192.0.2.{}"  # reserved for documentation (RFC 5737)
MTU = "mtu 9000"  # bytes of a packet
SWITCH = "switch"


class Network:
    def __init__(self, size: int, *, delay_sec: float = 0.0) -> None:
        """``delay_sec``: of each node's cable. Raises PermissionError if this process may not make name spaces."""
        self.nodes = [f"n{number}" for number in range(1, size + 1)]
        self._hosts: dict[str, subprocess.Popen[str]] = {}
        self._directory = tempfile.TemporaryDirectory(prefix="ringtrain-network-")
        try:
            self._start(SWITCH)
            self.run(SWITCH, f"ip link add bridge {MTU} type bridge")
            self.run(SWITCH, "ip link set bridge up")
            for number, node in enumerate(self.nodes, 1):
                self._start(node)
                self._connect(node, delay_sec)
                self.run(node, f"ip address add {ADDRESS.format(number)}/24 dev eth0")
                self.run(node, "ip link set eth0 up")
                self.run(SWITCH, f"ip link set {node} master bridge up")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _connect(self, node: str, delay_sec: float) -> None:
        switch = self._hosts[SWITCH].pid
        if not delay_sec:
            self.run(node, f"ip link add eth0 {MTU} type veth peer name {node} {MTU} netns {switch}")
            return
        ends = [str(self._hosts[node].pid), "eth0", str(switch), node]
        self._begin(f"cable of {node}", [sys.executable, delay.__file__, str(delay_sec), *ends])
        self.run(node, f"ip link set eth0 {MTU}")
        self.run(SWITCH, f"ip link set {node} {MTU}")

    def close(self) -> None:
        for host in reversed(self._hosts.values()):
            host.kill()
            host.communicate()
        self._directory.cleanup()

    def run(self, host: str, command: str, *words: str) -> None:
        subprocess.run([*self.enter(host), *command.split(), *words], check=True)

    def enter(self, host: str) -> list[str]:
        """The command that runs another one on a host."""
        return ["nsenter", f"--target={self._hosts[host].pid}", "--net", "--uts"]

    def connect(self, node: str, state: str) -> None:
        """Plug the cable of a node in ("up"), or pull it out ("down")."""
        self.run(SWITCH, f"ip link set {node} {state}")

    def mpirun(self, ranks_per_node: int = 1) -> list[str]:
        """The command before that of the ranks; mpirun runs on the first node."""
        cores = sorted(os.sched_getaffinity(0))
        lines = ["#!/bin/sh", 'address=$1; shift; case "$address" in']
        hosts = {node: ADDRESS.format(number) for number, node in enumerate(self.nodes, 1)}
        on_node = {
            node: [*self.enter(node), "taskset", "--cpu-list", str(cores[number % len(cores)])]
            for number, node in enumerate(self.nodes)
        }
        lines += [f'{hosts[node]}) exec {" ".join(on_node[node])} sh -c "$*";;' for node in self.nodes]
        agent = Path(self._directory.name, "agent")
        agent.write_text("\n".join([*lines, "esac", ""]))
        agent.chmod(0o700)
        slots = ",".join(f"{address}:{ranks_per_node}" for address in hosts.values())
        remote = ["--mca", "plm_rsh_agent", str(agent), "--mca", "plm_rsh_no_tree_spawn", "1", "--host", slots]
        size = ["-np", str(ranks_per_node * len(hosts)), "--bind-to", "none"]
        return [*on_node[self.nodes[0]], "mpirun", *remote, *size]

    def _start(self, name: str) -> None:
        script = f"hostname {name} && ip link set lo up && echo ready && exec sleep infinity"
        self._begin(name, ["unshare", "--net", "--uts", "sh", "-c", script])

    def _begin(self, name: str, command: Sequence[str]) -> None:
        host = self._hosts[name] = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
        )
        assert host.stdout is not None
        if host.stdout.readline() != "ready\n":
            raise PermissionError(f"host {name} cannot be started: unshare(1) needs root")
