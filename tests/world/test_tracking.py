"""Runs whose log real trackers get: MLflow's server on loopback, W&B offline, and Trackio's database."""

import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.report.chromium import chromium
from tests.world.environments import install, make_environment
from tests.world.processes import clean_environment
from tests.world.running import Run, events, last_step, running

SERVER_SECONDS = 120.0  # also for the import of a tracker, which yields to the ranks
SERVER = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # or it starts workers
SLOW_STEP = {"RINGTRAIN_TEST_STEP_SECONDS": "0.6"}
# Prints what the server has of each run: RUN_ID, STATUS, TAGS, EXIT CODE, STEPS, FILES
READ_MLFLOW = """
import json, mlflow
client = mlflow.MlflowClient()
runs = client.search_runs([client.get_experiment_by_name("ringtrain").experiment_id])
print(json.dumps([{
    "experiment": run.info.experiment_id, "run": run.info.run_id,
    "id": run.data.tags["ringtrain.run"], "status": run.info.status, "exit_code": run.data.tags.get("exit_code"),
    "optimizer": run.data.params.get("optimizer.name"), "nodes": run.data.tags.get("nodes"),
    "steps": [metric.step for metric in client.get_metric_history(run.info.run_id, "train/loss")],
    "files": [file.path for file in client.list_artifacts(run.info.run_id)],
} for run in runs]))
"""
# Reads the records of W&B's file: a log of LevelDB, in blocks of 32 KiB, after 7 bytes of its own.
READ_WANDB = """
import glob, json, struct, sys
from wandb.proto import wandb_internal_pb2 as messages

def records(data):
    place, whole = 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        whole += data[place + 7:place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield messages.Record.FromString(whole)
            whole = b""

steps, ids = [], set()
for path in sorted(glob.glob(sys.argv[1] + "/wandb/offline-run-*/run-*.wandb")):
    for record in records(open(path, "rb").read()):
        if record.WhichOneof("record_type") == "run":
            ids.add(record.run.run_id)
        elif record.WhichOneof("record_type") == "history":
            row = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            steps += [row["step"]] if "train/loss" in row else []
print(json.dumps([sorted(ids), steps]))
"""

ARE_CURVES_DRAWN = "[...document.querySelectorAll('.scatterlayer .lines path')].length >= 3"
# As for a pointer that is elsewhere.
WITHOUT_TOOLBARS = """
localStorage.setItem("mlflow.assistant.fab.autoOpenedOnFirstLoad_v1", "true");
const style = "<style>.modebar {display: none}</style>";
addEventListener("load", () => document.head.insertAdjacentHTML("beforeend", style));
"""
# Prints RUN_ID, CONFIG, ALERTS, STEPS of each run.
READ_TRACKIO = """
import json, trackio
from trackio.sqlite_storage import SQLiteStorage
print(json.dumps([[
    run.id, run.config, [alert["title"] for alert in run.alerts()],
    [row["step"] for row in SQLiteStorage.get_logs("ringtrain", run.name, run_id=run.id) if "train/loss" in row],
] for run in trackio.Api().runs("ringtrain")]))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that has the trackers, too."""
    python, _ = make_environment(tmp_path_factory.mktemp("trackers"), without="mlflow*")
    install(python, ".ci/locks/trackers.lock")
    return python


class Server:
    """MLflow's server; it keeps its data over restarts."""

    def __init__(self, python: Path, directory: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"
        place = ["--host", "127.0.0.1", "--port", str(self.port), "--workers", "1"]
        data = [f"--backend-store-uri=sqlite:///{directory}/mlflow.db", f"--artifacts-destination={directory}/files"]
        self._command = [str(python), "-m", "mlflow", "server", *place, *data]
        self._log = directory / "server.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=log, env=clean_environment(**SERVER), start_new_session=True
            )
        end = time.monotonic() + SERVER_SECONDS
        while not self._is_up():
            assert time.monotonic() < end, self._log.read_text()
            time.sleep(0.2)

    def _is_up(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.address}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def stop(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


@pytest.fixture
def server(python: Path, tmp_path: Path) -> Iterator[Server]:
    server = Server(python, tmp_path)
    try:
        server.start()
        yield server
    finally:
        server.stop()


def ask(python: Path, program: str, *words: str, **variables: str) -> Any:
    finished = subprocess.run(
        [python, "-c", program, *words], env=clean_environment(**variables), capture_output=True, text=True, timeout=120
    )
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout.splitlines()[-1])


