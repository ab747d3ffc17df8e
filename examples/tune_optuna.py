# tune_optuna.py: python tune_optuna.py sweep worker1
# Start one worker per node or GPU, each with its own name, in a directory that all share: they tune one study.
# A trial is a run that the worker starts with two ranks: a process can train once, and failed ranks are restarted.
# Start a stopped or killed worker again, with its name: its trial is tried again in the same directory, and resumes.
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import optuna
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

# An absolute path: Optuna's lock is a link to it, and the lock of a killed worker would never expire otherwise.
SWEEP, WORKER = Path(sys.argv[1]).resolve(), sys.argv[2]
NUM_TRIALS = int(sys.argv[3]) if len(sys.argv) > 3 else 20
# Ends with this worker, even if that is killed; its ranks save before.
UNTIL_DEATH = ["setpriv", "--pdeathsig", "TERM"]
LAUNCH = [*UNTIL_DEATH, sys.executable, "-m", "ringtrain", "launch", "local", "-np", "2", "--max_restarts", "3", "--"]
TRAIN = ["--workload", "digits", "--epochs", "12", "--eval_every_epochs", "1", "--checkpoint_every", "22"]
REFUSED, DIVERGED, PREEMPTED = 2, 4, 75  # exit codes


def read_accuracies(run):  # by step
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    events = [json.loads(line) for line in lines if line.endswith("\n")]
    return {event["step"]: event["accuracy"] for event in events if event["event"] == "eval"}


def try_values(trial):
    trial.set_user_attr("worker", WORKER)
    run = SWEEP / f"trial-{trial.user_attrs.get('first', trial.number)}"
    lr = trial.suggest_float("optimizer.lr", 1e-4, 1e-1, log=True)
    batch_size = trial.suggest_categorical("batch_size", [16, 32, 64])
    flags = ["--optimizer.lr", str(lr), "--batch_size", str(batch_size), "--out", str(run)]
    for _ in range(12):
        code = train([*LAUNCH, *TRAIN, *flags], run, trial)
        if code != REFUSED or "first" not in trial.user_attrs:
            break
        time.sleep(5)  # the ranks of the killed worker may still be saving
    if code == PREEMPTED:  # by the scheduler, and this worker will be: the trial waits for its next start
        sys.exit(code)
    if code == DIVERGED:
        raise optuna.TrialPruned
    if code != 0:
        raise RuntimeError(f"{run} ended with exit code {code}")
    return max(read_accuracies(run).values())


def train(command, run, trial):
    process, reported = subprocess.Popen(command), set()
    while process.poll() is None:
        time.sleep(0.5)
        for step, accuracy in read_accuracies(run).items():
            if step not in reported:
                trial.report(accuracy, step)
                reported.add(step)
        if trial.should_prune():
            process.terminate()
            process.wait()
            raise optuna.TrialPruned
    return process.returncode


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Optuna would fail the trial at Ctrl-C
    SWEEP.mkdir(exist_ok=True)
    storage = optuna.storages.JournalStorage(JournalFileBackend(str(SWEEP / "journal")))
    study = optuna.create_study(study_name="digits", storage=storage, direction="maximize", load_if_exists=True)
    for trial in study.get_trials(states=[TrialState.RUNNING]):
        if trial.user_attrs.get("worker") == WORKER:
            study.tell(trial.number, state=TrialState.FAIL)
            study.enqueue_trial(trial.params, user_attrs={"first": trial.user_attrs.get("first", trial.number)})
    while len(study.get_trials(states=[TrialState.COMPLETE, TrialState.PRUNED])) < NUM_TRIALS:
        study.optimize(try_values, n_trials=1)
