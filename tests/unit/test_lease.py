"""The lease of a run directory: one writer at a time, none that is gone stands in the way, a late one notices."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ringtrain.errors import RingtrainError, UsageError
from ringtrain.messages.log import show_log
from ringtrain.run import lease as lease_module
from ringtrain.run.lease import LEASE_DIRECTORY, Lease, LeaseLostError, acquire_lease, is_held, take_over

HERE = f"process {os.getpid()} on {socket.gethostname()}"

# Tries to get the lease at the word, says how that went, and keeps what it got until its input ends.
HOLDER = """
import sys
from pathlib import Path
from ringtrain.errors import UsageError
from ringtrain.run.lease import acquire_lease

print("ready", flush=True)
sys.stdin.readline()
try:
    lease = acquire_lease(Path(sys.argv[1]), environ={"SLURM_JOB_ID": "42"})
except UsageError as error:
    print("refused", error, flush=True)
    sys.exit()
print("holds", lease.number, flush=True)
sys.stdin.read()
lease.check()
lease.close()
"""


class Process:
    """Another process that wants the lease."""

    def __init__(self, run: Path) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(run)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.pid = self.popen.pid

    def read(self) -> str:
        assert self.popen.stdout is not None
        return self.popen.stdout.readline().strip()

    def go(self) -> None:
        assert self.popen.stdin is not None
        print(file=self.popen.stdin, flush=True)

    def hold(self) -> int:
        """Get the lease; returns its number."""
        assert self.read() == "ready"
        self.go()
        word, number = self.read().split()
        assert word == "holds"
        return int(number)

    def end(self) -> None:
        _, complaint = self.popen.communicate(timeout=20)
        assert (self.popen.returncode, complaint) == (0, "")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    started: list[Process] = []

    def begin() -> Process:
        started.append(Process(tmp_path))
        return started[-1]

    yield begin
    for process in started:
        process.popen.kill()
        process.popen.communicate()


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(lease_module, "EXPIRY_SECONDS", 0.6)


def acquire(run: Path, said: list[str] | None = None) -> Lease:
    with show_log((said if said is not None else []).append):
        return acquire_lease(run, environ={})


def lease_file(run: Path) -> Path:
    """The newest holder's file."""
    return max(path for path in (run / LEASE_DIRECTORY).iterdir() if path.name.isdigit())


def rewrite(file: Path, **values: Any) -> None:
    """Change what a lease file says, at the same time stamp."""
    stamp = file.stat().st_mtime_ns
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
    os.utime(file, ns=(stamp, stamp))


# --- One at a time ---


def test_of_many_that_start_together_exactly_one_gets_it(tmp_path: Path, start: Any) -> None:
    processes = [start() for _ in range(6)]
    assert [process.read() for process in processes] == ["ready"] * 6
    for process in processes:
        process.go()
    answers = {process.pid: process.read() for process in processes}
    (winner,) = (pid for pid, answer in answers.items() if answer.startswith("holds"))
    for pid, answer in answers.items():
        if pid != winner:
            assert answer.startswith(
                f"refused the run directory {str(tmp_path)!r} is being written by process {winner}"
            )
            assert f"process {winner} on {socket.gethostname()}, job 42. Wait until" in answer
            assert "--out" in answer


def test_one_of_many_threads_holds_it_and_numbers_never_repeat(tmp_path: Path) -> None:
    begin = threading.Barrier(4)
    holding: list[int] = []
    seen: list[list[int]] = []

    def take_turns() -> None:
        begin.wait()
        turns = 0
        while turns < 8:
            try:
                lease = acquire(tmp_path)
            except UsageError:
                continue
            turns += 1
            holding.append(lease.number)
            seen.append(list(holding))
            lease.check()
            holding.remove(lease.number)
            lease.close()

    threads = [threading.Thread(target=take_turns) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [[number] for number in range(1, 33)]


def test_a_process_that_holds_it_is_refused_a_second_one(tmp_path: Path) -> None:
    lease = acquire(tmp_path)
    with pytest.raises(UsageError, match=f"is being written by {HERE}\\.") as raised:
        acquire(tmp_path)
    assert raised.value.exit_code == 2
    lease.check()
    lease.close()


def test_a_stopped_process_still_holds_it(tmp_path: Path, start: Any) -> None:
    holder = start()
    holder.hold()
    os.kill(holder.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, holder.pid, os.WSTOPPED | os.WNOWAIT)
    with pytest.raises(UsageError, match=f"process {holder.pid} on .*, job 42"):
        acquire(tmp_path)
    os.kill(holder.pid, signal.SIGCONT)
    holder.end()


# --- None that is gone stands in the way ---


def test_that_of_a_killed_process_is_taken_at_once(tmp_path: Path, start: Any) -> None:
    holder = start()
    number = holder.hold()
    os.kill(holder.pid, signal.SIGKILL)
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)
    said: list[str] = []
    begin = time.monotonic()
    as_a_zombie = acquire(tmp_path, said)
    assert as_a_zombie.number == number + 1
    as_a_zombie.close()
    holder.popen.wait()
    assert time.monotonic() - begin < 1
    assert said == []


