"""Files of a run that ringtrain did not write: a documented code and one line, within 2 s, and nothing is lost."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ringtrain.config import Config
from ringtrain.data.formats import tfrecord_index
from ringtrain.errors import DataError, RingtrainError
from ringtrain.files.bounded import require_plain
from ringtrain.run import lease
from ringtrain.run.checkpoint import MANIFEST_FILE, DamagedError, digest_of, read_checkpoint
from ringtrain.run.directory import CONFIG_FILE, METRICS_FILE, load_settings, parse_event
from ringtrain.run.resume import OpenedRun, open_run
from ringtrain.run.store import find_newest, list_steps, step_name
from tests.faults.test_fuzz import NUM_EXAMPLES, exit_code_of, is_untouched, make_run, open_or_refuse, slowly

MAX_SECONDS = (
    2.0  # of computing, since the machine has other things to do; what waits for ever is ended by the time-out
)
NEWEST = 15
DEEP = "[" * 100_000
LAUGHS = "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9) if n else '1'}]\n" for n in range(10)
)  # nine to the ninth once it is written out
MERGES = "a0: &a0 {b: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 10))
# Of a reader alone, which is quick: `make test-faults` tries 10,000.
often = settings(slowly, max_examples=20 * NUM_EXAMPLES if NUM_EXAMPLES >= 500 else 2 * NUM_EXAMPLES)


@pytest.fixture(autouse=True, scope="module")
def no_waiting() -> Iterator[None]:
    """A lease that names a holder on another host is waited for."""
    before = lease.EXPIRY_SECONDS
    lease.EXPIRY_SECONDS = 0.05
    yield
    lease.EXPIRY_SECONDS = before


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pristine") / "run"
    make_run(path)
    return path


@contextlib.contextmanager
def copy_of(pristine: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as directory:
        shutil.copytree(pristine, Path(directory) / "run", symlinks=True)
        yield Path(directory) / "run"


def open_in_time(path: Path) -> tuple[OpenedRun | None, RingtrainError | None]:
    begin = time.process_time()
    opened, refusal = open_or_refuse(path)
    if opened is not None:
        opened.directory.close()
    assert time.process_time() - begin < MAX_SECONDS
    assert refusal is None or "\n" not in str(refusal)
    return opened, refusal


def sign(path: Path, content: Any) -> None:
    """Write a manifest with the right checksum."""
    content = json.loads(json.dumps(content))  # where each key is a text
    (path / MANIFEST_FILE).write_text(json.dumps({"sha256": digest_of(content), "content": content}))


def read_content(path: Path) -> Any:
    return json.loads((path / MANIFEST_FILE).read_text())["content"]


def change_at(content: Any, keys: tuple[Any, ...], value: Any) -> Any:
    """The content with another value at a place; ``DEEP`` stands for nesting that JSON cannot be written with."""
    *above, last = keys
    place = content
    for key in above:
        place = place[key]
    place[last] = value
    return content


# --- Manifests whose checksum is right ---

scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from([2**63, 2**80])
)
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)
PLACES: list[tuple[Any, ...]] = [
    ("format",), ("step",), ("files",), ("files", "variables.bin"), ("files", "variables.bin", "bytes"),
    ("files", "variables.bin", "sha256"), ("progress",), ("progress", "best"), ("progress", "best_step"),
    ("progress", "finished"), ("progress", "samples_seen"), ("progress", "more"), ("run",), ("run", "config"),
    ("run", "config", "seed"), ("run", "config", "optimizer"), ("run", "global_batch_size"), ("run", "world_size"),
    ("run", "identity"), ("variables",), ("variables", 0), ("variables", 0, "name"), ("variables", 0, "dtype"),
    ("variables", 0, "shape"), ("variables", 0, "offset"), ("variables", 0, "bytes"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("step",), -5), (("step",), 5), (("step",), "15"), (("step",), True), (("step",), 1e300),
        (("variables", 0, "offset"), 10**6), (("variables", 0, "offset"), -4),
        (("variables", 0, "offset"), 4), (("variables", 0, "shape"), [2**40] * 9),
        (("variables", 0, "shape"), [[]]), (("variables", 0, "dtype"), "object"),
        (("variables", 0, "dtype"), "i4,i4"),
        (("progress",), [1]),
        (("progress",), {"x": 1}),
        (("progress", "best"), "1"), (("progress", "finished"), "perhaps"), (("run",), "x"), (("run", "config"), None),
        (("run", "world_size"), 0), (("run", "global_batch_size"), -7), (("run", "global_batch_size"), 2**70),
        (("files",), []), (("files", "variables.bin", "sha256"), 7), (("files", "variables.bin"), {"bytes": 20}),
    ],
)  # fmt: skip
def test_a_manifest_with_wrong_values_counts_as_damaged(pristine: Path, keys: tuple[Any, ...], value: Any) -> None:
    with copy_of(pristine) as path:
        newest = path / "checkpoints" / step_name(NEWEST)
        sign(newest, change_at(read_content(newest), keys, value))
        opened, refusal = open_in_time(path)
        assert refusal is None
        assert opened is not None
        assert opened.start.step == 10
        assert list_steps(path / "checkpoints") == [5, 10]
        assert all(is_untouched(pristine, path, step) for step in (5, 10))
        assert (path / "checkpoints" / f"{step_name(NEWEST)}.damaged-1" / MANIFEST_FILE).is_file()


@pytest.mark.parametrize(
    "text",
    [DEEP, '{"content": ' + DEEP, '{"a":' * 100_000, "[" * 500 + "]" * 500, "1" * 100_000, " " * (40 * 2**20), "NaN",
     '{"content": {"format": 1e999}, "sha256": 0}', '{"content": {"format": ' + "9" * 4000 + '}, "sha256": 0}'],
    ids=lambda text: text[:12],
)  # fmt: skip
def test_a_manifest_that_is_no_manifest_is_damaged(pristine: Path, text: str) -> None:
    with copy_of(pristine) as path:
        (path / "checkpoints" / step_name(NEWEST) / MANIFEST_FILE).write_text(text)
        opened, refusal = open_in_time(path)
        if refusal is not None:
            assert "update ringtrain" in str(refusal)
            assert all(is_untouched(pristine, path, step) for step in (5, 10))
        else:
            assert opened is not None
            assert opened.start.step == 10


@pytest.mark.parametrize("file", [MANIFEST_FILE, "variables.bin"])
def test_a_pipe_in_a_checkpoint_is_not_waited_for(pristine: Path, file: str) -> None:
    with copy_of(pristine) as path:
        (path / "checkpoints" / step_name(NEWEST) / file).unlink()
        os.mkfifo(path / "checkpoints" / step_name(NEWEST) / file)
        opened, _ = open_in_time(path)
        assert opened is not None
        assert opened.start.step == 10


@slowly
@given(changes=st.lists(st.tuples(st.sampled_from(PLACES), anything), min_size=1, max_size=3))
@example(changes=[(("variables",), {"": None}), (("variables", 0), None)])
def test_a_manifest_of_any_values_is_read_or_damaged(
    pristine: Path, changes: list[tuple[tuple[Any, ...], Any]]
) -> None:
    with copy_of(pristine) as path:
        newest = path / "checkpoints" / step_name(NEWEST)
        content = read_content(newest)
        for keys, value in changes:
            with contextlib.suppress(KeyError, TypeError, IndexError):  # what it changes has been changed itself
                change_at(content, keys, value)
        sign(newest, content)
        with contextlib.suppress(DamagedError, DataError):
            read_checkpoint(newest)
        opened, refusal = open_in_time(path)
        assert opened is None or opened.start.step in (10, NEWEST)
        assert opened is not None or isinstance(refusal, RingtrainError)
        assert all(is_untouched(pristine, path, step) for step in (5, 10)), "a whole checkpoint was lost"
        if opened is not None:  # else it may be of a newer ringtrain, which asks for that
            find_newest(path / "checkpoints")


# --- Events ---

ODD_LINES = [
    '{"event": "train", "step": null}', "[1]", DEEP, '{"event": "train", "step": ' + DEEP, '{"event": {}}', "7",
    '{"event": "warning", "step": null}', '{"event": "train", "step": -1}', '{"event": "train", "step": 1e400}',
    '{"event": "end", "time": 1e300, "step": 2}', '{"event": "start", "time": -1e300}', "\\ud800",
    '{"event": "\\ud800"}',
    '{"event": "start", "time": 99999999999999999999, "versions": [], "node": {}, "size": "x"}', "x" * 3_000_000,
    '{"event": "eval", "step": 3, "loss": ' + "9" * 4000 + "}", '{"event": "checkpoint", "step": 3, "path": 7}',
    '{"event": "train", "step": 3, "loss": [[[[]]]], "\\ud800": {}}', '{"event": "start", "versions": {"a": [1]}}',
    '{"event": "train", "step": 3, "examples_per_sec": ' + "9" * 400 + ', "sec_per_step": "\\ud800"}',
]  # fmt: skip


def add_lines(path: Path, lines: list[str]) -> None:
    with (path / METRICS_FILE).open("ab") as file:
        for line in lines:
            file.write(line.encode("utf-8", "surrogatepass") + b"\n")


def assert_reported(path: Path) -> None:
    assert exit_code_of(["report", str(path), "--output", str(path / "other.html")]) == 0


@pytest.mark.parametrize(
    "lines",
    [ODD_LINES, *(pytest.param([line], marks=pytest.mark.slow) for line in ODD_LINES)],
    ids=lambda lines: lines[0][:45] if len(lines) == 1 else "all",
)
def test_an_unknown_event_does_not_stop_a_run_or_its_report(pristine: Path, lines: list[str]) -> None:
    with copy_of(pristine) as path:
        add_lines(path, [*lines, '{"event": "note", "text": "mine"}'])
        assert_reported(path)
        opened, _ = open_in_time(path)
        assert opened is not None
        assert opened.start.step == NEWEST
        kept = (path / METRICS_FILE).read_bytes()
        assert kept.startswith((pristine / METRICS_FILE).read_bytes()), "an event of the run was lost"
        assert kept.endswith(b'{"event": "note", "text": "mine"}\n')
        assert_reported(path)


@settings(slowly, max_examples=min(NUM_EXAMPLES // 2, 100))  # a report takes its time
@given(st.lists(st.dictionaries(st.sampled_from(["event", "step", "time", "loss", "size", "path"]), anything)))
def test_any_events_are_reported_or_passed_over(pristine: Path, events: list[dict[str, Any]]) -> None:
    with copy_of(pristine) as path:
        kinds = ["start", "train", "eval", "checkpoint", "warning", "end"]
        add_lines(path, [json.dumps({"event": kinds[n % 6], **event}) for n, event in enumerate(events)])
        assert_reported(path)
        opened, _ = open_in_time(path)
        assert opened is not None
        assert opened.start.step == NEWEST


@slowly
@given(st.lists(st.binary(max_size=60), max_size=5))
def test_any_lines_are_passed_over(pristine: Path, lines: list[bytes]) -> None:
    with copy_of(pristine) as path:
        with (path / METRICS_FILE).open("ab") as file:
            file.write(b"\n".join([*lines, b""]))
        opened, _ = open_in_time(path)
        assert opened is not None
        assert opened.start.step == NEWEST


# --- Settings ---

ODD_SETTINGS = {
    "aliases nested nine levels": LAUGHS,
    "merges nested nine levels": MERGES,
    "a mapping of nested aliases": LAUGHS + "optimizer: {lr: *a9}\n",
    "recursive": "optimizer: &a {b: *a}\n",
    "recursive list": "optimizer: {}\noptions: &a [*a]\n",
    "integer keys": "optimizer: {}\n1: 2\n",
    "integer keys inside": "optimizer: {3: 4}\n",
    "deep": "optimizer: {}\noptions: " + "[" * 30_000,
    "deep mapping": "optimizer: " + "{a: " * 10_000,
    "no date": "optimizer: {}\nseed: 2020-13-45\n",
    "a date": "optimizer: {}\nseed: 2020-12-24\n",
    "a number of many digits": "optimizer: {}\nseed: " + "9" * 60_000 + "\n",
    "large": "optimizer: {}\na: " + "x" * 10_000_000,
    "a set": "optimizer: {}\na: !!set {b}\n",
    "binary": "optimizer: {}\na: !!binary aaaa\n",
    "null keys": "optimizer: {}\n~: 1\n",
}


@pytest.mark.parametrize("kind", ODD_SETTINGS)
def test_odd_settings_are_refused_in_one_line_everywhere(pristine: Path, kind: str) -> None:
    with copy_of(pristine) as path:
        (path / CONFIG_FILE).write_text(ODD_SETTINGS[kind])
        _, refusal = open_in_time(path)
        assert refusal is not None
        assert refusal.exit_code == 2
        assert all(is_untouched(pristine, path, step) for step in (5, 10, NEWEST))
        for arguments in (["report", str(path)], ["train", "--print_config", "--config", str(path / CONFIG_FILE)]):
            begin = time.process_time()
            code = exit_code_of(arguments)
            assert code == 2, arguments
            assert time.process_time() - begin < 2 * MAX_SECONDS  # imports are among it


@slowly
@given(st.dictionaries(st.sampled_from(["optimizer", "options", "seed", "epochs", "x"]), anything))
def test_any_settings_are_taken_or_refused(pristine: Path, values: dict[str, Any]) -> None:
    with copy_of(pristine) as path:
        (path / CONFIG_FILE).write_text(yaml.safe_dump(values))
        open_in_time(path)
        assert all(is_untouched(pristine, path, step) for step in (5, 10, NEWEST))


# --- Small files ---


@slowly
@given(
    name=st.sampled_from(["run.json", "checkpoints/best", "stop", ".lease/000007"]),
    data=st.binary(max_size=40) | anything.map(lambda value: json.dumps(value).encode()),
)
def test_small_files_of_any_content_do_not_prevent_a_resume(pristine: Path, name: str, data: bytes) -> None:
    with copy_of(pristine) as path:
        with contextlib.suppress(FileNotFoundError):
            (path / name).unlink()
        (path / name).write_bytes(data)
        opened, _ = open_in_time(path)
        assert opened is not None
        assert opened.start.step == NEWEST


@pytest.mark.parametrize("name", [METRICS_FILE, CONFIG_FILE, "run.json", ".lease/000009"])
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink("/dev/zero", path)], ids=["pipe", "device"])
def test_special_files_do_not_block(pristine: Path, name: str, make: Callable[[Path], None]) -> None:
    with copy_of(pristine) as path:
        (path / name).unlink(missing_ok=True)
        make(path / name)
        open_in_time(path)
        assert exit_code_of(["report", str(path)]) in (0, 2)
        assert all(is_untouched(pristine, path, step) for step in (5, 10, NEWEST))


def test_a_renamed_checkpoint_does_not_discard_newer_ones(tmp_path: Path) -> None:
    """A checkpoint that was renamed had all newer ones than its own step set aside as damaged."""
    make_run(tmp_path / "run")
    root = tmp_path / "run/checkpoints"
    shutil.copytree(root / step_name(5), root / step_name(20))
    opened = open_run(Config(out=tmp_path / "run", epochs=2, batch_size=16))
    opened.directory.close()
    assert opened.start.step == NEWEST
    assert list_steps(root) == [5, 10, NEWEST]
    assert (root / f"{step_name(20)}.damaged-1").is_dir()


# --- Each reader alone ---


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files") / "file"


@contextlib.contextmanager
def in_time() -> Iterator[None]:
    begin = time.process_time()
    yield
    assert time.process_time() - begin < MAX_SECONDS


json_like = st.text(alphabet='{}[]:,"\\ 0129.eE-ntfalsru\u00b2\ud800', max_size=80).map(
    lambda text: text.encode("utf-8", "surrogatepass")
)


@often
@given(json_like | st.binary(max_size=80) | anything.map(lambda value: json.dumps(value).encode()))
def test_the_reader_of_events(line: bytes) -> None:
    with in_time():
        event = parse_event(line)
    assert event is None or isinstance(event["event"], str)
    assert event is None or (event.get("step") or 0) >= 0


@often
@given(st.text(alphabet="{}[]:,-&*!%@`'\"#|>?<=~ \n\tab01.", max_size=80).map(str.encode) | st.binary(max_size=60))
def test_the_reader_of_settings(file: Path, data: bytes) -> None:
    file.write_bytes(data)
    with in_time(), contextlib.suppress(ValueError, yaml.YAMLError):
        require_plain(load_settings(file))


@often
@given(st.text(min_size=1, max_size=12).filter(lambda name: not {"/", "\0"} & set(name) and name not in (".", "..")))
def test_the_reader_of_leases(file: Path, name: str) -> None:
    directory = file.with_name("lease")
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    with contextlib.suppress(UnicodeEncodeError):  # no file has such a name
        (directory / name).touch()
    with in_time():
        assert lease._newest_number(directory) == (int(name) if re.fullmatch("[0-9]{6,9}", name) else 0)


@often
@given(
    records=st.lists(st.integers(0, 2**63 - 1) | st.integers(0, 50), max_size=5),
    sizes=st.lists(st.integers(0, 200), max_size=3),
    junk=st.binary(max_size=120),
    is_junk=st.booleans(),
)
def test_the_reader_of_indices(file: Path, records: list[int], sizes: list[int], junk: bytes, is_junk: bool) -> None:
    files = tuple(tfrecord_index.FileState(f"f{n}", size, 0) for n, size in enumerate(sizes))
    entries = np.zeros(len(records), tfrecord_index.ENTRY)
    entries["length"] = records
    tfrecord_index._write_cache(file, tfrecord_index.Index(files, entries, ()))
    if is_junk:
        file.write_bytes(b"ringtfr1" + hashlib.sha256(junk).digest() + junk)
    with in_time():
        read = tfrecord_index._read_cache(file, files)
    # The length of a file limits how many records are read: 16 bytes hold one without data.
    is_whole = not is_junk and len(records) <= sum(sizes) // 16
    assert (read is not None) == is_whole
    if read is not None:
        assert read.tobytes() == entries.tobytes()
