"""The star of connections: who proves to be a rank of the run is heard, and nothing else is."""

import contextlib
import json
import secrets
import select
import socket
import time
from collections.abc import Callable, Iterator

import pytest

from ringtrain.runtime.world import World
from ringtrain.watchdog import hub
from ringtrain.watchdog.hub import LOOPBACK, MAX_LINE_BYTES, Star, listen

TOKEN = secrets.token_hex(16)


def world(size: int, local_size: int) -> World:
    return World(rank=0, size=size, local_rank=0, local_size=local_size, node=socket.gethostname(), launcher="test")


@pytest.fixture
def center() -> Iterator[tuple[Star, int]]:
    listener, addresses = listen(world(3, 3))
    assert addresses == [LOOPBACK]
    star = Star(0)
    star.accept_from(listener, token=TOKEN, size=3)
    with contextlib.closing(star):
        yield star, listener.getsockname()[1]


def wait_for(stars: list[Star], is_there: Callable[[], bool], seconds: float = 5.0) -> list[tuple[int, object]]:
    came: list[tuple[int, object]] = []
    end = time.monotonic() + seconds
    while not is_there():
        assert time.monotonic() < end
        for star in stars:
            came += star.receive(0.01)
    return came


def test_ranks_hear_each_other_and_when_one_is_gone(center: tuple[Star, int]) -> None:
    middle, port = center
    one, two = Star(1), Star(2)
    one.connect_to([LOOPBACK], port, token=TOKEN)
    two.connect_to(["nowhere.invalid", LOOPBACK], port, token=TOKEN)
    wait_for([middle, one, two], lambda: middle.peers == [1, 2] and one.peers == [0] and two.peers == [0])
    one.send({"step": 1})
    two.send({"step": 2})
    middle.send({"hello": True})
    assert one.receive(0.1) == [(0, {"hello": True})]
    assert sorted(middle.receive(0.1), key=str) == [(1, {"step": 1}), (2, {"step": 2})]
    two.close()
    assert middle.receive(0.1) == [(2, None)]
    assert middle.peers == [1]
    one.close()


@pytest.mark.parametrize(
    "sent",
    [
        *[b"\n", b"hello\n", b"[1]\n", b"[" * 4000 + b"\n"],
        *[b'{"rank": 1, "proof": "x"}\n', b'{"rank": 0, "proof": "x"}\n'],
        b"x" * (MAX_LINE_BYTES + 1),
    ],
)
def test_an_unauthenticated_peer_is_ignored(center: tuple[Star, int], sent: bytes) -> None:
    middle, port = center
    with socket.create_connection((LOOPBACK, port), timeout=5) as stranger:
        stranger.sendall(sent)
        assert middle.receive(0.1) == []
        assert middle.peers == []
        with stranger.makefile("rb") as said:
            assert json.loads(said.readline()).keys() == {"nonce"}
            assert said.read() == b""


def test_another_runs_token_is_refused_by_both_ends(center: tuple[Star, int]) -> None:
    middle, port = center
    other = Star(1)
    other.connect_to([LOOPBACK], port, token=secrets.token_hex(16))
    assert middle.receive(0.1) == []
    assert other.receive(0.1) == []
    assert (middle.peers, other.peers) == ([], [])
    other.close()


def test_a_rank_is_taken_once(center: tuple[Star, int]) -> None:
    middle, port = center
    first, second = Star(1), Star(1)
    first.connect_to([LOOPBACK], port, token=TOKEN)
    wait_for([middle, first], lambda: first.peers == [0])
    second.connect_to([LOOPBACK], port, token=TOKEN)
    middle.receive(0.1)
    assert second.receive(0.1) == []
    assert second.peers == []
    first.close()
    second.close()


