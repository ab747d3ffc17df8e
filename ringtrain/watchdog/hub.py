"""Communication between the watchdogs, independent of the collectives: a star of TCP connections to rank 0.

Messages are JSON objects, one a line, of bounded size; nothing that is received is executed. Both ends prove that they
know the run's token, which rank 0 draws and the ranks learn through the collective, and which never travels here: each
signs what the other has just drawn, so that no proof serves twice. Whoever proves nothing is dropped after seconds, or
for a newcomer if they are many; a rank that was not heard tries again.
"""

from __future__ import annotations

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
MORE_STRANGERS = 16  # than ranks may be connected at a time
LOOPBACK = "127.0.0.1"
SIOCGIFADDR = 0x8915  # netdevice(7)

Message = dict[str, Any]


def draw_token() -> str:
    """A random token that only the ranks of this run know."""
    return secrets.token_hex(16)


def listen(world: World) -> tuple[socket.socket, list[str]]:
    """Rank 0's listening socket, and the addresses at which the others may reach it: the first that answers is it."""
    is_one_node = world.local_size == world.size
    has_both = not is_one_node and socket.has_dualstack_ipv6()
    listener = socket.create_server(
        (LOOPBACK if is_one_node else "", 0),  # else all interfaces: which of them the others reach is theirs to say
        family=socket.AF_INET6 if has_both else socket.AF_INET,
        backlog=world.size + MORE_STRANGERS,
        dualstack_ipv6=has_both,
    )
    return listener, [LOOPBACK] if is_one_node else [world.node, *find_addresses()]


def find_addresses() -> list[str]:
    """The IPv4 addresses of this host's interfaces that are up, without the loopback."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no such address
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found.append(socket.inet_ntoa(answer[20:24]))
    return [address for address in found if not address.startswith("127.")]


class Star:
    """The connections of one rank: rank 0's to all others, or another's to rank 0. One thread uses it."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._token = b""
        self._peers: dict[int, _Peer] = {}
        self._strangers: list[_Peer] = []  # that have not proved yet who they are
        self._max_strangers = 0
        self._addresses: list[str] = []  # of rank 0, while this rank has to connect to it
        self._port = 0
        self._retry_at, self._retry_seconds = 0.0, FIRST_RETRY_SECONDS
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_writer, False)
        self._selector.register(self._wake_reader, selectors.EVENT_READ, self._wake_reader)

    @property
    def peers(self) -> list[int]:
        """The ranks that have proved to be there."""
        return sorted(self._peers)

    def wake(self) -> None:
        """Let ``receive`` return at once; any thread may call it."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_writer, b"\0")

    def accept_from(self, listener: socket.socket, *, token: str, size: int) -> None:
        """Be the middle of the star: take the connections of ``size - 1`` others."""
        self._token, self._max_strangers = token.encode(), size + MORE_STRANGERS
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, listener)

    def connect_to(self, addresses: Sequence[str], port: int, *, token: str) -> None:
        """Connect to rank 0, at the first of its addresses that answers; by ``receive`` again, until it is proved."""
        self._token, self._addresses, self._port = token.encode(), list(addresses), port
        self._connect(CONNECT_SECONDS)

    def _connect(self, seconds: float) -> None:
        self._retry_at = time.monotonic() + self._retry_seconds
        self._retry_seconds = min(2 * self._retry_seconds, LONGEST_RETRY_SECONDS)
        failure = OSError("no address was given")
        for _ in list(self._addresses):
            address = self._addresses.pop(0)
            self._addresses.append(address)  # the next one is tried first where this one is not rank 0's
            try:
                self._add_stranger(_Peer(socket.create_connection((address, self._port), timeout=seconds)))
                return
            except OSError as error:
                failure = error
        raise failure

    def receive(self, seconds: float) -> list[tuple[int, Message | None]]:
        """Messages that arrive within this time, with their ranks; None: a connection has ended."""
        came: list[tuple[int, Message | None]] = []
        end = time.monotonic() + seconds
        while True:
            is_woken = False
            for key, _ in self._selector.select(max(0.0, end - time.monotonic())):
                if key.data is self._wake_reader:
                    os.read(self._wake_reader, 64)
                    is_woken = True
                elif isinstance(key.data, socket.socket):
                    self._accept(key.data)
                elif key.data.socket.fileno() >= 0:  # else it was dropped for a newcomer
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
        """A proof that ``rank``, which drew ``drawn``, knows the token, for the one that drew ``asked``."""
        return hmac.new(self._token, f"rank {rank}, {asked}, {drawn}".encode(), hashlib.sha256).hexdigest()

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        if len(self._strangers) >= self._max_strangers:
            self._drop(self._strangers[0])  # who has had the longest time to prove something
        peer = _Peer(connection)
        peer.send(_encode({"nonce": peer.nonce}))
        self._add_stranger(peer)

    def _add_stranger(self, peer: _Peer) -> None:
        self._strangers.append(peer)
        self._selector.register(peer.socket, selectors.EVENT_READ, peer)

    def _read(self, peer: _Peer) -> list[tuple[int, Message | None]]:
        """The messages of a peer; those of a stranger count from its proof on."""
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
        """True if a stranger may stay: it is taken for the rank that it says it is, once it proves to know the token.

        Rank 0 sends what it has drawn; the other signs that, and sends what it has drawn itself; rank 0 signs it.
        """
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
    """One connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.rank: int | None = None
        self.nonce = secrets.token_hex(16)  # for the other end to sign
        self.asked = ""  # by the other end, to be signed by this one
        self.since = time.monotonic()
        self._received, self._unsent = b"", b""
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def read(self) -> list[Message] | None:
        """Messages that have arrived; None if the connection has ended, or sent no message."""
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
        """Send a message without waiting. Of what a peer does not take, no more than one is kept: news replace news."""
        if not self._flush():
            return
        self._unsent = data
        self._flush()

    def _flush(self) -> bool:
        """Send what is left; whether nothing is."""
        while self._unsent:
            try:
                self._unsent = self._unsent[self.socket.send(self._unsent) :]
            except BlockingIOError:
                return False
            except OSError:  # reading tells
                self._unsent = b""
        return True
