"""Communication between watchdogs, independent of collectives: TCP connections of all ranks to rank 0.

Messages are JSON lines of bounded size; nothing received is executed. Both ends prove knowledge of the run's token,
which rank 0 sends by the collective, never here: each signs the other's fresh nonce, against replays. Unproven peers
are dropped after seconds, or if too many; dropped ranks retry.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import hashlib
import hmac
import json
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ringtrain.runtime.world import World

MAX_LINE_BYTES = 8192
CONNECT_SECONDS, RETRY_CONNECT_SECONDS = 5.0, 1.0
PROVE_SECONDS = 5.0
FIRST_RETRY_SECONDS, LONGEST_RETRY_SECONDS = 0.5, 30.0
MAX_WAITING = 2  # messages to a peer that does not read: a rank's stacks, and why it ends
MORE_STRANGERS = 16  # connections beyond the number of ranks
LOOPBACK = "127.0.0.1"
SIOCGIFADDR = 0x8915  # netdevice(7)

Message = dict[str, Any]


def listen(world: World) -> tuple[socket.socket, list[str]]:
    """Return a socket and its addresses; other ranks use the first that answers."""
    is_one_node = world.local_size == world.size
    has_both = not is_one_node and socket.has_dualstack_ipv6()
    listener = socket.create_server(
        (LOOPBACK if is_one_node else "", 0),  # all interfaces: the other ranks choose
        family=socket.AF_INET6 if has_both else socket.AF_INET,
        backlog=world.size + MORE_STRANGERS,
        dualstack_ipv6=has_both,
    )
    return listener, [LOOPBACK] if is_one_node else [world.node, *find_addresses()]


def find_addresses() -> list[str]:
    """IPv4 addresses of interfaces that are up, without loopback."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found.append(socket.inet_ntoa(answer[20:24]))
    return [address for address in found if not address.startswith("127.")]


