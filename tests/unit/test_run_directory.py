"""The run directory: never shared by two runs, and readable line by line."""

import json
import math
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ringtrain.errors import UsageError
from ringtrain.run import directory
from ringtrain.run.directory import (
    CONFIG_FILE,
    METRICS_FILE,
    RunDirectory,
    append_event,
    create_run_directory,
    read_config,
)


def parse_event(line: str) -> dict[str, Any]:
    """An event without its time, which it must have."""
    event: dict[str, Any] = json.loads(line, parse_constant=refuse)
    assert abs(time.time() - event.pop("time")) < 600
    return event


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def read_events(run: Path) -> list[dict[str, Any]]:
    text = (run / METRICS_FILE).read_text()
    assert text == "" or text.endswith("\n")
    return [parse_event(line) for line in text.splitlines()]


# --- Where a run is to be ---


def test_a_new_run_gets_a_number_if_the_directory_is_taken(tmp_path: Path) -> None:
    made = [create_run_directory(tmp_path / "runs/digits", is_anew=True).name for _ in range(3)]
    assert made == ["digits", "digits-2", "digits-3"]


def test_no_message_suggests_removing_a_non_directory() -> None:
    with pytest.raises(UsageError, match=r"^out is '/dev/null', which is no directory\. Give another with --out\.$"):
        create_run_directory(Path("/dev/null"))


def test_no_message_suggests_removing_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(UsageError, match=r"has checkpoints, but no config\.yaml: half a run\. Bring the file back"):
        create_run_directory(tmp_path)


