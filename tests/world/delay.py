"""A cable that delays what passes it: two TAP interfaces, and a process that carries the packets from one to the other.

Usage: delay.py SECONDS PID NAME PID NAME; each PID is a process of the network name space that has the interface NAME.

Kernels without netem have no other way. Segments stay as large as TCP makes them (IFF_VNET_HDR), so that few packets
pass this process.
"""

import collections
import contextlib
import ctypes
import fcntl
import os
import select
import struct
import sys
import time

TUNSETIFF, TUNSETOFFLOAD, TUNSETVNETHDRSZ = 0x400454CA, 0x400454D0, 0x400454D8  # linux/if_tun.h
IFF_TAP, IFF_NO_PI, IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4 = 0x01, 0x02
CLONE_NEWNET = 0x40000000
HEADER_BYTES, MAX_BYTES = 10, 2**17
PACKETS = 16  # that are read before others are delivered


def open_tap(pid: str, name: str) -> int:
    with open(f"/proc/{pid}/ns/net") as space:
        if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI | IFF_VNET_HDR))
    fcntl.ioctl(tap, TUNSETVNETHDRSZ, struct.pack("i", HEADER_BYTES))
    fcntl.ioctl(tap, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)
    return tap


def carry(seconds: float, taps: tuple[int, int]) -> None:
    on_the_way: collections.deque[tuple[float, int, bytes]] = collections.deque()
    while True:
        timeout = max(0.0, on_the_way[0][0] - time.monotonic()) if on_the_way else None
        for tap in select.select(taps, [], [], timeout)[0]:
            with contextlib.suppress(BlockingIOError):
                for _ in range(PACKETS):
                    packet = os.read(tap, MAX_BYTES)
                    on_the_way.append((time.monotonic() + seconds, taps[tap == taps[0]], packet))
        while on_the_way and on_the_way[0][0] <= time.monotonic():
            _, other, packet = on_the_way.popleft()
            with contextlib.suppress(OSError):  # the interface is down, or its queue is full: the packet is lost
                os.write(other, packet)


if __name__ == "__main__":
    ends = (open_tap(*sys.argv[2:4]), open_tap(*sys.argv[4:6]))
    print("ready", flush=True)
    carry(float(sys.argv[1]), ends)