class Star:
    """Connections of one rank, used by one thread: rank 0's to all others, or another's to rank 0."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._token = b""
        self._peers: dict[int, _Peer] = {}
        self._strangers: list[_Peer] = []  # not authenticated yet
        self._max_strangers = 0
        self._addresses: list[str] = []
        self._port = 0
        self._retry_at, self._retry_seconds = 0.0, FIRST_RETRY_SECONDS
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_writer, False)
        self._selector.register(self._wake_reader, selectors.EVENT_READ, self._wake_reader)

    @property
    def peers(self) -> list[int]:
        return sorted(self._peers)

    def wake(self) -> None:
        """Make ``receive`` return; thread-safe."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_writer, b"\0")

    def accept_from(self, listener: socket.socket, *, token: str, size: int) -> None:
        self._token, self._max_strangers = token.encode(), size + MORE_STRANGERS
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, listener)

    def connect_to(self, addresses: Sequence[str], port: int, *, token: str) -> None:
        """Connect to the first address that answers; ``receive`` retries until authenticated."""
        self._token, self._addresses, self._port = token.encode(), list(addresses), port
        self._connect(CONNECT_SECONDS)

    def _connect(self, seconds: float) -> None:
        self._retry_at = time.monotonic() + self._retry_seconds
        self._retry_seconds = min(2 * self._retry_seconds, LONGEST_RETRY_SECONDS)
        failure = OSError("no address was given")
        for _ in list(self._addresses):
            address = self._addresses.pop(0)
            self._addresses.append(address)  # next attempt: another address, as this host may not be rank 0's
            try:
                self._add_stranger(_Peer(socket.create_connection((address, self._port), timeout=seconds)))
                return
            except OSError as error:
                failure = error
        raise failure

    def receive(self, seconds: float) -> list[tuple[int, Message | None]]:
        """Return (rank, message) pairs within ``seconds``; None: the connection has ended."""
        came: list[tuple[int, Message | None]] = []
        end = time.monotonic() + seconds
        for peer in self._peers.values():
            peer.flush()
        while True:
            is_woken = False
            for key, _ in self._selector.select(max(0.0, end - time.monotonic())):
                if key.data is self._wake_reader:
                    os.read(self._wake_reader, 64)
                    is_woken = True
                elif isinstance(key.data, socket.socket):
                    self._accept(key.data)
                elif key.data.socket.fileno() >= 0:  # else dropped for a newer one
                    came += self._read(key.data)
            if is_woken or time.monotonic() >= end:
                break
        for peer in [peer for peer in self._strangers if time.monotonic() - peer.since > PROVE_SECONDS]:
            self._drop(peer)
        if self._addresses and not self._strangers and time.monotonic() >= self._retry_at:
            with contextlib.suppress(OSError):
                self._connect(RETRY_CONNECT_SECONDS)
        return came

    def send(self, message: Mapping[str, Any]) -> None:
        data = _encode(message)
        for peer in self._peers.values():
            peer.send(data)

    def close(self) -> None:
        for key in list(self._selector.get_map().values()):
            if key.data is not self._wake_reader:
                (key.data.socket if isinstance(key.data, _Peer) else key.data).close()
        self._selector.close()
        os.close(self._wake_reader)
        os.close(self._wake_writer)

    def _proof(self, rank: int, *, asked: str, drawn: str) -> str:
        """Prove to the drawer of ``asked`` that ``rank``, which drew ``drawn``, knows the token."""
        return hmac.new(self._token, f"rank {rank}, {asked}, {drawn}".encode(), hashlib.sha256).hexdigest()

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        if len(self._strangers) >= self._max_strangers:
            self._drop(self._strangers[0])
        peer = _Peer(connection)
        peer.send(_encode({"nonce": peer.nonce}))
        self._add_stranger(peer)

    def _add_stranger(self, peer: _Peer) -> None:
        self._strangers.append(peer)
        self._selector.register(peer.socket, selectors.EVENT_READ, peer)

    def _read(self, peer: _Peer) -> list[tuple[int, Message | None]]:
        """Read messages; those before authentication are not returned."""
        messages = peer.read()
        came: list[tuple[int, Message | None]] = []
        for message in messages or []:
            if peer.rank is not None:
                came.append((peer.rank, message))
            elif not self._is_welcome(peer, message):
                messages = None
                break
        if messages is None:
            self._drop(peer)
            if peer.rank is not None:
                came.append((peer.rank, None))
        return came

    def _is_welcome(self, peer: _Peer, message: Message) -> bool:
        """Authenticate: rank 0 sends a nonce; the other signs it and sends its own, which rank 0 signs."""
        if self._rank != 0 and not peer.asked:
            peer.asked = str(message.get("nonce"))
            self._send_proof(peer)
            return True
        if self._rank == 0:
            peer.asked = str(message.get("nonce"))
        rank = message.get("rank")
        expected = rank != 0 if self._rank == 0 else rank == 0
        if type(rank) is not int or not expected or rank in self._peers:
            return False
        proof = self._proof(rank, asked=peer.nonce, drawn=peer.asked)
        if not hmac.compare_digest(str(message.get("proof")).encode(), proof.encode()):
            return False
        self._strangers.remove(peer)
        peer.rank = rank
        self._peers[rank] = peer
        self._addresses = []
        if self._rank == 0:
            self._send_proof(peer)
        return True

    def _send_proof(self, peer: _Peer) -> None:
        proof = self._proof(self._rank, asked=peer.asked, drawn=peer.nonce)
        peer.send(_encode({"rank": self._rank, "nonce": peer.nonce, "proof": proof}))

    def _drop(self, peer: _Peer) -> None:
        self._selector.unregister(peer.socket)
        peer.socket.close()
        if peer.rank is None:
            self._strangers.remove(peer)
        else:
            del self._peers[peer.rank]


def _encode(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


class _Peer:
    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.rank: int | None = None
        self.nonce = secrets.token_hex(16)  # the other end signs it
        self.asked = ""  # nonce of the other end
        self.since = time.monotonic()
        self._received, self._unsent = b"", b""
        self._waiting: collections.deque[bytes] = collections.deque(maxlen=MAX_WAITING)
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def read(self) -> list[Message] | None:
        """Return None if the connection has ended, or sent no valid message."""
        try:
            data = self.socket.recv(65536)
        except BlockingIOError:
            return []
        except OSError:
            return None
        *lines, self._received = (self._received + data).split(b"\n")
        if not data or any(len(line) > MAX_LINE_BYTES for line in (*lines, self._received)):
            return None
        try:
            messages = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):
            return None
        return messages if all(isinstance(message, dict) for message in messages) else None

    def send(self, data: bytes) -> None:
        """Send without blocking; of the messages for a peer that does not read, the newest are kept."""
        self._waiting.append(data)
        self.flush()

    def flush(self) -> None:
        while self._unsent or self._waiting:
            self._unsent = self._unsent or self._waiting.popleft()
            try:
                self._unsent = self._unsent[self.socket.send(self._unsent) :]
            except BlockingIOError:
                return
            except OSError:  # the next read reports it
                self._unsent = b""
                self._waiting.clear()
