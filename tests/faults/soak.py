"""Train for an hour under faults, and see that nothing differs from a run that nobody disturbed.

    python -m tests.faults.soak --minutes 60 --out results/soak.json

Every 20 to 60 s something ends the run: a rank, all ranks or the launcher are killed, a rank is stopped, a save is cut
off, or the run is asked to leave, as a scheduler does before it requeues a job. Then the same command is started again,
under another launcher now and then. All moments come from one seed, which is printed first and kept in the result.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults.summary import describe_commit
from tests.world.fork_server import hand_on_no_ignored_signals
from tests.world.running import Run, assert_history_is_whole, digest, events, final_checkpoint, last_step, running

STEPS_PER_EPOCH = 8  # of tests/world/workloads/lasting.py
STEP_SECONDS = 0.3
TRAINED_SHARE = 0.6  # of the time; the rest goes into starts, and steps that are trained again
HANG_TIMEOUT = 15
SHORTEST_SECONDS, LONGEST_SECONDS = 20.0, 60.0
START_SECONDS = 180.0
FORGOTTEN_STEPS = 15  # after which each rank knows that the others' first step, which may take long, is done
END_SECONDS = 120.0
LAUNCH = [sys.executable, "-m", "launch", "local", "-np", "2"]
STARTS: dict[str, list[str] | None] = {
    "mpirun": None,
    "launch": [*LAUNCH, "--"],
    "launch over Gloo": [*LAUNCH, "--controller", "gloo", "--"],
}


def kill_rank(run: Run, generator: random.Random) -> None:
    run.signal_rank(generator.randrange(2), signal.SIGKILL)


def kill_all(run: Run, generator: random.Random) -> None:
    run.kill()


def kill_launcher(run: Run, generator: random.Random) -> None:
    run.send((run.pids_of("mpirun") + run.pids_of("horovodrun"))[:1], signal.SIGKILL)


def kill_in_save(run: Run, generator: random.Random) -> None:
    run.wait_for_save()
    run.kill()


def stop_rank(run: Run, generator: random.Random) -> None:
    """While it trains: before the first step a rank may take ten minutes, and so would the answer."""
    first = events(run.out, "start")[-1]["first_step"]
    wait_until(run, lambda: last_step(run.out) > first + FORGOTTEN_STEPS)
    run.signal_rank(generator.randrange(2), signal.SIGSTOP)


def ask_rank(run: Run, generator: random.Random) -> None:
    run.signal_rank(generator.randrange(2), generator.choice([signal.SIGUSR1, signal.SIGTERM]))


def ask_by_file(run: Run, generator: random.Random) -> None:
    (run.out / "stop").touch()


FAULTS: dict[str, Callable[[Run, random.Random], None]] = {
    "a rank killed": kill_rank,
    "all processes killed": kill_all,
    "the launcher killed": kill_launcher,
    "killed inside a save": kill_in_save,
    "a rank stopped": stop_rank,
    "asked to leave by a signal, and requeued": ask_rank,
    "asked to leave by a file, and requeued": ask_by_file,
}


def main() -> int:
    hand_on_no_ignored_signals()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--out", type=Path, help="JSON file to write the result to")
    options = parser.parse_args()
    print(f"seed {options.seed}, {options.minutes:g} minutes", flush=True)
    with tempfile.TemporaryDirectory(prefix="ringtrain-soak-") as directory:
        result = soak(Path(directory), minutes=options.minutes, seed=options.seed)
    print(json.dumps(result, indent=1))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def soak(directory: Path, *, minutes: float, seed: int) -> dict[str, Any]:
    """Disturb a run for a while, let it end, and compare it with one that was left alone.

    Raises:
        AssertionError: they differ, or a start did not get as far as a step.
    """
    epochs = max(4, int(minutes * 60 * TRAINED_SHARE / STEP_SECONDS / STEPS_PER_EPOCH))
    steps = epochs * STEPS_PER_EPOCH
    flags = ["--epochs", str(epochs), "--checkpoint_every", "20", "--eval_every_epochs", "25"]
    flags += ["--deterministic", "true", "--hang_timeout", str(HANG_TIMEOUT)]
    out, undisturbed = directory / "disturbed", directory / "undisturbed"
    generator = random.Random(seed)
    began = time.monotonic()
    counts: collections.Counter[str] = collections.Counter()
    while time.monotonic() - began < minutes * 60 and last_step(out) < steps:
        counts[disturb(out, flags, generator)] += 1
        seconds = time.monotonic() - began
        print(f"{seconds:5.0f} s: step {last_step(out)} of {steps}, {sum(counts.values())} faults", flush=True)
    disturbed_seconds = time.monotonic() - began
    for path in (out, undisturbed):
        with running(path, *flags) as run:
            assert run.wait(1800) == 0, run.text()
    assert digest(final_checkpoint(out, steps)) == digest(final_checkpoint(undisturbed, steps)), f"seed {seed}"
    assert_history_is_whole(out, epochs=epochs, steps=steps)
    losses = [[(event["step"], event["loss"]) for event in events(path, "train")] for path in (out, undisturbed)]
    assert losses[0] == losses[1], f"seed {seed}"
    return {
        "command": f"python -m tests.faults.soak --minutes {minutes:g} --seed {seed}",
        "commit": describe_commit(),
        "seed": seed,
        "disturbed_minutes": round(disturbed_seconds / 60, 1),
        "faults": dict(sorted(counts.items())),
        "starts": len(events(out, "start")),
        "steps": steps,
        "epochs": epochs,
        "weights_bit_equal": True,
        "losses_equal": True,
        "each_sample_once_an_epoch": True,
    }


def disturb(out: Path, flags: list[str], generator: random.Random) -> str:
    """Start the run, let it train for a while, and end it by a fault, whose name is returned."""
    launcher = generator.choice(list(STARTS))
    fault = generator.choice(list(FAULTS))
    seconds = generator.uniform(SHORTEST_SECONDS, LONGEST_SECONDS)
    num_starts = len(events(out, "start"))
    env = {"RINGTRAIN_TEST_STEP_SECONDS": str(STEP_SECONDS), "RINGTRAIN_TEST_SAVE_SECONDS": "0.1"}
    with running(out, *flags, start=STARTS[launcher], env=env, log=out.with_name("log")) as run:
        end = time.monotonic() + seconds
        wait_until(run, lambda: len(events(out, "start")) > num_starts and time.monotonic() > end)
        if not run.is_under_way:
            return "none: it was at its end"
        with contextlib.suppress(ValueError, AssertionError):  # it has just ended, or no save comes any more
            FAULTS[fault](run, generator)
        if run.is_under_way:
            run.wait(END_SECONDS)
    return f"{fault} ({launcher})"


def wait_until(run: Run, is_there: Callable[[], bool]) -> None:
    """Wait for something, or for the end of the run."""
    end = time.monotonic() + START_SECONDS
    while run.is_under_way and not is_there():
        assert time.monotonic() < end, run.text()
        time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main())