def test_a_lease_is_held_while_its_holder_lives(tmp_path: Path, start: Any) -> None:
    assert not is_held(tmp_path)
    acquire(tmp_path).close()
    assert not is_held(tmp_path)
    holder = start()
    holder.hold()
    assert is_held(tmp_path)
    holder.popen.kill()
    holder.popen.wait()
    assert not is_held(tmp_path)


def test_a_lease_of_another_host_is_held_while_it_beats(tmp_path: Path) -> None:
    acquire(tmp_path).close()
    rewrite(lease_file(tmp_path), boot="another", released=False)
    assert is_held(tmp_path)
    os.utime(lease_file(tmp_path), (1, 1))
    assert not is_held(tmp_path)


def test_a_lease_of_a_reused_process_id_is_taken_at_once(tmp_path: Path) -> None:
    lease = acquire(tmp_path)
    rewrite(lease_file(tmp_path), started=1)
    later = acquire(tmp_path)
    assert later.number == lease.number + 1
    later.close()
    lease.close()


def test_a_released_lease_is_taken_at_once_with_a_new_number(tmp_path: Path) -> None:
    numbers = []
    for _ in range(5):
        lease = acquire(tmp_path)
        lease.check()
        numbers.append(lease.number)
        begin = time.monotonic()
        lease.close()
        assert time.monotonic() - begin < 1, "it waits for the next beat"
    assert numbers == [1, 2, 3, 4, 5]
    assert [path.name for path in (tmp_path / LEASE_DIRECTORY).iterdir()] == ["000005"]


# --- A late one notices ---


def test_a_late_writer_learns_which_process_took_over(tmp_path: Path, start: Any) -> None:
    late = acquire(tmp_path)
    rewrite(lease_file(tmp_path), started=1)  # as if this process were gone
    other = start()
    other.hold()
    with pytest.raises(LeaseLostError, match=f"taken over by process {other.pid} on .*, job 42; this process writes"):
        late.check()
    late.close()
    with pytest.raises(UsageError, match=f"process {other.pid}"):
        acquire(tmp_path)
    other.end()


def test_a_process_forked_from_the_holder_may_not_write(tmp_path: Path) -> None:
    lease = acquire(tmp_path)
    pid = os.fork()
    if not pid:
        try:
            lease.check()
        except RingtrainError:
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    lease.check()
    lease.close()


def test_a_late_writer_that_lets_go_does_not_let_go_of_another_s(tmp_path: Path) -> None:
    late = acquire(tmp_path)
    rewrite(lease_file(tmp_path), started=1)
    holder = acquire(tmp_path)
    late.close()
    assert [path.name for path in (tmp_path / LEASE_DIRECTORY).iterdir()] == ["000002"]
    holder.check()
    with pytest.raises(UsageError):
        acquire(tmp_path)
    holder.close()


def test_a_delayed_claim_gets_no_old_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    acquire(tmp_path).close()
    claim = lease_module._claim
    others: list[Lease] = []

    def claim_late(directory: Path, number: int, environ: dict[str, str]) -> bool:
        monkeypatch.setattr(lease_module, "_claim", claim)
        acquire(tmp_path).close()
        others.append(acquire(tmp_path))
        return claim(directory, number, environ)

    monkeypatch.setattr(lease_module, "_claim", claim_late)
    with pytest.raises(UsageError, match=HERE):
        acquire(tmp_path)
    others[0].check()
    assert [path.name for path in (tmp_path / LEASE_DIRECTORY).iterdir()] == ["000003"]
    others[0].close()


# --- A holder that cannot be seen from here ---


@pytest.mark.parametrize("elsewhere", [{"boot": "another"}, {"pid_namespace": "pid:[1]"}])
@pytest.mark.usefixtures("short")
def test_a_lease_with_a_remote_heartbeat_is_refused(tmp_path: Path, elsewhere: dict[str, str]) -> None:
    holder = acquire(tmp_path)  # its thread goes on to beat
    rewrite(lease_file(tmp_path), **elsewhere, host="node7", pid=12)
    said: list[str] = []
    with pytest.raises(UsageError, match="process 12 on node7"):
        acquire(tmp_path, said)
    assert len(said) == 1
    holder.check()
    holder.close()


