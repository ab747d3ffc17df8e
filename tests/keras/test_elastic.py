"""Elastic training: ranks are killed, join and leave, and the others continue with the same state."""

import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import keras
import numpy as np
import pytest

import ringtrain.keras as hvd
from ringtrain.collectives import Collective
from ringtrain.errors import RingtrainError, UsageError
from ringtrain.keras import elastic
from tests.world.group import on_ranks
from tests.world.processes import MarkedProcess, clean_environment

HOSTS = ("localhost", socket.gethostname(), "127.0.0.1")  # three names of one: that of a killed rank is not used again
START_SECONDS, CHANGE_SECONDS, END_SECONDS = 120, 90, 60
STEPS = 7  # of an epoch, in elastic.py


def make_model(value: float) -> keras.Model:
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(2, activation="softmax")])
    model.set_weights([np.full([2, 2], value, np.float32), np.full([2], value, np.float32)])
    return model


@on_ranks(2)
def test_a_state_is_synchronised_committed_and_restored(collective: Collective) -> None:
    """What Horovod's own test_elastic_state asks, with Keras 3's optimizers."""
    rank = collective.world.rank
    first, second = make_model(1.0 + rank), make_model(1.0 - rank)
    optimizer = keras.optimizers.Adam(0.001 * (1 + rank))
    state = hvd.elastic.KerasState(first, optimizer, batch=20 + rank, epoch=10 + rank)
    state.sync()
    ones = make_model(1.0).get_weights()
    assert_weights(first, ones)
    assert float(optimizer.learning_rate.numpy()) == np.float32(0.001)
    assert (state.batch, state.epoch) == (20, 10)

    first.set_weights(make_model(2.0).get_weights())
    state.batch, state.epoch = 21, 11
    state.restore()
    assert_weights(first, ones)
    assert (state.batch, state.epoch) == (20, 10)

    first.set_weights(second.get_weights())
    state.batch, state.epoch = 21 + rank, 11 + rank
    state.commit()
    first.set_weights(ones)
    state.restore()
    assert_weights(first, second.get_weights())
    assert (state.batch, state.epoch) == (21 + rank, 11 + rank)
    state.sync()
    assert_weights(first, ones)
    assert (state.batch, state.epoch) == (21, 11)


def assert_weights(model: keras.Model, expected: list[np.ndarray]) -> None:
    for weight, value in zip(model.get_weights(), expected, strict=True):
        np.testing.assert_array_equal(weight, value)


def test_ranks_that_cannot_join_again_end_with_a_message() -> None:
    """Once more is tried, as another rank may have been lost meanwhile."""
    with mock.patch.object(elastic, "hvd") as horovod:
        horovod.init.side_effect = [RuntimeError("timed out"), None]
        elastic.rejoin()
        horovod.init.side_effect = RuntimeError("Gloo timed out")
        with pytest.raises(RingtrainError, match=r"could not join the others again .*RuntimeError: Gloo timed out"):
            elastic.rejoin()
        assert horovod.shutdown.call_count == horovod.init.call_count == 4


@on_ranks(2)
def test_a_state_without_weights_is_refused(collective: Collective) -> None:
    with pytest.raises(UsageError, match="has no weights before its first step"):
        hvd.elastic.KerasState(keras.Sequential([keras.layers.Dense(1)]), keras.optimizers.SGD())
    with pytest.raises(UsageError, match="has no optimizer"):
        hvd.elastic.KerasState(make_model(1.0))
    state = hvd.elastic.KerasState(make_model(1.0), keras.optimizers.SGD(), batch=0)
    with pytest.raises(UsageError, match=r"keeps state.epoch, which the state has not. Make it with KerasState\(model"):
        hvd.elastic.UpdateEpochStateCallback(state)


