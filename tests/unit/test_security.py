"""Nothing that is read can run code, and no file of another user is written through a link."""

import ast
from collections.abc import Iterator
from pathlib import Path

import keras
import pytest

from ringtrain.cli import main
from ringtrain.data.formats import cifar10
from ringtrain.errors import UsageError
from ringtrain.run.checkpoint import Checkpoint
from ringtrain.run.directory import CONFIG_FILE, read_config
from ringtrain.run.store import write_checkpoint

PACKAGE = Path(__file__).resolve().parents[2] / "ringtrain"
FILES = sorted(PACKAGE.rglob("*.py"))

# What runs code that it is given, or what data say is code.
DANGEROUS_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
DANGEROUS_CALLS = {
    "eval", "exec", "compile", "os.system", "os.popen", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "np.load",
    "keras.config.enable_unsafe_deserialization", "tempfile.mktemp",
}  # fmt: skip
# np.load with allow_pickle=False, which this test sees
ALLOWED = {
    (name, "np.load")
    for name in ("oracle.py", "compare.py", "digits.py", "outcomes.py", "peer_loop.py", "rank_state.py")
}


def find_dangers(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ({alias.name.partition(".")[0] for alias in node.names} & DANGEROUS_MODULES)
        elif isinstance(node, ast.ImportFrom):
            yield from {(node.module or "").partition(".")[0]} & DANGEROUS_MODULES
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if name in DANGEROUS_CALLS:
                yield name
            if keywords.get("shell") == "True":
                yield f"{name}(shell=True)"
            if keywords.get("allow_pickle", "False") != "False" or keywords.get("safe_mode", "True") != "True":
                yield f"{name} of what may hold code"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_code_is_run_that_was_read(path: Path) -> None:
    dangers = {
        danger for danger in find_dangers(path.read_text(encoding="utf-8")) if (path.name, danger) not in ALLOWED
    }
    assert not dangers


@pytest.mark.parametrize(
    "source",
    ["import pickle", "from shelve import open", "eval(x)", "np.load(f, allow_pickle=True)", "yaml.load(f)",
     "subprocess.run(x, shell=True)", "keras.models.load_model(f, safe_mode=False)"],
)  # fmt: skip
def test_the_search_finds_what_it_looks_for(source: str) -> None:
    assert list(find_dangers(source))


def attack(witness: Path) -> str:
    return f"seed: !!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path ['{witness}']]\n"


def test_a_config_file_cannot_run_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    witness, config = tmp_path / "witness", tmp_path / "config.yaml"
    config.write_text(attack(witness))
    assert main(["--config", str(config), "--out", str(tmp_path / "out")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert not witness.exists()


def test_the_settings_of_a_run_cannot_run_code(tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    (tmp_path / CONFIG_FILE).write_text(f"optimizer: {{}}\n{attack(witness)}")
    with pytest.raises(UsageError, match="is damaged"):
        read_config(tmp_path)
    assert not witness.exists()


def make_strangers_run(directory: Path, workload: object) -> Path:
    directory.mkdir()
    (directory / CONFIG_FILE).write_text(f"workload: {workload}\noptimizer: {{}}\n")
    write_checkpoint(directory / "checkpoints", Checkpoint(step=1, variables={}, progress={}, run={}), is_best=False)
    return directory


@pytest.mark.parametrize("command", ["eval", "export"])
@pytest.mark.parametrize("spec", ["{file}", "{file}:Mine", "code_of_a_stranger:Mine"])
def test_code_named_in_a_run_directory_runs_only_on_request(
    command: str, spec: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    witness, file = tmp_path / "witness", tmp_path / "code_of_a_stranger.py"
    file.write_text(f"open({str(witness)!r}, 'w')\nraise SystemExit(7)\n")
    monkeypatch.syspath_prepend(tmp_path)
    workload = spec.format(file=file)
    run = make_strangers_run(tmp_path / "run", workload)
    arguments = [command, str(run), "--checkpoint", "step-000000001"]
    assert main(arguments) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert not witness.exists()
    _, _, typed = line.partition("If you trust it: python -m ringtrain ")
    assert typed.split() == [*arguments, "--workload", workload]
    assert main(typed.split()) == 2
    assert witness.exists()


@pytest.mark.parametrize("command", ["eval", "export"])
def test_code_in_a_run_directory_is_never_run(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    witness, link = tmp_path / "witness", tmp_path / "link.py"
    run = make_strangers_run(tmp_path / "run", tmp_path / "run/mine.py")
    (run / "mine.py").write_text(f"open({str(witness)!r}, 'w')\n")
    link.symlink_to(run / "mine.py")
    for named in ([], ["--workload", str(run / "mine.py:Mine")], ["--workload", str(link)]):
        assert main([command, str(run), "--checkpoint", "step-000000001", *named]) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert "is Python code in the run directory itself" in line
        assert "--workload /" not in line  # nothing to type that would run it
    assert not witness.exists()


@pytest.mark.parametrize("ending", [".keras", ".h5"])
def test_a_saved_model_cannot_run_code(tmp_path: Path, ending: str) -> None:
    from ringtrain.keras import load_model

    path = tmp_path / f"model{ending}"
    keras.Sequential([keras.Input((2,)), keras.layers.Lambda(lambda x: x)]).save(path)
    with pytest.raises(ValueError, match="unsafe"):
        load_model(path)


def test_locks_and_partial_downloads_follow_no_links(tmp_path: Path) -> None:
    other = tmp_path / "of another user"
    other.write_bytes(b"precious")
    lock = tmp_path / ".lock"
    lock.symlink_to(other)
    with pytest.raises(OSError, match="symbolic links"), cifar10._locked(lock, limit_s=1):
        pass

    served = tmp_path / "served"
    served.write_bytes(b"archive")
    archive = tmp_path / "archive.tar.gz"
    (tmp_path / "archive.tar.gz.part").symlink_to(other)
    download = cifar10.Download(url=served.as_uri(), md5="888d0ee361af3603736f32131e7b20a2", limit_s=5)
    cifar10._download_to(archive, download)
    assert archive.read_bytes() == b"archive"
    assert other.read_bytes() == b"precious"
