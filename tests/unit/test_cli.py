"""The command line: what is wrong is said in one line, at once."""

import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from ringtrain.cli import COMMANDS, main
from ringtrain.config import Config, OptimizerConfig
from ringtrain.training.ending import FIRST_RANK_SECONDS

LAUNCHER_PREFIXES = ("OMPI_", "PMI_", "SLURM_", "HOROVOD_")


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No launcher, and nothing in the working directory."""
    for name in [name for name in os.environ if name.startswith(LAUNCHER_PREFIXES)]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


WRONG = [
    (["--epoch", "3"], ["there is no flag --epoch", "Did you mean --epochs?"]),
    (["--lr", "0.1"], ["there is no flag --lr", "Did you mean --optimizer.lr?"]),
    (["--epochs", "many"], ["epochs is 'many'; it must be a whole number"]),
    (["--epochs", "0"], ["epochs is 0; it must be at least 1"]),
    (["--deterministic", "perhaps"], ["deterministic is 'perhaps'; it must be true or false"]),
    (["--optimizer.lr", "fast"], ["optimizer.lr is 'fast'; it must be a number"]),
    (["--workload", "digit"], ["there is no workload 'digit'", "Did you mean 'digits'?"]),
    (["--workload", "no/such/file.py:Class"], ["no file 'no/such/file.py'"]),
    (["--workload", "file.py"], ["no file 'file.py'"]),
    (["--workload", "package.module"], ["name a file, path/file.py", "or a class, package.module:Class"]),
    (["evall", "runs/digits"], ["there is no command 'evall'", "Did you mean 'eval'?"]),
    (["eval", "run"], ["'run' is no run directory"]),
    (["export", "run"], ["'run' is no run directory"]),
    (["init", "workload"], ["file is 'workload'; it must end in .py"]),
    (["init", "keras.py"], ["'keras.py' would be imported in place of keras", "such as my_keras.py"]),
    (["--workload", "numpy.py"], ["'numpy.py' would be imported in place of numpy"]),
    (["mine.py"], ["there is no command 'mine.py'. Did you mean --workload mine.py?"]),
    (["convert"], ["source, destination must be given. See --help."]),
    (["convert", "a"], ["destination must be given"]),
    (["init", "no/such/place.py"], ["'no/such/place.py' cannot be written: No such file or directory"]),
    (["init"], ["file"]),
    (["workloads", "--verbose"], ["there is no flag --verbose"]),
    (["--config", "missing.yaml"], ["config is 'missing.yaml', and it does not exist. Check the path."]),
    (["--config", ""], ["config is ''; give it a value, or leave it out"]),
    (["--config=", "--epochs", "3"], ["config is ''"]),
    (["--config"], ["config"]),
    (["--config", "directory"], ["config is 'directory', and that is a directory. Name a YAML file"]),
    (["--config", "a" * 300], ["it cannot be read: File name too long"]),
    (["--workload", "a" * 300 + ".py"], ["but there is no file"]),
    (["--init_from", "a" * 300], ["is no directory that can be read"]),
    (["--init_from", "missing.keras"], ["init_from 'missing.keras' is no directory", "or a file .weights.h5, .keras"]),
    (["eval", "a" * 300], ["is no run directory"]),
    (["--out", ""], ["out is ''; give it a value, or leave it out"]),
    (["--epochs", "9" * 5000], ["epochs has thousands of digits; it must be a whole number"]),
    (["--optimizer.lr", "1e999"], ["optimizer.lr is inf; it must be a finite number, greater than 0"]),
    (["--out", "a\udcff"], [r"out is 'a\udcff', which is not UTF-8", "Give another path"]),
    (["init", "a\udcff.py"], [r"file is 'a\udcff.py', which is not UTF-8"]),
    (["convert", "a", "a\udcff"], [r"destination is 'a\udcff', which is not UTF-8"]),
    (["export", "a", "--output", "a\udcff"], [r"output is 'a\udcff', which is not UTF-8"]),
    (["convert", "a", "b", "--shards", "9" * 30], ["shards is", "from 1 to 99,999"]),
    (["convert", "a", "b", "--shards", "0"], ["shards is 0; it must be from 1 to 99,999"]),
    (["convert", "a", "b", "--kind", "mnist"], ["kind is 'mnist'; it must be one of auto, image_folder, cifar10"]),
    (["--config", "wrong_key.yaml"], ["there is no key epoch", "Did you mean epochs?"]),
    (["--config", "wrong_nested_key.yaml"], ["there is no key optimizer.rate", "Did you mean"]),
    (["--config", "wrong_type.yaml"], ["epochs is", "it must be a whole number"]),
    (["--config", "no_yaml.yaml"], ["no_yaml.yaml"]),
    (["--config", "list.yaml"], ["list.yaml"]),
    (["--config", "empty_value.yaml"], ["out is '' in empty_value.yaml; give it a value, or leave it out"]),
    (["trian"], ["there is no command 'trian'", "Did you mean 'train'?"]),
    (["--epochs"], ["epochs"]),
    (["verify", "--world_sizes", "2"], ["world_sizes is '2'"]),
    (["verify", "--world_sizes", "1,²"], ["world_sizes is '1,²'"]),
    (["bench"], ["one process has no other to sum with", "horovodrun -np 2"]),
    (["bench", "--min_bytes", "3"], ["min_bytes is 3; it must be at least 4"]),
    (["bench", "--max_bytes", "8"], ["max_bytes is 8; it must be at least min_bytes, 1024"]),
    (["bench", "--factor", "1"], ["factor is 1; it must be at least 2"]),
    (["verify", "--batch_size", "8"], ["batch_size is 8, of each process", "Give --global_batch_size"]),
    (["eval", "kept"], ["'kept' is a fit of train.py, kept by callbacks.Run, and eval is for runs of workloads"]),
    (["report"], ["runs"]),
    (["report", "nowhere"], ["'nowhere' is no run directory", "config.yaml"]),
]
FILES = {
    "wrong_key.yaml": "epoch: 3\n",
    "wrong_nested_key.yaml": "optimizer:\n  rate: 3\n",
    "wrong_type.yaml": "epochs: many\n",
    "no_yaml.yaml": "a: [1\n",
    "numpy.py": "",
    "list.yaml": "- 1\n- 2\n",
    "empty_value.yaml": "out: ''\n",
}


@pytest.mark.parametrize(("arguments", "expected"), WRONG, ids=lambda value: " ".join(value)[:40])
def test_wrong_input_gives_a_one_line_error(
    arguments: list[str], expected: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "directory").mkdir()
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept/config.yaml").write_text("workload: fit of train.py\n")
    assert main(arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    [line] = output.err.splitlines()
    assert line.startswith("ringtrain: error: ")
    for text in expected:
        assert text in line
    assert "Traceback" not in line


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_reports_an_error_and_a_surviving_rank_its_own(
    rank: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr("ringtrain.training.ending.time.sleep", waits.append)
    world = {"RANK": rank, "SIZE": 2, "LOCAL_RANK": rank, "LOCAL_SIZE": 2}
    for name, value in world.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", str(value))
    assert main(["--epochs", "0"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert waits == [FIRST_RANK_SECONDS] * rank
    assert re.match(r"ringtrain: error: rank 1 on \S+: epochs is 0" if rank else "ringtrain: error: epochs is 0", line)
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    assert ("--epochs" in capsys.readouterr().out) == (rank == 0)


def test_a_broken_launcher_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "x")
    assert main([]) == 2
    assert "OMPI_COMM_WORLD_RANK='x'" in capsys.readouterr().err


def test_help_names_every_setting_with_its_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["train", "--help"])
    assert caught.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    settings = [*(set(Config.__dataclass_fields__) - {"optimizer"})]
    for name in [*settings, *(f"optimizer.{name}" for name in OptimizerConfig.__dataclass_fields__)]:
        [at] = [number for number, line in enumerate(lines) if re.match(rf"  --{name}[ .]", line)]
        assert len(" ".join(lines[at : at + 2]).split()) > 3, f"{name}: no meaning"
    assert "  --epochs N                 passes over the training data" in lines
    assert "constant, exponential, cosine, linear, polynomial (constant)" in " ".join(" ".join(lines).split())


@pytest.mark.parametrize("command", ["", *sorted({*COMMANDS} - {"launch"})])  # its screens: unit/launch/test_help.py
def test_help_fits_a_terminal_and_has_an_example(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    if command:
        with pytest.raises(SystemExit) as caught:
            main([command, "--help"])
        assert caught.value.code == 0
    else:
        assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert not re.search(r"\(\)|\w {3,}[a-z]+ [a-z]", re.sub(r"^  \S.{25}", "", text, flags=re.MULTILINE))
    first, *_ = text.partition("examples:\n")[2].splitlines()
    assert re.match(
        rf"  (horovodrun -np 2 )?python -m ringtrain{f' {command}' if command not in ('', 'train') else ''}( |$)", first
    )


def test_help_without_a_command_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-h"]) == 0
    text = capsys.readouterr().out
    for name in COMMANDS:
        assert re.search(rf"^  {name} +[A-Z].*\.$", text, re.MULTILINE)
    assert "python -m ringtrain COMMAND --help" in text


def test_the_output_of_print_config_is_read_back(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--print_config", "--epochs", "3", "--optimizer.name", "adamw", "--deterministic", "true"]) == 0
    first = capsys.readouterr().out
    settings = yaml.safe_load(first)
    assert (settings["epochs"], settings["optimizer"]["name"], settings["deterministic"]) == (3, "adamw", True)
    assert settings["batch_size"] == 32  # the workload's own
    (tmp_path / "settings.yaml").write_text(first)
    assert main(["--config", "settings.yaml", "--print_config"]) == 0
    assert capsys.readouterr().out == first


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps: 2\nsteps: 3\n", "settings.yaml holds no settings: the key 'steps' is there twice."),
        ("optimizer: {lr: 1, lr: 2}\n", "settings.yaml holds no settings: the key 'lr' is there twice."),
        ("config: o.yaml\n", "settings.yaml has the key config; a file of settings cannot name another one."),
        ("optimizer: o.yaml\n", "optimizer is 'o.yaml'; it must be a mapping of settings, such as {name: adam}."),
        ("# later\n", "settings.yaml is empty; it must hold settings, such as epochs: 5."),
    ],
)
def test_settings_hold_each_key_once_and_name_no_other_file(
    text: str, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Another file would be read whatever it is: of this one, the text would fill the memory."""
    endless = "\n".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}' if n else 'x'] * 10)}]" for n in range(10))
    (tmp_path / "o.yaml").write_text(endless)
    (tmp_path / "settings.yaml").write_text(text)
    assert main(["--config", "settings.yaml", "--print_config"]) == 2
    assert capsys.readouterr().err == f"ringtrain: error: {message}\n"