class Run:
    """Elastic ranks under ``horovodrun``, of hosts that the test names."""

    def __init__(self, directory: Path, hosts: tuple[str, ...], *options: str) -> None:
        self.directory = directory
        self.set_hosts(*hosts)
        discovery = directory / "discover.sh"
        discovery.write_text(f"#!/bin/sh\ncat {directory}/hosts\n")
        discovery.chmod(0o755)
        launcher = ["horovodrun", "--gloo", "-np", str(len(hosts)), "--network-interfaces", "lo", *options]
        script = [sys.executable, str(Path(__file__).with_name("elastic.py")), str(directory)]
        with (directory / "output").open("wb") as output:
            self.process = MarkedProcess(
                [*launcher, "--host-discovery-script", str(discovery), *script],
                clean_environment(PYTHONPATH=str(Path(__file__).parents[2]), TF_CPP_MIN_LOG_LEVEL="3"),
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def set_hosts(self, *hosts: str) -> None:
        text = self.directory / "hosts.new"
        text.write_text("".join(f"{host}:1\n" for host in hosts))
        text.rename(self.directory / "hosts")

    @property
    def output(self) -> str:
        return (self.directory / "output").read_text(errors="replace")

    def pid_at(self, host: str) -> int:
        """The process of the rank that was started on a host."""
        return next(
            pid
            for pid in self.process.pids()
            if b"elastic.py" in (command := Path(f"/proc/{pid}/cmdline").read_bytes()).split(b"\0")[1:][0]
            and not command.startswith((b"/bin/sh", b"sh"))
            and f"HOROVOD_HOSTNAME={host}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        )

    def await_training(self, size: int, seconds: float) -> None:
        """Wait for a step of so many ranks that is yet to come."""
        sign = self.directory / f"size-{size}"
        sign.unlink(missing_ok=True)
        self.wait_until(sign.exists, seconds)

    def wait_until(self, is_there: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while not is_there():
            assert time.monotonic() < end, self.output
            assert self.process.popen.poll() is None, self.output
            time.sleep(0.05)

    def wait(self, seconds: float) -> int:
        return self.process.popen.wait(seconds)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def begin(*arguments: object) -> Run:
        runs.append(Run(tmp_path, *arguments))  # type: ignore[arg-type]
        return runs[-1]

    yield begin
    for run in runs:
        run.process.end()


@pytest.mark.slow
def test_a_rank_is_killed_and_hosts_come_and_go(start: Callable[..., Run]) -> None:
    run = start(HOSTS[:2], "--min-np", "1")
    run.await_training(2, START_SECONDS)
    subprocess.run(["kill", "-9", str(run.pid_at(HOSTS[1]))], check=True)
    run.set_hosts(HOSTS[0])
    run.await_training(1, CHANGE_SECONDS)
    assert re.search(r"rank \d lost another: it restores its last commit", run.output), run.output
    run.set_hosts(HOSTS[0], HOSTS[2])
    run.await_training(2, CHANGE_SECONDS)
    run.set_hosts(HOSTS[0])
    run.await_training(1, CHANGE_SECONDS)
    run.set_hosts(HOSTS[0], HOSTS[2])
    run.await_training(2, CHANGE_SECONDS)
    (run.directory / "end").touch()
    code = run.wait(END_SECONDS)
    output = run.output
    assert code == 0, output

    begins = re.findall(r"begins as rank (\d) of (\d): (\d+) (\d+) (\d+) (\w+)", output)
    assert [size for rank, size, *_ in begins if rank == "0"] == ["2", "1", "2", "1", "2"], output
    iterations = [int(each[4]) for each in begins]
    assert iterations == sorted(iterations), f"nothing was lost before the last commit\n{output}"
    for rank, _, epoch, batch, iteration, _ in begins:
        assert int(iteration) == int(epoch) * STEPS + int(batch), f"rank {rank} repeats or leaves out steps\n{output}"
    by_iteration = {each[4]: each[5] for each in begins}
    for _, _, _, _, iteration, digest in begins:
        assert digest == by_iteration[iteration], f"the ranks begin with other states\n{output}"
    ends = re.findall(r"ends as rank \d of 2: (\d+) (\d+) (\d+) (\w+)", output)
    assert len(ends) == 2
    assert len(set(ends)) == 1, output


@pytest.mark.slow
def test_too_few_ranks_end_with_a_message(start: Callable[..., Run]) -> None:
    run = start(HOSTS[:2], "--min-np", "2", "--elastic-timeout", "15")
    run.await_training(2, START_SECONDS)
    subprocess.run(["kill", "-9", str(run.pid_at(HOSTS[1]))], check=True)
    run.set_hosts(HOSTS[0])
    code = run.wait(CHANGE_SECONDS)
    assert code != 0
    assert "Timed out waiting" in run.output, run.output
