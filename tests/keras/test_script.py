"""A script of its own, from its start: what init gives it, and how it ends when nothing distributes its optimizer."""

import re
import sys
from pathlib import Path

import pytest

from tests.world.processes import REPOSITORY, Finished, clean_environment, run_command


def run_script(tmp_path: Path, text: str, *arguments: str, timeout: float = 60, **variables: str) -> Finished:
    """Run a script on two ranks."""
    script = tmp_path / "script.py"
    script.write_text(text)
    env = clean_environment(PYTHONPATH=str(REPOSITORY), TF_CPP_MIN_LOG_LEVEL="3", **variables)
    command = ["mpirun", "-np", "2", "--oversubscribe", "--bind-to", "none", sys.executable, str(script), *arguments]
    return run_command(command, env=env, timeout=timeout)


SCRIPT = """
import os
import numpy as np
import keras
import tensorflow as tf
import ringtrain.keras as hvd

try:
    hvd.callbacks.LearningRateWarmupCallback(0.1)
except Exception as error:
    print(type(error).__name__, error, flush=True)
hvd.init()
print(f"rank {hvd.rank()} of {hvd.size()}: cycle {os.environ['HOROVOD_CYCLE_TIME']} ms,"
      f" {tf.config.threading.get_inter_op_parallelism_threads()} threads", flush=True)
tf.config.threading.set_intra_op_parallelism_threads(3)  # TensorFlow has not started: a script may still choose
print(f"chose {tf.config.threading.get_intra_op_parallelism_threads()} threads", flush=True)
model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(np.ones((4, 1)), np.ones((4, 1)), verbose=0)
print("trained apart", flush=True)
"""


def test_a_script_starts_well_and_does_not_train_apart(tmp_path: Path) -> None:
    run = run_script(tmp_path, SCRIPT, HOROVOD_CYCLE_TIME="2", timeout=120)
    assert run.rc != 0
    assert not run.left_behind
    assert "trained apart" not in run.stdout
    assert run.stdout.count("chose 3 threads") == 2
    assert run.stdout.count("UsageError") == run.stdout.count("Call ringtrain.keras.init() first") == 2
    for rank in range(2):
        # 2 threads if another run held the cores when this one started: then its ranks are not pinned
        assert re.search(f"rank {rank} of 2: cycle 2 ms, [12] threads", run.stdout)
    assert "is not distributed: each of the 2 ranks would train its own model" in run.stderr


STALLED = """
import os
import sys
import keras
import numpy as np
import ringtrain.keras as hvd

hvd.init()
sys.stdout.write(f"limit {os.environ['HOROVOD_STALL_SHUTDOWN_TIME_SECONDS']}\\n")  # at once: ranks share the stream
sys.stdout.flush()


class Ask(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        hvd.allreduce(1.0, name=f"asked_{batch}")


def batches():
    for _ in range(4 if hvd.rank() == 0 else 2):  # rank 1 ends its epoch and asks no more
        yield np.ones((4, 2)), np.ones((4, 1))


model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD()), "mse")
if os.environ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] == "6":
    model.fit(batches(), verbose=0, callbacks=[Ask()])
"""


@pytest.mark.parametrize("limit", ["6", None])  # longer than one rank traces its first step after the other
def test_a_stalled_collective_of_a_callback_is_aborted(limit: str | None, tmp_path: Path) -> None:
    """By Horovod, which names both sides; after an hour unless the user says otherwise."""
    times = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": limit}
    run = run_script(tmp_path, STALLED, **(times if limit else {}))  # type: ignore[arg-type]
    assert run.stdout.count(f"limit {limit or 3600}") == 2
    assert (run.rc != 0) == (limit is not None)
    assert not run.left_behind
    assert ("1!: [HorovodAllreduce" in run.stderr or "asked_2" in run.stderr) == (limit is not None)


