"""Clusters, and the time of an all-reduce on them.

The alpha-beta model: a message of m bytes takes alpha + m / beta. Ring: Patarasuk and Yuan 2009, "Bandwidth optimal
all-reduce algorithms for clusters of workstations". Tree: Sanders, Speck and Traeff 2009, "Two-tree algorithms for full
bandwidth broadcast, reduction and scan". Both are compared in Thakur, Rabenseifner and Gropp 2005, "Optimization of
collective communication operations in MPICH".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ringtrain.errors import UsageError

BYTES_PER_GBIT = 1e9 / 8
TCP_SHARE = 0.65  # of the rate that RDMA reaches
RULES = {
    "devices_per_node": (1, 1024, "usually 1 to 16"),
    "device_gbit": (0.001, 1e5, "in Gbit/s, usually 60 (PCIe) to 7200 (NVLink 5); 1 GB/s is 8 Gbit/s"),
    "device_latency_us": (0, 1e6, "in microseconds, usually 1 to 20"),
    "node_gbit": (0.001, 1e5, "in Gbit/s, usually 1 to 6400; 1 GB/s is 8 Gbit/s"),
    "node_latency_us": (0, 1e6, "in microseconds, usually 1 (InfiniBand) to 100 (TCP)"),
}


@dataclass(frozen=True)
class Link:
    """A device's or node's connection to its neighbour."""

    gbit: float
    """Gbit/s in each direction"""

    latency_us: float
    """microseconds of a message"""

    def ring(self, num_bytes: float, size: int) -> float:
        """Seconds of an all-reduce among ``size``."""
        sent = 2 * (size - 1) / size * num_bytes
        return 2 * (size - 1) * self.latency_us * 1e-6 + sent / (self.gbit * BYTES_PER_GBIT)

    def tree(self, num_bytes: float, size: int) -> float:
        """Seconds of an all-reduce among ``size``, by two binary trees."""
        return 2 * math.log2(size) * self.latency_us * 1e-6 + 2 * num_bytes / (self.gbit * BYTES_PER_GBIT)


def fit_link(times: Sequence[tuple[int, float]], size: int) -> Link | None:
    """Return the link by which a ring takes the measured (bytes, seconds): relative least squares; None: no fit."""
    import numpy as np  # so that help needs none

    design = [[2 * (size - 1) / sec, 2 * (size - 1) / size * num_bytes / sec] for num_bytes, sec in times]
    (latency_sec, sec_per_byte), *_ = np.linalg.lstsq(np.array(design), np.ones(len(design)), rcond=None)
    if min(latency_sec, sec_per_byte) <= 0:
        return None
    return Link(gbit=float(1 / (sec_per_byte * BYTES_PER_GBIT)), latency_us=float(latency_sec * 1e6))


@dataclass(frozen=True, kw_only=True)
class Cluster:
    devices_per_node: int = 8
    """GPUs of a node"""

    device_gbit: float = 2400.0
    """Gbit/s in each direction between the GPUs of a node"""

    device_latency_us: float = 5.0
    """microseconds of a message between them"""

    node_gbit: float = 1600.0
    """Gbit/s in each direction of all network ports of a node together"""

    node_latency_us: float = 10.0
    """microseconds of a message between nodes"""

    tcp: bool = False
    """the network is used by TCP, not by RDMA (InfiniBand, RoCE, EFA)"""

    def __post_init__(self) -> None:
        for name, (least, most, rule) in RULES.items():
            if not least <= getattr(self, name) <= most:
                raise UsageError(
                    f"cluster.{name} is {getattr(self, name)}; it must be from {least:g} to {most:g}, {rule}."
                )

    def all_reduce_sec(self, num_bytes: float, devices: int) -> float:
        """Two levels: a ring in each node, and a ring or tree among nodes, whichever takes less."""
        inside, nodes = min(devices, self.devices_per_node), -(-devices // self.devices_per_node)
        within, between = Link(self.device_gbit, self.device_latency_us), Link(self.node_gbit, self.node_latency_us)
        return within.ring(num_bytes, inside) + min(between.ring(num_bytes, nodes), between.tree(num_bytes, nodes))

    def scaled(self, share: float) -> Cluster:
        of_node = share * (TCP_SHARE if self.tcp else 1.0)
        return replace(self, device_gbit=self.device_gbit * share, node_gbit=self.node_gbit * of_node)


# Sources: user guides of NVIDIA DGX-1 (P100: NVLink 1, V100: NVLink 2, of which a ring uses half; 4 x 100 Gbit/s),
# DGX-2 (8 x 100 Gbit/s), DGX A100 (NVLink 3, 8 x 200 Gbit/s) and DGX H100 (NVLink 4, 8 x 400 Gbit/s); Amazon EC2 P4d
# (4 x 100 Gbit/s EFA); the cluster of Horovod's docs/benchmarks.rst (four GPUs on PCIe 3.0 x16, 25 Gbit/s).
PRESETS = {
    "dgxa100": Cluster(),
    "dgxh100": Cluster(device_gbit=3600, node_gbit=3200),
    "dgx1": Cluster(device_gbit=320, node_gbit=400),
    "dgx1v": Cluster(device_gbit=600, node_gbit=400),
    "dgx2": Cluster(devices_per_node=16, device_gbit=1200, node_gbit=800),
    "p4d": Cluster(node_gbit=400, node_latency_us=25),
    "roce25": Cluster(devices_per_node=4, device_gbit=100, node_gbit=25),
    "tcp25": Cluster(devices_per_node=4, device_gbit=100, node_gbit=25, node_latency_us=30, tcp=True),
    "tcp10": Cluster(devices_per_node=1, node_gbit=10, node_latency_us=30, tcp=True),
}
