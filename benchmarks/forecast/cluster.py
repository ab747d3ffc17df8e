"""Clusters, and the time of an all-reduce on them.

The alpha-beta model: a message of m bytes takes alpha + m / beta. Ring: Patarasuk and Yuan 2009,
"Bandwidth optimal all-reduce algorithms for clusters of workstations". Tree: Sanders, Speck and
Traeff 2009, "Two-tree algorithms for full bandwidth broadcast, reduction and scan". Both are
compared in Thakur, Rabenseifner and Gropp 2005, "Optimization of collective communication
operations in MPICH".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.forecast.fields import (
    Choice,
    Field,
    Number,
    Source,
    Table,
    TrueOrFalse,
    read_fields,
    refuse_other_fields,
)
from benchmarks.writing import show_path
from ringtrain.errors import UsageError
from ringtrain.messages.rules import did_you_mean, shorten

BYTES_PER_GBIT = 1e9 / 8
TCP_SHARE = 0.65  # of the rate that RDMA reaches
FILE_ENDINGS = (".yaml", ".yml")
RATE = Number(least=0.001, most=100_000, hint="in Gbit/s; 1 GB/s is 8 Gbit/s")
LATENCY = Number(least=0, most=1_000_000, hint="in microseconds, usually 1 to 100")
FIELDS: Table = {
    "device": Field(Choice(("GPU", "CPU"))),
    "devices_per_node": Field(Number(least=1, most=1024, is_whole=True)),
    "device_gbit": Field(RATE),
    "device_latency_us": Field(LATENCY),
    "node_gbit": Field(RATE),
    "node_latency_us": Field(LATENCY),
    "tcp": Field(TrueOrFalse()),
}


@dataclass(frozen=True)
class Link:
    """A device's or node's connection to its neighbour."""

    gbit: float
    """Gbit/s in each direction"""

    latency_us: float
    """microseconds of a message"""

    def ring(self, num_bytes: float, size: int) -> float:
        """Return the seconds of an all-reduce among ``size``."""
        num_messages = 2 * (size - 1)
        sent_bytes = num_messages / size * num_bytes
        return num_messages * self.latency_us * 1e-6 + sent_bytes / (self.gbit * BYTES_PER_GBIT)

    def tree(self, num_bytes: float, size: int) -> float:
        """Return the seconds of an all-reduce among ``size``, by two binary trees."""
        num_messages = 2 * math.log2(size)
        sent_bytes = 2 * num_bytes
        return num_messages * self.latency_us * 1e-6 + sent_bytes / (self.gbit * BYTES_PER_GBIT)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The devices and links of a cluster whose nodes are equal."""

    device: str = "GPU"
    """GPU, or CPU: ranks on cores"""

    devices_per_node: int
    """GPUs of a node, or its ranks on cores"""

    device_gbit: float
    """Gbit/s in each direction between the devices of a node"""

    device_latency_us: float = 5.0
    """microseconds of a message between them"""

    node_gbit: float
    """Gbit/s in each direction of all network ports of a node together"""

    node_latency_us: float = 10.0
    """microseconds of a message between nodes"""

    tcp: bool = False
    """the network is used by TCP, not by RDMA (InfiniBand, RoCE, EFA), and node_gbit is its rate"""

    @property
    def device_words(self) -> str:
        """A word for several devices."""
        return "GPUs" if self.device == "GPU" else "ranks on cores"

    def all_reduce_sec(self, num_bytes: float, devices: int) -> float:
        """Return the seconds of a ring in each node, and a ring or tree among the nodes.

        Among the nodes, whichever takes less.
        """
        devices_in_node = min(devices, self.devices_per_node)
        nodes = math.ceil(devices / self.devices_per_node)
        within = Link(self.device_gbit, self.device_latency_us)
        between = Link(self.node_gbit, self.node_latency_us)
        between_sec = min(between.ring(num_bytes, nodes), between.tree(num_bytes, nodes))
        return within.ring(num_bytes, devices_in_node) + between_sec

    def scaled(self, share: float) -> Cluster:
        """Return the cluster whose links reach this share of their rates."""
        node_gbit = share * self.node_gbit
        if self.tcp:
            node_gbit *= TCP_SHARE
        return replace(self, device_gbit=share * self.device_gbit, node_gbit=node_gbit)

    def describe(self) -> str:
        """Return all numbers in a line."""
        protocol = f"TCP (at {TCP_SHARE:.0%} of this rate)" if self.tcp else "RDMA"
        return (
            f"nodes of {self.devices_per_node} {self.device_words}; {self.device_gbit:g} Gbit/s "
            f"and {self.device_latency_us:g} us a message between them; {self.node_gbit:g} Gbit/s "
            f"and {self.node_latency_us:g} us between nodes, by {protocol}"
        )