@pytest.mark.parametrize("elsewhere", [{"boot": "another"}, {"pid_namespace": "pid:[1]"}])
@pytest.mark.usefixtures("short")
def test_a_remote_lease_without_heartbeat_is_taken_after_a_wait(tmp_path: Path, elsewhere: dict[str, str]) -> None:
    acquire(tmp_path).close()
    rewrite(lease_file(tmp_path), **elsewhere, host="node7", pid=12, released=False)
    os.utime(lease_file(tmp_path))
    said: list[str] = []
    begin = time.monotonic()
    lease = acquire(tmp_path, said)
    assert 0.5 < time.monotonic() - begin < 2
    assert said == ["waiting up to 1 s for a sign of life of the last writer, process 12 on node7"]
    assert lease.number == 2
    lease.close()


def test_a_remote_lease_with_an_old_heartbeat_is_taken_at_once(tmp_path: Path) -> None:
    acquire(tmp_path).close()
    rewrite(lease_file(tmp_path), boot="another", released=False)
    os.utime(lease_file(tmp_path), (1, 1))
    said: list[str] = []
    begin = time.monotonic()
    acquire(tmp_path, said).close()
    assert time.monotonic() - begin < 1
    assert said == []


@pytest.mark.usefixtures("short")
def test_a_heartbeat_in_the_future_does_not_block_for_ever(tmp_path: Path) -> None:
    acquire(tmp_path).close()
    rewrite(lease_file(tmp_path), boot="another", released=False)
    os.utime(lease_file(tmp_path), (2**32, 2**32))
    begin = time.monotonic()
    acquire(tmp_path).close()
    assert time.monotonic() - begin < 2


@pytest.mark.usefixtures("short")
def test_a_remote_lease_released_meanwhile_is_taken(tmp_path: Path) -> None:
    holder = acquire(tmp_path)
    rewrite(lease_file(tmp_path), boot="another")
    said: list[str] = []

    def let_go(line: str) -> None:
        said.append(line)
        holder.close()

    with show_log(let_go):
        lease = acquire_lease(tmp_path, environ={})
    assert len(said) == 1
    lease.check()
    lease.close()


@pytest.mark.usefixtures("short")
def test_a_lease_taken_by_another_meanwhile_names_that_process(tmp_path: Path, start: Any) -> None:
    acquire(tmp_path).close()
    rewrite(lease_file(tmp_path), boot="another", host="node7", released=False)
    os.utime(lease_file(tmp_path))
    other = start()

    def take_over(line: str) -> None:
        rewrite(lease_file(tmp_path), released=True)
        other.hold()

    with pytest.raises(UsageError, match=f"process {other.pid} on {socket.gethostname()}"), show_log(take_over):
        acquire_lease(tmp_path, environ={})
    other.end()


# --- A damaged file ---


@pytest.mark.parametrize(
    "text",
    ["", "\0" * 50, "{", "null", "7", "[]", "[1, 2]", '"ab"', "{}", '{"pid": 1', '{"released": true}', "\xff\xfe{"],
)
def test_a_damaged_lease_file_does_not_block(tmp_path: Path, text: str) -> None:
    acquire(tmp_path).close()
    lease_file(tmp_path).write_text(text, encoding="latin-1")
    begin = time.monotonic()
    lease = acquire(tmp_path)
    assert time.monotonic() - begin < 1
    assert lease.number == 2
    lease.check()
    lease.close()


@pytest.mark.parametrize("missing", ["pid", "started", "boot", "pid_namespace", "host", "job"])
@pytest.mark.usefixtures("short")
def test_an_incomplete_lease_file_does_not_block_for_long(tmp_path: Path, missing: str) -> None:
    acquire(tmp_path).close()
    values = json.loads(lease_file(tmp_path).read_text())
    lease_file(tmp_path).write_text(json.dumps({k: v for k, v in values.items() if k not in (missing, "released")}))
    if missing in ("host", "job"):
        with pytest.raises(UsageError, match=f"process {os.getpid()} on"):
            acquire(tmp_path)
    else:
        acquire(tmp_path).close()


def test_a_holder_of_a_damaged_lease_file_keeps_and_releases_it(tmp_path: Path) -> None:
    lease = acquire(tmp_path)
    lease_file(tmp_path).write_text("[1]")
    lease.check()
    lease.close()
    assert json.loads(lease_file(tmp_path).read_text()) == {"released": True}


def test_a_holder_of_a_removed_lease_file_stops_writing(tmp_path: Path) -> None:
    lease = acquire(tmp_path)
    lease_file(tmp_path).unlink()
    with pytest.raises(LeaseLostError):
        lease.check()
    lease.close()