LEAVING = """
import threading, time
import numpy as np
import keras
import ringtrain.keras as hvd

keras.ops.ones(1)  # too early: a rank can be given no GPU or cores of its own any more
hvd.init(exit_timeout=1)
model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD()), "mse")
first = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
model.fit(np.ones((4, 1)), np.ones((4, 1)), verbose=0, callbacks=[first])
if hvd.rank() == 1:
    threading.Thread(target=time.sleep, args=(3600,), name="uploader").start()
time.sleep(2)  # longer than exit_timeout, which begins with the end
print("the script goes on", flush=True)
"""


def test_a_script_exits_despite_a_running_thread(tmp_path: Path) -> None:
    run = run_script(tmp_path, LEAVING)
    assert run.rc == 0, run.stderr
    assert run.stdout.count("the script goes on") == 2
    [said] = re.findall("ringtrain.keras: communication: .*", run.stderr)  # of rank 0 alone
    assert re.search("Horovod over MPI, (gradients|short sums) natively", said)
    for rank in range(2):
        assert f"rank {rank} called init() when TensorFlow had computed something: devices and threads" in run.stderr
    assert re.search(r"warning: rank 1 on \S+ .* kept by the thread 'uploader'.* leaves with exit code 0", run.stderr)


FAILING = """
import sys
import ringtrain.keras as hvd

hvd.init()
if sys.argv[1] == "alike" or hvd.rank() == 1:
    raise KeyError("the script's own")
elif sys.argv[1] == "apart":
    raise ValueError("another")
hvd.allreduce([1.0])
"""


@pytest.mark.parametrize(
    ("how", "tracebacks"),
    [
        ("alike", ["KeyError"]),
        ("apart", ["KeyError", "ValueError"]),
        pytest.param("alone", ["KeyError"], marks=pytest.mark.slow),
    ],
)
def test_an_error_of_all_ranks_is_shown_once(tmp_path: Path, how: str, tracebacks: list[str]) -> None:
    run = run_script(tmp_path, FAILING, how, timeout=120)
    assert run.rc != 0
    assert not run.left_behind
    shown = re.findall(r"^(KeyError|ValueError): ", run.stderr, re.MULTILINE)
    assert sorted(shown) == tracebacks, run.stderr
    if how == "alike":
        assert run.stderr.count("Traceback (most recent call last)") == 1, run.stderr


ENDINGS = {
    "init after shutdown": ("hvd.shutdown()\nhvd.init()", "init() was called after shutdown(), which has ended MPI"),
    "fit on one rank alone": (
        "if hvd.rank() == 1: sys.exit(0)\nmodel.fit(x, x, callbacks=[hvd.callbacks.Run(sys.argv[1])])",
        "lost the other ranks while this one waits for the other ranks",
    ),
}
BEGINNING = """
import sys
import numpy as np
import keras
import ringtrain.keras as hvd

hvd.init()
x = np.ones((4, 1))
model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
"""


@pytest.mark.parametrize("how", ENDINGS)
def test_a_script_that_exits_before_the_other_ranks_is_reported(tmp_path: Path, how: str) -> None:
    rest, message = ENDINGS[how]
    run = run_script(tmp_path, BEGINNING + rest, str(tmp_path / "run"), timeout=120)
    assert run.rc == 1
    assert message in run.stderr


@pytest.mark.slow
def test_wrong_data_on_one_rank_stop_all_with_the_keras_error(tmp_path: Path) -> None:
    fit = "model.fit(np.ones((8, 2 - hvd.rank())), np.ones((8, 1)), batch_size=2, verbose=0)"
    run = run_script(tmp_path, BEGINNING.replace("Input((1,))", "Input((2,))") + fit)
    assert run.rc != 0
    assert not run.left_behind
    assert "ValueError: " in run.stderr
    assert "expected axis -1 of input shape to have value 2, but received input with shape (2, 1)" in run.stderr
    assert "a rank has ended that others wait for: rank 1" in run.stderr
