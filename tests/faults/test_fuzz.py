"""Whatever is in a configuration or a run directory: a documented exit code, no traceback, no hang."""

from __future__ import annotations

import contextlib
import io
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ringtrain.cli import main
from ringtrain.config import Config, OptimizerConfig, to_plain
from ringtrain.errors import DataError, RingtrainError, UsageError
from ringtrain.run import lease
from ringtrain.run.checkpoint import Checkpoint
from ringtrain.run.directory import RunDirectoryError
from ringtrain.run.resume import OpenedRun, Progress, open_run
from ringtrain.run.store import list_steps, write_checkpoint

SETTINGS = [*(f.name for f in fields(Config)), *(f"optimizer.{f.name}" for f in fields(OptimizerConfig))]
# Each says where a file is to be looked for, or opened.
FILES = {"workload", "out", "data_dir", "init_from"}
NUM_EXAMPLES = int(os.environ.get("RINGTRAIN_TEST_EXAMPLES", "50"))  # `make test-faults` tries more
slowly = settings(max_examples=NUM_EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=12),
    st.sampled_from(
        ["sgd", "adam", "auto", "1e400", "-1", "0", "nan", "inf", "true", "0x10", "~", "1_000", "{", "[]", ""]
    ),
)
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner))
names = st.sampled_from([name for name in SETTINGS if name not in FILES])


def exit_code_of(arguments: list[str]) -> int:
    """Of the command line, which must answer without a traceback; its output is not looked at."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as errors:
        code = main(arguments)
    assert "Traceback" not in errors.getvalue()
    assert code == 0 or errors.getvalue().startswith("ringtrain: "), errors.getvalue()
    return code


@slowly
@given(st.lists(st.tuples(names, scalars), max_size=4))
def test_any_value_of_any_flag_is_taken_or_refused(flags: list[tuple[str, Any]]) -> None:
    arguments = [f"--{name}={value}" for name, value in flags]
    assert exit_code_of(["train", "--print_config", *arguments]) in (0, UsageError.exit_code)


@slowly
@given(st.dictionaries(st.sampled_from(SETTINGS) | st.text(max_size=8), values, max_size=4))
def test_any_mapping_in_a_configuration_file_is_taken_or_refused(mapping: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "settings.yaml"
        file.write_text(yaml.safe_dump({name: value for name, value in mapping.items() if name != "workload"}))
        assert exit_code_of(["train", "--print_config", "--config", str(file)]) in (0, UsageError.exit_code)


@slowly
@given(st.binary(max_size=60) | st.text(alphabet="{}[]:,-&*!%@`'\"#|>? \n\tabc0", max_size=40).map(str.encode))
def test_any_bytes_in_a_configuration_file_are_taken_or_refused(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "settings.yaml"
        file.write_bytes(data)
        assert exit_code_of(["train", "--print_config", "--config", str(file)]) in (0, UsageError.exit_code)


@slowly
@given(st.lists(st.text(max_size=10), max_size=4))
def test_any_words_on_the_command_line_are_answered(words: list[str]) -> None:
    """But for those that start a training."""
    leaves = {"-h", "--help"} & set(words)
    with pytest.raises(SystemExit) if leaves else contextlib.nullcontext():
        assert exit_code_of(["train", *words, "--print_config", "true"]) in (0, UsageError.exit_code)


# --- A run directory of which anything may have become ---


def make_run(path: Path) -> Config:
    """A run with three checkpoints, a best one and its records."""
    config = Config(out=path, epochs=2, batch_size=16)
    run = open_run(config).directory
    for step in (5, 10, 15):
        checkpoint = Checkpoint(
            step=step,
            variables={"weights/w": np.full((5,), step, np.float32)},
            progress=asdict(Progress(best=1.0, best_step=step, evaluated_step=step)),
            run={"global_batch_size": 64, "world_size": 1, "config": to_plain(asdict(config))},
        )
        write_checkpoint(run.checkpoints, checkpoint, is_best=False)
        write_checkpoint(run.checkpoints, checkpoint, is_best=True)
        run.write_event("train", step=step)
        run.write_event("checkpoint", step=step)
    run.write_event("end", status="preempted")
    run.close()
    return config


def flip(path: Path, generator: random.Random) -> None:
    data = bytearray(path.read_bytes())
    if data:
        data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
        path.write_bytes(data)


def cut(path: Path, generator: random.Random) -> None:
    os.truncate(path, generator.randrange(path.stat().st_size + 1))


def replace_by_noise(path: Path, generator: random.Random) -> None:
    path.write_bytes(generator.randbytes(generator.randrange(200)))


def replace_by_json(path: Path, generator: random.Random) -> None:
    texts = [
        "{}",
        "[]",
        "null",
        "7",
        '{"content": 3, "sha256": ""}',
        '{"event": 1}',
        "a: b",
        "!!python/object:os.system {}",
    ]
    path.write_text(generator.choice(texts))


def remove(path: Path, generator: random.Random) -> None:
    path.unlink()


def replace_by_directory(path: Path, generator: random.Random) -> None:
    path.unlink()
    path.mkdir()


def replace_by_link(path: Path, generator: random.Random) -> None:
    path.unlink()
    path.symlink_to(generator.choice([path.name, "/nowhere", "/dev/null", ".."]))


def append(path: Path, generator: random.Random) -> None:
    with path.open("ab") as file:
        file.write(generator.randbytes(20))


INJURIES: tuple[Callable[[Path, random.Random], None], ...] = (
    flip, cut, replace_by_noise, replace_by_json, remove, replace_by_directory, replace_by_link, append,
)  # fmt: skip


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


@slowly
@given(seed=st.integers(0, 2**32), count=st.integers(1, 4))
def test_whole_checkpoints_survive_any_damage_to_a_run_directory(pristine: Path, seed: int, count: int) -> None:
    generator = random.Random(seed)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "run"
        shutil.copytree(pristine, path, symlinks=True)
        for _ in range(count):
            files = [file for file in sorted(path.rglob("*")) if file.is_file() and not file.is_symlink()]
            generator.choice(INJURIES)(generator.choice(files), generator)
        whole = {step for step in list_steps(path / "checkpoints") if is_untouched(pristine, path, step)}
        opened, refusal = open_or_refuse(path)
        if opened is not None:
            assert opened.start.step >= max(whole, default=0), "a whole checkpoint was passed over"
            opened.directory.close()
        assert opened is not None or str(path) in str(refusal), "the message does not say where"
        for step in whole:
            assert is_untouched(pristine, path, step), "a whole checkpoint was lost"


def open_or_refuse(path: Path) -> tuple[OpenedRun | None, RingtrainError | None]:
    try:
        return open_run(Config(out=path, epochs=2, batch_size=16)), None
    except (UsageError, DataError, RunDirectoryError) as error:
        return None, error


def is_untouched(pristine: Path, path: Path, step: int) -> bool:
    name = f"checkpoints/step-{step:09d}"
    try:
        return all((path / name / f.name).read_bytes() == f.read_bytes() for f in (pristine / name).iterdir())
    except OSError:
        return False