def test_a_new_run_avoids_all_existing_paths(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/x").touch()
    (tmp_path / "a-2").touch()
    (tmp_path / "a-3").symlink_to("nowhere")
    (tmp_path / "a-4").mkdir()
    assert create_run_directory(tmp_path / "a", is_anew=True) == tmp_path / "a-5"


def test_a_directory_may_be_absent_or_empty(tmp_path: Path) -> None:
    assert create_run_directory(tmp_path / "a/b") == tmp_path / "a/b"
    assert create_run_directory(tmp_path / "a/b") == tmp_path / "a/b"


def test_the_end_is_the_last_event_of_a_run(tmp_path: Path) -> None:
    run = RunDirectory(create_run_directory(tmp_path / "a"))
    for event in ("warning", "end", "warning"):
        run.write_event(event, message="stdout cannot be written any more")
    run.close()
    lines = (run.path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["warning", "end"]


def test_a_run_that_wrote_nothing_does_not_block_a_new_one(tmp_path: Path) -> None:
    RunDirectory(create_run_directory(tmp_path / "a")).close()
    (tmp_path / "a/.lease").mkdir()
    assert create_run_directory(tmp_path / "a") == tmp_path / "a"


def test_a_run_without_its_configuration_is_refused(tmp_path: Path) -> None:
    run = RunDirectory(create_run_directory(tmp_path / "a"))
    run.write_event("start")
    run.close()
    with pytest.raises(UsageError, match="holds no run"):
        create_run_directory(tmp_path / "a")


def test_the_current_directory_may_be_a_run_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert create_run_directory(Path()) == Path()
    assert create_run_directory(Path(), is_anew=True) == tmp_path.with_name(f"{tmp_path.name}-2")


@pytest.mark.parametrize("is_anew", [True, False])
def test_a_path_that_cannot_be_created_is_named(tmp_path: Path, is_anew: bool) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"file/run.*cannot be made: .*--out"):
        create_run_directory(tmp_path / "file/run", is_anew=is_anew)


def test_runs_started_together_never_share_a_directory(tmp_path: Path) -> None:
    start = threading.Barrier(8)

    def make(_: int) -> list[Path]:
        start.wait()
        return [create_run_directory(tmp_path / "run", is_anew=True) for _ in range(4)]

    with ThreadPoolExecutor(8) as threads:
        made = [path for paths in threads.map(make, range(8)) for path in paths]
    assert len(set(made)) == len(made) == 32


# --- What is kept there ---


def test_each_event_is_a_line_of_valid_json_at_once(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.write_event("train", step=1, loss=math.nan, lr=math.inf, gradient_norm=-math.inf, accuracy=0.5)
    run.write_event("end", status="ä\nb")

    first, second = read_events(tmp_path)
    assert first == {"event": "train", "step": 1, "loss": "nan", "lr": "inf", "gradient_norm": "-inf", "accuracy": 0.5}
    assert second == {"event": "end", "status": "ä\nb"}
    run.close()


def test_the_configuration_is_kept_in_the_order_of_its_fields(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.write_config({"workload": "digits", "epochs": 3, "a": {"z": 1, "b": None}})
    assert (tmp_path / CONFIG_FILE).read_text() == "workload: digits\nepochs: 3\na:\n  z: 1\n  b: null\n"
    run.close()


def test_the_configuration_comes_back(tmp_path: Path) -> None:
    values = {"workload": "yes", "lr": 1e-05, "out": None, "optimizer": {"name": "1e3", "lr": 0.1}}
    run = RunDirectory(tmp_path)
    assert read_config(tmp_path) is None
    run.write_config({"optimizer": {}})
    run.write_config(values)
    run.close()
    assert read_config(tmp_path) == values
    assert {path.name for path in tmp_path.iterdir()} == {CONFIG_FILE, METRICS_FILE}


@pytest.mark.parametrize(
    "content",
    [b"", b"null", b"text", b"[1]", b"a: [", b"\xff\xfe\xff", b"\0\0\0", b"optimizer: sgd", b"workload: digits"],
)
def test_a_damaged_configuration_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / CONFIG_FILE).write_bytes(content)
    with pytest.raises(UsageError, match=rf"{CONFIG_FILE}.*is damaged.*--resume never"):
        read_config(tmp_path)


def test_events_from_several_threads_are_whole_lines(tmp_path: Path) -> None:
    writing: list[int] = []
    together: list[int] = []

    def note() -> None:
        writing.append(1)
        time.sleep(0)  # lets the others run
        together.append(len(writing))
        writing.pop()

    run = RunDirectory(tmp_path, may_write=note)
    start = threading.Barrier(8)

    def write(thread: int) -> None:
        start.wait()
        for number in range(100):
            run.write_event("warning", thread=thread, number=number, message=str(thread) * 2000)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(write, range(8)))
    run.close()
    events = read_events(tmp_path)
    assert len(events) == 800
    assert set(together) == {1}
    assert all(event["message"] == str(event["thread"]) * 2000 for event in events)
    for thread_number in range(8):  # each thread's in its order
        numbers = [event["number"] for event in events if event["thread"] == thread_number]
        assert numbers == list(range(100))


def test_a_run_that_lost_its_lease_writes_nothing(tmp_path: Path) -> None:
    may_write = True

    def check() -> None:
        if not may_write:
            raise UsageError("taken over")

    run = RunDirectory(tmp_path, may_write=check)
    run.write_config({"optimizer": {}})
    run.write_event("start")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    may_write = False
    with pytest.raises(UsageError, match="taken over"):
        run.write_event("train", step=1)
    with pytest.raises(UsageError, match="taken over"):
        run.write_config({"optimizer": {"lr": 1}})
    with pytest.raises(UsageError, match="taken over"):
        run.forget_after(0)
    run.close()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_closing_lets_go_of_the_directory_once_all_is_written(tmp_path: Path) -> None:
    seen: list[list[dict[str, Any]]] = []
    run = RunDirectory(tmp_path, on_close=lambda: seen.append(read_events(tmp_path)))
    run.write_event("end")
    run.close()
    assert seen == [[{"event": "end"}]]


# --- After a resume each step is there once ---


def write_a_history(run: RunDirectory) -> None:
    run.write_event("start", step=0)
    for step in range(1, 7):
        run.write_event("train", step=step, loss=1 / step)
        if step % 2 == 0:
            run.write_event("eval", step=step)
            run.write_event("checkpoint", step=step)
            run.write_event("warning", step=step, message="?")
    run.write_event("warning", message="without a step")
    run.write_event("end", step=6, status="preempted")


def test_only_events_of_repeated_steps_are_removed(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    write_a_history(run)
    before = read_events(tmp_path)
    run.forget_after(4)
    after = read_events(tmp_path)
    gone = [(event["event"], event["step"]) for event in before if event not in after]
    assert gone == [("train", 5), ("train", 6), ("eval", 6), ("checkpoint", 6), ("warning", 6)]
    assert after == [event for event in before if event in after]
    run.write_event("start", step=4)
    run.close()
    assert read_events(tmp_path) == [*after, {"event": "start", "step": 4}]
    assert {path.name for path in tmp_path.iterdir()} == {METRICS_FILE}


@pytest.mark.parametrize(
    ("endings", "at"),
    [
        ([], 7.5),
        ([{"status": "failed", "exit_code": 1}], 7.5),
        ([{"status": "hang", "exit_code": 6}, {"status": "hang", "exit_code": 6}], 7.5),
        ([{"status": "preempted", "exit_code": 75}], None),
        ([{"status": "preempted", "exit_code": 75}, {"status": "failed", "exit_code": 1}], None),
        ([{"status": "data", "exit_code": 3}], None),
    ],
)
def test_only_failures_that_are_restarted_interrupt_a_run(
    tmp_path: Path, endings: list[dict[str, Any]], at: float | None
) -> None:
    events = [{"event": "train", "step": step, "time": step + 0.5} for step in (6, 7)]
    events += [{"event": "end"} | ending for ending in endings]
    (tmp_path / METRICS_FILE).write_text("".join(f"{json.dumps(event)}\n" for event in events))
    run = RunDirectory(tmp_path)
    run.forget_after(5)
    run.close()
    assert run.interrupted_at == at


def test_forgetting_nothing_or_twice_changes_nothing_more(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    write_a_history(run)
    before = (tmp_path / METRICS_FILE).read_bytes()
    run.forget_after(6)
    assert (tmp_path / METRICS_FILE).read_bytes() == before
    run.forget_after(3)
    once = (tmp_path / METRICS_FILE).read_bytes()
    run.forget_after(3)
    run.forget_after(6)
    run.close()
    assert (tmp_path / METRICS_FILE).read_bytes() == once


@pytest.mark.parametrize(
    "rest",
    ['{"event": "train", "st', '{"event": "train", "step": 2', "{", '"', "\0\0\0", "7\n", "null\n", "\u00e4", "[]"],
)
def test_a_line_that_was_cut_off_or_damaged_is_dropped(tmp_path: Path, rest: str) -> None:
    run = RunDirectory(tmp_path)
    run.write_event("train", step=1)
    run.close()
    with (tmp_path / METRICS_FILE).open("a", encoding="latin-1") as file:
        file.write(rest)
    run = RunDirectory(tmp_path)
    run.forget_after(5)
    run.write_event("train", step=2)
    run.close()
    assert read_events(tmp_path) == [{"event": "train", "step": 1}, {"event": "train", "step": 2}]


def test_every_cut_of_the_file_is_mended(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    write_a_history(run)
    run.close()
    whole = (tmp_path / METRICS_FILE).read_bytes()
    events = read_events(tmp_path)
    for length in range(0, len(whole), 7):
        (tmp_path / METRICS_FILE).write_bytes(whole[:length])
        run = RunDirectory(tmp_path)
        run.forget_after(6)
        run.write_event("start")
        run.close()
        *kept, last = read_events(tmp_path)
        num_whole = whole[: length + 1].count(b"\n")  # a line that lacks but its end is whole
        assert (kept, last) == (events[:num_whole], {"event": "start"})


@pytest.mark.parametrize(("before", "kept"), [("", []), ('{"event": "train"}\n', ["train"]), ('{"event": "tr', [])])
def test_another_rank_writes_the_end_of_a_run_on_a_new_line(tmp_path: Path, before: str, kept: list[str]) -> None:
    (tmp_path / "metrics.jsonl").write_text(before)
    append_event(tmp_path, "end", exit_code=6)
    *first, last = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert parse_event(last) == {"event": "end", "exit_code": 6}
    assert [json.loads(line)["event"] for line in first if line.endswith("}")] == kept


def test_no_end_is_written_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        append_event(tmp_path, "end", exit_code=6)
    assert not list(tmp_path.iterdir())


def test_a_log_too_large_to_resume_gives_a_remedy(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    os.truncate(tmp_path / METRICS_FILE, directory.MAX_METRICS_BYTES + 1)
    words = r"'metrics.jsonl' has more than 4,294,967,296 bytes\. Move that file out of it, and start the same command"
    with pytest.raises(directory.RunDirectoryError, match=words):
        run.forget_after(0)
    run.close()