def test_a_peer_that_does_not_read_costs_no_memory_and_no_time(center: tuple[Star, int]) -> None:
    middle, port = center
    sleeper = Star(1)
    sleeper.connect_to([LOOPBACK], port, token=TOKEN)
    wait_for([middle, sleeper], lambda: middle.peers == [1])
    start = time.monotonic()
    for _ in range(20_000):
        middle.send({"text": "x" * 1000})
    assert time.monotonic() - start < 5
    assert len(middle._peers[1]._unsent) < 2000
    for word in ("stacks", "hang"):
        middle.send({"text": word})
    came: list[object] = []
    while came[-1:] != [(0, {"text": "hang"})]:
        assert time.monotonic() - start < 10
        middle.receive(0.01)
        came += sleeper.receive(0.01)
    assert came[-2] == (0, {"text": "stacks"}), "the last two messages are not lost"
    sleeper.close()


def test_a_wake_ends_a_pending_receive(center: tuple[Star, int]) -> None:
    middle, _ = center
    middle.wake()
    start = time.monotonic()
    assert middle.receive(30) == []
    assert time.monotonic() - start < 5


def test_on_several_hosts_all_addresses_of_rank_0_are_announced() -> None:
    listener, addresses = listen(world(4, 2))
    with listener:
        port = listener.getsockname()[1]
        assert addresses[0] == socket.gethostname()
        assert not any(address.startswith("127.") for address in addresses[1:])
        with socket.create_connection((LOOPBACK, port), timeout=5):
            pass


def test_an_unreachable_hub_is_an_error() -> None:
    star = Star(1)
    with pytest.raises(OSError, match="refused"):
        star.connect_to([LOOPBACK], 1, token=TOKEN)
    star.close()


def test_a_proof_does_not_hold_the_token_and_serves_once(center: tuple[Star, int]) -> None:
    """What rank 1 said to a stranger that took the place of rank 0, or that listened, lets nobody in."""
    middle, port = center
    star = Star(1)
    with socket.create_server((LOOPBACK, 0)) as listener:
        star.connect_to([LOOPBACK], listener.getsockname()[1], token=TOKEN)
        connection, _ = listener.accept()
        with connection:
            connection.sendall(b'{"nonce": "drawn by the stranger"}\n')
            star.receive(0.1)
            proof = connection.recv(4096)
    said = json.loads(proof)
    assert TOKEN not in json.dumps(said)
    assert said["rank"] == 1
    with socket.create_connection((LOOPBACK, port), timeout=5) as stranger:
        stranger.sendall(proof)
        middle.receive(0.1)
        assert middle.peers == []
    star.close()


def test_idle_strangers_block_no_rank_and_are_soon_dropped(
    center: tuple[Star, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    middle, port = center
    with contextlib.ExitStack() as open_ones:
        strangers = [
            open_ones.enter_context(socket.create_connection((LOOPBACK, port), timeout=5)) for _ in range(19)
        ]  # as many as three ranks allow for
        wait_for([middle], lambda: len(middle._strangers) == len(strangers))
        one = Star(1)
        one.connect_to([LOOPBACK], port, token=TOKEN)
        wait_for([middle, one], lambda: middle.peers == [1] and one.peers == [0])
        assert hub.PROVE_SECONDS <= 10
        monkeypatch.setattr(hub, "PROVE_SECONDS", 0.0)
        middle.receive(0.1)
        assert middle._strangers == []
        one.close()


def test_a_rank_that_is_not_heard_tries_again(center: tuple[Star, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else answers at the first address, who drops it, says nothing, or asks for something else."""
    middle, port = center
    monkeypatch.setattr(hub, "FIRST_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(hub, "PROVE_SECONDS", 0.2)
    one = Star(1)
    with socket.create_server((LOOPBACK, 0)) as listener:
        one.connect_to([LOOPBACK], listener.getsockname()[1], token=TOKEN)
        listener.accept()[0].close()
        wait_for([one], lambda: bool(select.select([listener], [], [], 0)[0]))
        silent, _ = listener.accept()
        wait_for([one], lambda: bool(select.select([listener], [], [], 0)[0]))
        silent.close()
    one._port = port  # as if rank 0 were heard again
    wait_for([middle, one], lambda: middle.peers == [1] and one.peers == [0])
    one.close()
