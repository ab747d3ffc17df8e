"""A kill for want of memory is told from any other, with the limit that it was for."""

from pathlib import Path

from launch.rank import NODE, count_kills, find_limit


def make_system(root: Path, *, version: int, own: int, node: int) -> Path:
    """The files in which the kernel counts, for a process in a job's group."""
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/vmstat").write_text(f"pgfault 7\noom_kill {node}\n")
    line, directory, events, limit = {
        1: ("4:memory:/job", root / "sys/fs/cgroup/memory/job", "memory.oom_control", "memory.limit_in_bytes"),
        2: ("0::/job", root / "sys/fs/cgroup/job", "memory.events", "memory.max"),
    }[version]
    (root / "proc/self/cgroup").write_text(f"{line}\n")
    directory.mkdir(parents=True, exist_ok=True)
    (directory / events).write_text(f"low 0\noom 3\noom_kill {own}\n")
    (directory / limit).write_text(f"{3 * 2**29}\n")
    (directory.parent / events).write_text(f"oom_kill {node}\n")
    (directory.parent / limit).write_text("9223372036854771712\n" if version == 1 else "max\n")
    return root


def test_the_memory_limit_that_was_reached_is_named(tmp_path: Path) -> None:
    for version in (1, 2):
        before = count_kills(make_system(tmp_path / str(version), version=version, own=1, node=5))
        assert list(before.values()) == [1, 5]
        assert find_limit(before, before) is None
        by_group = count_kills(make_system(tmp_path / str(version), version=version, own=2, node=6))
        assert find_limit(before, by_group) == "the limit of 1.5 GiB of its cgroup"
        by_node = count_kills(make_system(tmp_path / str(version), version=version, own=1, node=6))
        assert find_limit(before, by_node) == NODE


def test_without_kernel_counters_no_limit_is_named(tmp_path: Path) -> None:
    assert count_kills(tmp_path) == {}
    assert find_limit({}, {}) is None
    assert find_limit({}, {NODE: 3}) is None, "kills before the first count are not known"