def test_a_tilde_means_the_home_directory(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "settings.yaml").write_text("out: ~/run\n")
    for arguments in (["--config", "settings.yaml"], ["--out=~/run"]):
        assert main([*arguments, "--print_config"]) == 0
        assert yaml.safe_load(capsys.readouterr().out)["out"] == str(tmp_path / "home" / "run")


def test_flags_win_over_the_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_text("epochs: 3\nseed: 5\noptimizer:\n  lr: 0.5\n")
    for arguments in (["--config", "settings.yaml", "--epochs", "4"], ["--epochs", "4", "--config", "settings.yaml"]):
        assert main([*arguments, "--print_config"]) == 0
        settings = yaml.safe_load(capsys.readouterr().out)
        assert (settings["seed"], settings["optimizer"]["lr"]) == (5, 0.5)
    assert main(["--config", "settings.yaml", "--epochs", "4", "--print_config"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["epochs"] == 4


def test_quick_answers_do_not_import_tensorflow() -> None:
    answers = [["--help"], *([command, "--help"] for command in COMMANDS), ["workloads"], ["init", "my_workload.py"]]
    script = f"""
import contextlib, sys
from ringtrain.cli import main
for arguments in {[*answers, ["--print_config"], ["--epochs", "0"]]!r}:
    with contextlib.suppress(SystemExit):
        main(arguments)
    heavy = {{"tensorflow", "keras", "horovod", "mpi4py"}} & set(sys.modules)
    if heavy:
        sys.exit(f"{{arguments}} imported {{heavy}}")
"""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert finished.returncode == 0, finished.stderr
    # Processor time: what else the machine does is not what is measured.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0


def test_an_interrupted_command_prints_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ringtrain.commands.report.main", interrupt)
    assert main(["report", "run"]) == 130
    assert capsys.readouterr().err == "ringtrain: interrupted (SIGINT).\n"


def test_a_workload_to_begin_with_is_written_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["init", "moons.py"]) == 0
    assert "--workload moons.py" in capsys.readouterr().out.splitlines()[-1]
    (tmp_path / "moons.py").write_text("# mine by now\n")
    assert main(["init", "moons.py"]) == 2
    assert "'moons.py' exists already, and is not changed." in capsys.readouterr().err
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("moons.py", "# mine by now\n")]
