"""Commands replace files of their own kind only."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import launch.cli
import ringtrain.cli
from ringtrain.errors import UsageError
from ringtrain.files.outputs import require_same_kind
from tests.report.made_run import make_run

MARK = b"#SBATCH"


def test_a_new_file_and_one_of_the_same_kind_may_be_written(tmp_path: Path) -> None:
    path = tmp_path / "job.sh"
    require_same_kind(path, MARK, kind="a batch script")
    path.touch()
    require_same_kind(path, MARK, kind="a batch script")
    path.write_bytes(b"#!/bin/bash\n#SBATCH --nodes=2\n")
    require_same_kind(path, MARK, kind="a batch script")


@pytest.mark.parametrize("what", ["another file", "link", "link to nothing", "pipe", "directory", "device"])
@pytest.mark.timeout(20)
def test_anything_else_is_refused_and_left(what: str, tmp_path: Path) -> None:
    path, same = tmp_path / "out", tmp_path / "same"
    same.write_bytes(MARK)
    match what:
        case "another file":
            path.write_bytes(b"import keras\n")
        case "link":
            path.symlink_to(same)
        case "link to nothing":
            path.symlink_to(tmp_path / "nothing")
        case "pipe":
            os.mkfifo(path)
        case "directory":
            path.mkdir()
        case "device":
            path = Path(os.devnull)
    with pytest.raises(UsageError, match="which exists and is not a batch script; it is left unchanged"):
        require_same_kind(path, MARK, kind="a batch script")
    assert same.read_bytes() == MARK
    if what == "another file":
        assert path.read_bytes() == b"import keras\n"
    else:
        assert not path.is_file() or path.is_symlink()


COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], list[str]]] = {
    "report": (ringtrain.cli.main, ["report", "run", "--output"]),
    "render": (launch.cli.main, ["slurm", "render", "--nodes", "2", "--ranks_per_node", "1", "--mpi", "pmix", "--to"]),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_replace_only_their_own_files_or_exit_with_2(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "run")
    workload = tmp_path / "mine.py"
    workload.write_text("import keras\n")
    monkeypatch.chdir(tmp_path)
    main, arguments = COMMANDS[command]
    for target in (workload, Path(os.devnull)):
        assert main([*arguments, str(target)]) == 2
        assert "it is left unchanged" in capsys.readouterr().err
    assert workload.read_text() == "import keras\n"
    assert Path(os.devnull).is_char_device()
    for _ in range(2):
        assert main([*arguments, str(tmp_path / "new")]) == 0
