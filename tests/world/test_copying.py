"""Checkpoints that an S3-compatible server on loopback gets, and weights in safetensors."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringtrain.run.store import list_steps, step_name
from tests.world.environments import install, make_environment
from tests.world.processes import Finished, clean_environment, run_command
from tests.world.running import events

pytestmark = pytest.mark.slow  # installs s3fs, moto and safetensors, and starts a server
# Before the first one it takes any credentials: those that make the bucket and the user.
FREE_REQUESTS = 4
PREPARE = """
import json, boto3
client = lambda name: boto3.client(name, region_name="us-east-1")
client("s3").create_bucket(Bucket="bucket")
iam = client("iam")
iam.create_user(UserName="ada")
rule = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}]}
iam.put_user_policy(UserName="ada", PolicyName="all", PolicyDocument=json.dumps(rule))
key = iam.create_access_key(UserName="ada")["AccessKey"]
print(json.dumps([key["AccessKeyId"], key["SecretAccessKey"]]))
"""
FETCH = "import sys, fsspec; fs = fsspec.filesystem('s3'); fs.get(sys.argv[1], sys.argv[2], recursive=True)"
LIST = "import fsspec; print(*fsspec.filesystem('s3').find('bucket'), sep='\\n')"
SAVE = """
import sys
from pathlib import Path
from safetensors.numpy import save_file
from ringtrain.run.checkpoint import read_checkpoint
variables = read_checkpoint(Path(sys.argv[1])).variables
save_file({name[8:]: value.copy() for name, value in variables.items() if name.startswith("weights/")}, sys.argv[2])
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    python, _ = make_environment(tmp_path_factory.mktemp("stores"), without="s3fs*")
    install(python, ".ci/locks/trackers.lock")
    return python


@pytest.fixture
def store(python: Path) -> Iterator[dict[str, str]]:
    """The variables of a user of the server, which refuses others."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    variables = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_DEFAULT_REGION": "us-east-1"}
    server = subprocess.Popen(
        [python, "-m", "moto.server", "-H", "127.0.0.1", "-p", port], start_new_session=True,
        env=clean_environment(INITIAL_NO_AUTH_ACTION_COUNT=str(FREE_REQUESTS)),
    )  # fmt: skip
    try:
        end = time.monotonic() + 60
        while not is_listening(int(port)):
            assert time.monotonic() < end
            assert server.poll() is None
            time.sleep(0.2)
        anybody = {"AWS_ACCESS_KEY_ID": "nobody", "AWS_SECRET_ACCESS_KEY": "nothing"}
        prepared = run(python, ["-c", PREPARE], **variables, **anybody)
        assert prepared.rc == 0, prepared.stderr
        key, secret = eval(prepared.stdout)
        yield variables | {"AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret}
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def run(python: Path, words: list[str | Path], **variables: str) -> Finished:
    return run_command([str(python), *map(str, words)], env=clean_environment(**variables), timeout=120)


def train(python: Path, out: Path, *flags: str | Path, **variables: str) -> Finished:
    finished = run(python, ["-m", "ringtrain", "--out", out, *flags], **variables)
    assert finished.rc == 0, finished.stderr
    return finished


def test_a_lost_run_goes_on_from_its_copy(python: Path, store: dict[str, str], tmp_path: Path) -> None:
    copied = ["--copy_to", "s3://bucket/runs", "--checkpoint_every", "20"]
    first = run(python, ["-m", "ringtrain", "--out", tmp_path / "digits", *copied, "--max_hours", "0.001"], **store)
    assert first.rc == 75, first.stderr
    saved = max(list_steps(tmp_path / "digits/checkpoints"))
    names = run(python, ["-c", LIST], **store).stdout.split()
    assert "bucket/runs/digits/report.html" in names
    assert f"bucket/runs/digits/checkpoints/{step_name(saved)}/manifest.json" in names
    fetched = run(python, ["-c", FETCH, "bucket/runs/digits", tmp_path / "elsewhere"], **store)
    assert fetched.rc == 0, fetched.stderr
    train(python, tmp_path / "elsewhere", "--resume", "must")
    assert [event["first_step"] for event in events(tmp_path / "elsewhere", "start")] == [0, saved]
    steps = [event["step"] for event in events(tmp_path / "elsewhere", "train")]
    assert steps == sorted(set(steps)), "a step twice"


def test_a_store_that_refuses_is_a_warning_and_can_have_the_rest_later(
    python: Path, store: dict[str, str], tmp_path: Path
) -> None:
    wrong = store | {"AWS_SECRET_ACCESS_KEY": "a-wrong-secret"}
    trained = train(python, tmp_path / "digits", "--copy_to", "s3://bucket/runs", "--epochs", "1", **wrong)
    [line] = trained.stderr.splitlines()
    assert line.startswith("ringtrain: warning: s3://bucket/runs takes nothing: PermissionError: The request")
    assert line.endswith("Training goes on.")
    assert f"python -m ringtrain track {tmp_path / 'digits'} --to s3://bucket/runs" in trained.stdout
    assert run(python, ["-c", LIST], **store).stdout.split() == []
    track: list[str | Path] = ["-m", "ringtrain", "track", tmp_path / "digits", "--to", "s3://bucket/runs"]
    assert run(python, track, **wrong).rc == 1
    assert run(python, track, **store).rc == 0
    assert "bucket/runs/digits/report.html" in run(python, ["-c", LIST], **store).stdout


def test_weights_of_safetensors_are_loaded_by_name(python: Path, tmp_path: Path) -> None:
    train(python, tmp_path / "first", "--steps", "2")
    file = tmp_path / "first.safetensors"
    saved = run(python, ["-c", SAVE, tmp_path / "first/checkpoints/step-000000002", file])
    assert saved.rc == 0, saved.stderr
    assert "variables taken" in train(python, tmp_path / "second", "--steps", "1", "--init_from", file).stdout
    file.write_bytes(b"no such format")
    damaged = run(python, ["-m", "ringtrain", "--out", tmp_path / "third", "--init_from", file])
    assert (damaged.rc, "first.safetensors' cannot be read" in damaged.stderr) == (3, True), damaged.stderr


def test_a_bucket_that_is_not_there_is_no_success(python: Path, tmp_path: Path) -> None:
    """The store's error is that of a file which --keep has left out."""
    (tmp_path / "config.yaml").touch()
    send = (
        f"from pathlib import Path; from ringtrain.tracking.copying import Copy; copy = Copy(Path({str(tmp_path)!r}),"
    )
    refuse = "def refuse(*words, **options): raise FileNotFoundError('The specified bucket does not exist')"
    whole = f"{send} 'memory://runs')\n{{}}\ncopy.send()\nprint(copy._store.find('/'))"
    assert "/config.yaml" in run(python, ["-c", whole.format("")]).stdout
    refused = run(python, ["-c", whole.format(f"{refuse}\ncopy._store.open = refuse")])
    assert (refused.rc, "bucket does not exist" in refused.stderr) == (1, True), refused.stderr
