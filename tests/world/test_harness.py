"""The groups of ranks that the other tests of this directory run in, seen working and failing."""

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.world.group import BodyFailedError, Group, Launch
from tests.world.processes import REPOSITORY, clean_environment, run_command

BARE = Launch(3, is_bare=True)


def pid_of_rank(collective: Any) -> int:
    return os.getpid()


def rank_of_launcher(collective: Any) -> int:
    return int(os.environ["OMPI_COMM_WORLD_RANK"])


def fail_on(collective: Any, ranks: list[int]) -> None:
    rank = rank_of_launcher(collective)
    assert rank not in ranks, f"planned on {rank}"


def hang_on(collective: Any, rank: int) -> None:
    while rank_of_launcher(collective) == rank:
        time.sleep(1)


def leave_on(collective: Any, rank: int) -> None:
    if rank_of_launcher(collective) == rank:
        os._exit(3)


@pytest.fixture
def group() -> Any:
    group = Group(BARE)
    yield group
    group.close()


def run(group: Group, body: Any, timeout: float = 20, **arguments: Any) -> list[Any]:
    return group.run(f"{__name__}:{body.__name__}", arguments, timeout=timeout)


def is_alive(pid: int) -> bool:
    """True if a process runs; one that is ending has given its memory back, and may wait for its parent to notice."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes() != b""
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.slow
def test_a_test_that_ends_its_worker_fails_and_the_others_run(tmp_path: Path) -> None:
    file = tmp_path / "test_end.py"
    file.write_text(
        "import os, pytest\n"
        "@pytest.mark.parametrize('number', range(9))\n"
        "def test_end(number): assert number != 6 or os.kill(os.getpid(), 9)\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "tests.parallel", "-n", "2", "-p", "no:cacheprovider", str(file)]
    env = clean_environment(TMPDIR=str(tmp_path), PYTHONPATH=str(REPOSITORY))
    finished = run_command(command, env=env, timeout=60, cwd=tmp_path)
    assert "1 failed, 8 passed" in finished.stdout, finished.stdout + finished.stderr


def test_results_come_in_the_order_of_the_ranks(group: Group) -> None:
    assert run(group, rank_of_launcher) == [0, 1, 2]


def test_a_failed_body_shows_all_failed_ranks_and_renews_them(group: Group) -> None:
    pids = run(group, pid_of_rank)
    with pytest.raises(BodyFailedError) as caught:
        run(group, fail_on, ranks=[0, 2])
    assert "planned on 0" in str(caught.value)
    assert "planned on 2" in str(caught.value)
    assert "rank 1" not in str(caught.value)
    assert not any(is_alive(pid) for pid in pids)
    assert not set(pids) & set(run(group, pid_of_rank))


def test_a_hanging_body_is_ended_with_its_location(group: Group) -> None:
    pids = run(group, pid_of_rank)
    with pytest.raises(BodyFailedError, match=r"rank 1 was not done(.|\n)*hang_on"):
        run(group, hang_on, timeout=0.5, rank=1)
    assert not any(is_alive(pid) for pid in pids)


def test_a_rank_that_ends_is_a_failure(group: Group) -> None:
    with pytest.raises(BodyFailedError, match="rank 2 failed:\nthe process ended"):
        run(group, leave_on, rank=2)


def test_ranks_leave_when_the_test_process_is_gone() -> None:
    group = Group(BARE)
    pids = run(group, pid_of_rank)
    process = group._process
    assert process is not None
    for connection in group._connections:
        connection.close()
    assert process.wait_until_gone(10)
    assert not any(is_alive(pid) for pid in pids)
    group.end()


def test_a_timed_out_command_leaves_no_process_behind(tmp_path: Any) -> None:
    pid_file = tmp_path / "pid"
    script = f"setsid sh -c 'echo $$ > {pid_file}; echo begun; exec sleep 600' & sleep 600"
    with pytest.raises(Exception, match="timed out") as caught:
        run_command(["sh", "-c", script], env=clean_environment(), timeout=1)
    assert caught.value.stdout == b"begun\n"  # type: ignore[attr-defined]
    assert not is_alive(int(pid_file.read_text()))