@pytest.mark.slow  # installs MLflow, and starts its server
def test_mlflow_has_one_run_with_each_step_once(python: Path, server: Server, tmp_path: Path) -> None:
    """The server is down while the run is preempted, and while it is killed and started again."""
    out, variables = tmp_path / "run", {"MLFLOW_TRACKING_URI": server.address, "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}
    start = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", str(python), "-m", "ringtrain"]
    flags = ("--tracker", "mlflow", "--checkpoint_every", "5", "--epochs", "20")

    def wait_for_more(run: Run, steps: int) -> None:
        before = last_step(out)
        run.wait_for(f"{steps} more steps", lambda: last_step(out) >= before + steps, timeout=SERVER_SECONDS)

    with running(out, *flags, start=start, env=SLOW_STEP | variables) as run:
        run.wait_for("a sent step", (out / "tracker-mlflow.json").exists, timeout=SERVER_SECONDS)
        server.stop()
        wait_for_more(run, 5)
        run.signal_rank(0, signal.SIGUSR1)
        assert run.wait(120) == 75, run.text()
        assert f"python -m ringtrain track {out} --to mlflow" in run.text()
    with running(out, *flags, start=start, env=SLOW_STEP | variables) as run:
        wait_for_more(run, 3)
        run.kill()
    server.start()
    command = [str(python), "-m", "ringtrain", "track", str(out), "--to", "mlflow"]
    subprocess.run(command, check=True, env=clean_environment(**variables), timeout=120)
    assert [there["status"] for there in ask(python, READ_MLFLOW, **variables)] == ["KILLED"]
    with running(out, *flags, start=start, env=variables) as run:
        assert run.wait(180) == 0, run.text()
    subprocess.run(command, check=True, env=clean_environment(**variables), timeout=120)
    [there] = ask(python, READ_MLFLOW, **variables)
    assert there["id"] == json.loads((out / "run.json").read_text())["id"]
    assert there["steps"] == [event["step"] for event in events(out, "train")]
    assert (there["status"], there["exit_code"], there["optimizer"]) == ("FINISHED", "0", "adam")
    assert there["nodes"] == events(out, "start")[-1]["node"]
    assert sorted(there["files"]) == ["config.yaml", "report.html"]


@pytest.mark.slow  # installs W&B
def test_wandb_has_each_step_once(python: Path, tmp_path: Path) -> None:
    out, variables = tmp_path / "run", {"WANDB_MODE": "offline"}
    with running(out, "--tracker", "wandb", start=[str(python), "-m", "ringtrain"], env=variables) as run:
        assert run.wait(180) == 0, run.text()
    command = [str(python), "-m", "ringtrain", "track", str(out), "--to", "wandb"]
    subprocess.run(command, check=True, env=clean_environment(**variables), timeout=120, cwd=tmp_path)
    ids, steps = ask(python, READ_WANDB, str(out))
    assert ids == [json.loads((out / "run.json").read_text())["id"]]
    assert steps == [event["step"] for event in events(out, "train")]


@pytest.mark.slow  # installs Trackio
def test_trackio_has_one_run_with_each_step_once(python: Path, tmp_path: Path) -> None:
    """The run is preempted; then its record of what was sent is lost."""
    out, variables = tmp_path / "run", {"TRACKIO_DIR": str(tmp_path / "trackio")}
    start, flags = [str(python), "-m", "ringtrain"], ("--tracker", "trackio", "--checkpoint_every", "5")
    with running(out, *flags, start=start, env=SLOW_STEP | variables) as run:
        run.wait_for("a sent step", (out / "tracker-trackio.json").exists, timeout=SERVER_SECONDS)
        os.kill(run.launcher_pid, signal.SIGUSR1)
        assert run.wait(120) == 75, run.text()
    with running(out, *flags, start=start, env=variables) as run:
        assert run.wait(180) == 0, run.text()
    (out / "tracker-trackio.json").unlink()
    command = [str(python), "-m", "ringtrain", "track", str(out), "--to", "trackio"]
    subprocess.run(command, check=True, env=clean_environment(**variables), timeout=120)
    [[found, config, alerts, steps]] = ask(python, READ_TRACKIO, **variables)
    assert found == json.loads((out / "run.json").read_text())["id"]
    assert steps == [event["step"] for event in events(out, "train")]
    assert (config["status"], config["exit_code"], config["optimizer.name"]) == ("completed", "0", "adam")
    assert sorted(alerts) == ["end: completed", "end: preempted"]


@pytest.mark.slow  # installs MLflow, and starts its server and a browser
def test_the_page_of_a_run_in_mlflow(python: Path, server: Server, tmp_path: Path) -> None:
    """With RINGTRAIN_PICTURE=docs/tracking.png the test writes the picture of the docs."""
    out, variables = tmp_path / "digits", {"MLFLOW_TRACKING_URI": server.address}
    train = [str(python), "-m", "ringtrain", "--out", str(out), "--log_every", "10", "--epochs", "10"]
    subprocess.run(train, check=True, env=clean_environment(), timeout=240)
    command = [str(python), "-m", "ringtrain", "track", str(out), "--to", "mlflow"]
    subprocess.run(command, check=True, env=clean_environment(**variables), timeout=120)
    [there] = ask(python, READ_MLFLOW, **variables)
    picture = Path(os.environ.get("RINGTRAIN_PICTURE", tmp_path / "tracking.png"))
    with chromium(tmp_path / "profile") as page:
        page.resize(1100, 620)
        page.send("Page.addScriptToEvaluateOnNewDocument", source=WITHOUT_TOOLBARS)
        run = f"experiments/{there['experiment']}/runs/{there['run']}/model-metrics?workflowType=machine_learning"
        page.send("Page.navigate", url=f"{server.address}/#/{run}")
        end = time.monotonic() + SERVER_SECONDS
        while not page.evaluate(ARE_CURVES_DRAWN):
            assert time.monotonic() < end, page.evaluate("document.body?.innerText")
            time.sleep(0.5)
        assert "digits (eval/accuracy)" in page.evaluate("document.body.innerText")
        page.screenshot(picture, beyond_viewport=False)
