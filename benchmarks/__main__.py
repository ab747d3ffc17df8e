"""Measure ringtrain against plain Horovod and others.

The others are tf.distribute, and processes without communication (an upper bound). It needs an idle machine,
and starts all processes itself. Use no launcher, and start it at the top of a checkout.

    python -m benchmarks step
    python -m benchmarks step --models CNN,WIDE --rounds 15
    python -m benchmarks show results/bench-step.json
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.children import clean_environment
from benchmarks.contenders import Experiment
from benchmarks.origin import describe_commit, describe_machine, find_claimed_cores, read_load, shorten
from benchmarks.plans import PLANS, SETTINGS_CONTENDERS
from benchmarks.rounds import Runner, find_faults, measure
from benchmarks.settings import BenchOptions, choose_settings
from benchmarks.steps import FIT_CONTENDERS, LOOP_GOALS, OTHER, STEP_CONTENDERS
from benchmarks.table import describe_result, make_page, read_result, read_results
from benchmarks.writing import explaining_files
from ringtrain.cli import run_command
from ringtrain.commands.parser import parse_arguments
from ringtrain.commands.preparing import refuse_launcher
from ringtrain.errors import UsageError
from ringtrain.files.atomic import replace_text
from ringtrain.files.outputs import require_same_kind
from ringtrain.messages.defects import describe_defect
from ringtrain.messages.escaping import escape, escape_block
from ringtrain.runtime.machine import read_machine
from ringtrain.runtime.world import World

CONTENDERS = {
    "step": STEP_CONTENDERS,
    "fit": FIT_CONTENDERS,
    "settings": SETTINGS_CONTENDERS,
}  # of the modes that let one choose
MODES = tuple(PLANS)
FORMAT = 1
PAGE = Path("results/README.md")
# Errors of reading a file that is missing or no result.
NO_RESULT = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError)


@dataclass(frozen=True)
class Options(BenchOptions):
    mode: str
    """step, fit, loop, allreduce, input, startup, checkpoint, guards, settings, all, show, or page"""

    file: Path | None = None
    """for show: a result file"""


def main(arguments: Sequence[str], world: World) -> int:
    options = Options(**parse_arguments(Options, arguments, world))
    refuse_launcher("benchmarks", world)
    print_line = functools.partial(print, flush=True)
    if options.mode == "show" and options.file is not None:
        show(options.file, print_line)
        return 0
    if options.mode == "page" and options.file is None:
        write_page(print_line)
        return 0
    if options.mode not in (*MODES, "all") or options.file is not None:
        raise UsageError(
            f"there is no benchmark {options.mode}{' FILE' if options.file else ''}; there are {', '.join(MODES)} and "
            "all, show FILE and page."
        )
    return bench(options.mode, options, arguments, print_line)


def bench(mode: str, options: BenchOptions, arguments: Sequence[str], print_line: Callable[[str], None]) -> int:
    """Return 1 if a contender failed or its result was wrong."""
    if mode == "all" and options.output is not None:
        raise UsageError("all writes a file for each mode into results/; leave --output out.")
    if mode == "all" and options.contenders:
        raise UsageError("all measures all contenders; leave --contenders out.")
    modes = []
    for name in MODES if mode == "all" else [mode]:
        obstacle = find_obstacle(name, options)
        if not obstacle:
            modes.append(name)
        elif mode == "all":
            print_line(f"{name} is left out: {obstacle}")
        else:
            raise UsageError(obstacle)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # on whose way out children are ended
    print_line(f"the orders within the rounds are drawn with seed {options.seed}")
    for core in find_claimed_cores():
        print_line(f"warning: another run of ringtrain has core {core}: the figures will say nothing")
    return max([bench_one(name, options, arguments, print_line) for name in modes])


def find_obstacle(mode: str, options: BenchOptions) -> str:
    """Return a message, or an empty string."""
    if mode == "input" and options.data_dir is None:
        return "input needs --data_dir DIR with CIFAR-10's files."
    if mode == "loop" and not LOOP_GOALS.keys() & set(options.model_names):
        return f"models is {options.models!r}; loop measures {' and '.join(LOOP_GOALS)} alone. Choose one of them."
    if options.size == 1 and mode != "step":
        return f"size is 1; step alone says something about one rank, {mode} needs at least 2."
    if options.other_python is not None and mode != "step":
        return f"other_python is {str(options.other_python)!r}; step alone measures another environment."
    if options.contender_names and (OTHER in options.contender_names) != (options.other_python is not None):
        return f"--other_python and the contender {OTHER} go together; give both, or none of them."
    has = CONTENDERS.get(mode)
    for name in options.contender_names:
        if has is None:
            return f"contenders is {options.contenders!r}; they are chosen in step, fit and settings alone."
        if name not in has:
            return f"contenders names {name!r}; {mode} has {', '.join(has)}."
    return ""


def bench_one(mode: str, options: BenchOptions, arguments: Sequence[str], print_line: Callable[[str], None]) -> int:
    command = " ".join(["python -m benchmarks", *(shorten(word) for word in arguments)])
    experiments = PLANS[mode](options, choose_settings(options.size, read_machine(os.environ)))
    output = options.output or Path("results") / f"bench-{mode}.json"
    return run_experiments(experiments, options, command, output, print_line)


def run_experiments(
    experiments: Sequence[Experiment],
    options: BenchOptions,
    command: str,
    output: Path,
    print_line: Callable[[str], None],
) -> int:
    """Measure, write the file, and show the table; ``command``: as typed."""
    env = clean_environment(os.environ, programs=Path(sys.executable).parent)
    require_programs(experiments, env["PATH"])
    require_same_kind(output, b'"experiments"', kind="a result of the benchmarks")
    with explaining_files(output):
        output.parent.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {
        "format": FORMAT,
        "command": command,
        **describe_commit(),
        "machine": describe_machine(),
        "claimed_cores": find_claimed_cores(),
        "size": options.size,
        "seed": options.seed,
        "load_before": read_load(),
        "load_after": [],
        "experiments": [],
    }
    with tempfile.TemporaryDirectory(prefix="ringtrain-bench-") as directory:
        runner = Runner(Path(directory), env=env, timeout=options.timeout)
        for experiment in experiments:
            result["experiments"].append({})

            def note(measured: Mapping[str, Any]) -> None:
                result["experiments"][-1] = measured
                result["load_after"] = read_load()
                with explaining_files(output):
                    replace_text(output, json.dumps(result, indent=1) + "\n")
                print_line(describe_last_run(measured))

            measure(experiment, runner, rounds=options.rounds, seed=options.seed, note=note)
    show(output, print_line)
    return 1 if find_faults(result) else 0


def require_programs(experiments: Sequence[Experiment], search_path: str) -> None:
    """For example horovodrun is missing without Horovod."""
    contenders = [each for experiment in experiments for each in experiment.contenders]
    for contender, program in [(each.name, command.argv[0]) for each in contenders for command in each.commands]:
        if shutil.which(program, path=search_path) is None:
            raise UsageError(
                f"the contender {contender} needs {program}, which is not in PATH. Install it (make setup), or choose "
                "others with --contenders."
            )


def show(path: Path, print_line: Callable[[str], None]) -> None:
    try:
        lines = describe_result(read_result(path))
    except NO_RESULT as error:
        raise UsageError(
            f"{str(path)!r} is no result file of the benchmarks ({describe_defect(error)}). Check the path."
        ) from error
    for line in lines:
        print_line(escape_block(line))
    print_line(escape(str(path)))


def write_page(print_line: Callable[[str], None]) -> None:
    """Use ``results`` below the current directory."""
    try:
        results = read_results(Path("results"))
        page = make_page(results)
    except NO_RESULT as error:
        raise UsageError(
            f"results/ holds a file that is no result of the benchmarks ({describe_defect(error)})."
        ) from error
    if not results:
        raise UsageError(
            "there is no results/bench-MODE.json here. Measure first, or go to the directory of the repository."
        )
    with explaining_files(PAGE):
        PAGE.parent.mkdir(parents=True, exist_ok=True)
        PAGE.write_text(page, encoding="utf-8")
    print_line(f"{PAGE}: {', '.join(results)}")


def describe_last_run(measured: Mapping[str, Any]) -> str:
    if not measured["rounds"]:
        run = measured["reference"]
        return f"{measured['name']}, reference: {run['fault'] or run['checked'] or 'done'}"
    current = measured["rounds"][-1]
    name, run = list(current["runs"].items())[-1]
    figures = run.get("figures", {})
    text = f"{1000 * next(iter(figures.values())):.4g} ms" if len(figures) == 1 else f"{len(figures)} figures"
    return f"{measured['name']}, round {current['round']}, {name}: {run['fault'] or f'{text}; ' + run['checked']}"


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:], program="benchmarks"))