# Sources: user guides of NVIDIA DGX-1 (P100: NVLink 1, V100: NVLink 2, of which a ring uses half;
# 4 x 100 Gbit/s), DGX-2 (8 x 100 Gbit/s), DGX A100 (NVLink 3, 8 x 200 Gbit/s) and DGX H100
# (NVLink 4, 8 x 400 Gbit/s); Amazon EC2 P4d (4 x 100 Gbit/s EFA); the cluster of Horovod's
# docs/benchmarks.rst (four GPUs on PCIe 3.0 x16, 25 Gbit/s).
PRESETS: Mapping[str, Cluster] = {
    "dgxa100": Cluster(devices_per_node=8, device_gbit=2400, node_gbit=1600),
    "dgxh100": Cluster(devices_per_node=8, device_gbit=3600, node_gbit=3200),
    "dgx1": Cluster(devices_per_node=8, device_gbit=320, node_gbit=400),
    "dgx1v": Cluster(devices_per_node=8, device_gbit=600, node_gbit=400),
    "dgx2": Cluster(devices_per_node=16, device_gbit=1200, node_gbit=800),
    "p4d": Cluster(devices_per_node=8, device_gbit=2400, node_gbit=400, node_latency_us=25),
    "roce25": Cluster(devices_per_node=4, device_gbit=100, node_gbit=25),
    "tcp25": Cluster(devices_per_node=4, device_gbit=100, node_gbit=25, node_latency_us=30, tcp=True),
    "tcp10": Cluster(devices_per_node=1, device_gbit=2400, node_gbit=10, node_latency_us=30, tcp=True),
}


def find_cluster(name: str) -> Cluster:
    """Return a preset, or the cluster of a YAML file. Raises UsageError."""
    if name.endswith(FILE_ENDINGS):
        return read_cluster(Path(name))
    if name not in PRESETS:
        suggestion = did_you_mean(name, PRESETS)
        raise UsageError(
            f"cluster is {shorten(repr(name))}. {suggestion}Clusters: {', '.join(PRESETS)}, or a "
            "YAML file with the numbers of yours (docs/scaling.md)."
        )
    return PRESETS[name]


def read_cluster(path: Path) -> Cluster:
    """Read a file that has all fields of a cluster, and no other. Raises UsageError."""
    import yaml

    from ringtrain.run.directory import load_settings  # here, so that --help needs no NumPy

    shown = show_path(path)
    try:
        values = load_settings(path, follows_links=True)
    except OSError as error:
        reason = f"which cannot be read: {error.strerror}"
        raise UsageError(f"cluster is {shown}, {reason}. Check the path.") from None
    except (ValueError, yaml.YAMLError) as error:
        reason = shorten(" ".join(str(error).split()).rstrip("."))
        raise UsageError(f"{shown} is no YAML file of a cluster: {reason}. Correct it.") from None
    source = Source(name=shown, remedy="Correct the file (docs/scaling.md).", error=UsageError)
    if not isinstance(values, dict):
        raise source.refuse("it must hold the fields of a cluster, such as node_gbit: 100")
    refuse_other_fields(FIELDS, values, source)
    return Cluster(**read_fields(FIELDS, values, source))