def test_other_names_are_not_taken_for_leases(tmp_path: Path) -> None:
    (tmp_path / LEASE_DIRECTORY).mkdir()
    for name in (".123-456", ".000004-99", "000007~", "notes", "²", "00000²", "٣٣٣٣٣٣", "9" * 200):
        (tmp_path / LEASE_DIRECTORY / name).write_text("x")
    lease = acquire(tmp_path)
    assert lease.number == 1
    lease.check()
    lease.close()


@pytest.mark.parametrize("kind", ["directory", "pipe", "link to nowhere", "device", "deep", "large", "odd pid"])
def test_special_files_named_as_a_lease_do_not_block(tmp_path: Path, kind: str) -> None:
    file = tmp_path / LEASE_DIRECTORY / "000003"
    file.parent.mkdir()
    if kind == "directory":
        file.mkdir()
    elif kind == "pipe":
        os.mkfifo(file)
    elif kind == "link to nowhere":
        file.symlink_to("gone")
    elif kind == "device":
        file.symlink_to("/dev/zero")
    elif kind == "odd pid":
        identity = lease_module._process_identity(os.getpid())
        file.write_text(json.dumps({**identity, "pid": "../\0" * 300, "restarts": [], "job": {}}))
    else:
        file.write_text("[" * 4000 if kind == "deep" else "[" * 10_000_000)
    begin = time.monotonic()
    for number in (4, 5):
        lease = acquire(tmp_path)
        assert lease.number == number
        lease.check()
        lease.close()
    assert time.monotonic() - begin < 2


@pytest.mark.parametrize("restarts", ["²", "-1", "1e9", "x"])
def test_a_restart_count_that_is_no_number_is_passed_over(tmp_path: Path, restarts: str) -> None:
    acquire_lease(tmp_path, environ={"SLURM_RESTART_COUNT": restarts}).close()


@pytest.mark.parametrize("name", lease_module.JOB_VARIABLES)
def test_the_job_is_named(tmp_path: Path, name: str) -> None:
    lease = acquire_lease(tmp_path, environ={name: "77.host"})
    with pytest.raises(UsageError, match=f"{HERE}, job 77.host"):
        acquire(tmp_path)
    lease.close()


def test_a_requeued_job_takes_over_from_its_live_former_start(tmp_path: Path, start: Any) -> None:
    """A node that Slurm has lost may keep writing; Slurm has started the job on another."""
    former = start()  # of job 42
    assert former.hold() == 1
    again = {"SLURM_JOB_ID": "42", "SLURM_RESTART_COUNT": "1"}
    said: list[str] = []
    with show_log(said.append):
        lease = acquire_lease(tmp_path, environ=again)
    assert lease.number == 2
    holder = f"process {former.pid} on {socket.gethostname()}, job 42"
    assert said == [f"taking over from {holder}: Slurm has started the job again"]
    with pytest.raises(UsageError, match=HERE):  # the same start
        acquire_lease(tmp_path, environ=again)
    lease.check()
    lease.close()


@pytest.mark.parametrize("environ", [{"SLURM_JOB_ID": "43", "SLURM_RESTART_COUNT": "1"}, {"SLURM_JOB_ID": "42"}, {}])
def test_another_job_does_not_take_over(tmp_path: Path, start: Any, environ: dict[str, str]) -> None:
    former = start()
    assert former.hold() == 1
    with pytest.raises(UsageError, match=rf"process {former.pid} on .*, job 42"):
        acquire_lease(tmp_path, environ=environ)
    former.go()


def test_one_other_rank_ends_the_lease_of_a_silent_rank_0(tmp_path: Path) -> None:
    lease = acquire(tmp_path)
    assert [take_over(tmp_path, lease.number, environ={}) for _ in range(3)] == [True, False, False]
    with pytest.raises(LeaseLostError, match="taken over"):
        lease.check()
    lease.close()
    after = acquire(tmp_path)  # at once, though the silent process lives
    assert after.number == lease.number + 2
    after.close()


def test_a_released_or_foreign_lease_is_not_ended(tmp_path: Path) -> None:
    lease = acquire(tmp_path)
    lease.close()
    assert not take_over(tmp_path, lease.number, environ={})
    other = acquire(tmp_path)
    assert not take_over(tmp_path, lease.number, environ={})
    other.check()
    other.close()


def test_a_lease_that_cannot_be_seen_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        take_over(tmp_path / "gone", 1, environ={})


def test_the_highest_lease_number_gives_a_remedy(tmp_path: Path, short: None) -> None:
    (tmp_path / LEASE_DIRECTORY).mkdir()
    (tmp_path / LEASE_DIRECTORY / "999999999").write_text('{"released": true}')
    with pytest.raises(UsageError, match=rf"wrote into '{tmp_path / LEASE_DIRECTORY}'.* remove that directory"):
        acquire_lease(tmp_path, environ={})
