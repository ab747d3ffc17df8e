"""Check the installation, and report what to fix.

Under a launcher it also says whether its ranks can work together.

    python -m ringtrain doctor
    horovodrun -np 2 python -m ringtrain doctor
    python -m ringtrain doctor --workload my_workload.py --batch_size auto
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Literal, NoReturn

from ringtrain import __version__
from ringtrain.collectives.timing import time_all_reduce
from ringtrain.commands.parser import parse_arguments
from ringtrain.doctor.facts import PAYLOAD_BYTES, SHORT_BYTES, AllReduce, Facts, facts_from_plain
from ringtrain.doctor.inside import shorten
from ringtrain.doctor.judging import Finding, can_join, judge
from ringtrain.doctor.probes import LOAD_SECONDS, gather_facts
from ringtrain.doctor.ranks import judge_ranks
from ringtrain.doctor.table import exit_code, format_table
from ringtrain.errors import RingtrainError, UsageError
from ringtrain.messages.rules import at_least
from ringtrain.runtime.devices import can_share_gpus, own_gpu, start_tensorflow
from ringtrain.runtime.stopping import StopRequests
from ringtrain.runtime.time_limit import TimeLimit
from ringtrain.runtime.world import World
from ringtrain.terminal.console import open_console
from ringtrain.terminal.startup import quiet_start
from ringtrain.training.ending import report_end
from ringtrain.training.joining import pin

if TYPE_CHECKING:
    from ringtrain.collectives import Collective

# For joining and all checks.
TOGETHER_SECONDS = LOAD_SECONDS + 120.0


@dataclass(frozen=True, kw_only=True)
class Options:
    batch_size: Literal["none", "auto"] = "none"
    """auto, with the flags of a training: find the largest batch of a rank that fits into memory, by trying"""

    ranks_per_node: int = 1
    """for batch_size: ranks that share the memory of this node"""


def main(arguments: Sequence[str], world: World) -> int:
    """Return 0 if training would work, else 2."""
    own, flags = split(arguments)
    options = Options(**parse_arguments(Options, own if own and "--help" not in flags else arguments, world))
    if options.batch_size == "auto":
        return find_batch_size(options, flags, world)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # exit silently at Ctrl-C
    keras_backend = os.environ.get("KERAS_BACKEND")
    os.environ["KERAS_BACKEND"] = "tensorflow"  # a wrong backend is reported, and does not stop the checks
    if world.size == 1:
        return show(world, judge(gather_facts(world, os.environ, keras_backend=keras_backend)))
    findings: list[Finding] = []
    with ending_in_time(lambda reason: last_words(reason, world, findings)) as said:
        facts = gather_facts(world, os.environ, keras_backend=keras_backend)
        findings += judge(facts)
        if not can_join(facts):
            leave_alone(world, findings, said)
        return meet(facts, said)


def find_batch_size(options: Options, flags: Sequence[str], world: World) -> int:
    from ringtrain.commands.preparing import Settings, check_settings, refuse_launcher
    from ringtrain.doctor.batch_size import advise, find_limit

    refuse_launcher("doctor --batch_size auto", world)
    at_least("ranks_per_node", options.ranks_per_node, 1)
    config = check_settings(parse_arguments(Settings, flags, world))
    for line in advise(flags, config, limit=find_limit() // options.ranks_per_node):
        print(line)
    return 0


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words for the doctor, and those for a training."""
    own, rest, names = list[str](), list(arguments), Options.__dataclass_fields__
    for number in reversed(range(len(rest))):
        flag, has_value, _ = rest[number].partition("=")
        if flag.removeprefix("--") in names:
            end = number + (1 if has_value else 2)
            own, rest = rest[number:end] + own, rest[:number] + rest[end:]
    return own, rest


def meet(facts: Facts, said: threading.Event) -> int:
    from ringtrain.collectives import connect, with_native_sums

    world = facts.world
    try:
        plan = pin(world)
        with quiet_start():
            import tensorflow as tf

            try:
                device = start_tensorflow(plan, world)  # of which ``own_gpu`` asks
                facts = replace(facts, device=device, gpu=None if can_share_gpus(os.environ) else own_gpu())
            except UsageError as error:  # use the CPU, and report it
                tf.config.set_visible_devices([], "GPU")
                facts = replace(facts, device_failure=str(error))
        collective = with_native_sums(connect("auto", world))
        code = share(collective, facts, said)
    except Exception as error:  # Horovod and MPI raise many types
        why, remedy = str(error), ""
        if not isinstance(error, RingtrainError):
            why = shorten(f"{type(error).__name__}: {error}")
            remedy = "mend what is broken above; if nothing is, try horovodrun --gloo"
        leave_alone(world, [*judge(facts), Finding("broken", why, remedy, subject="joining")], said)
    collective.close()
    if code:  # os._exit: the launcher may otherwise end this rank during Python's cleanup, with another code
        leave(code)
    return code


def share(collective: Collective, facts: Facts, said: threading.Event) -> int:
    """Gather facts, time sums, and share rank 0's exit code. Collective."""
    import tensorflow as tf

    from ringtrain.collectives import all_gather_object, run_on_rank0

    with tf.device("CPU:0"):  # some ranks may have no GPU
        ranks = list(map(facts_from_plain, all_gather_object(collective, asdict(facts), name="doctor/facts")))
    on_gpus = all(item.device.startswith("GPU") for item in ranks)
    with tf.device("GPU:0" if on_gpus else "CPU:0"):
        seconds, wrong = time_all_reduce(collective, PAYLOAD_BYTES)
        short_seconds, short_wrong = time_all_reduce(collective, SHORT_BYTES)
    result = AllReduce(collective.description, seconds, short_seconds, is_right=wrong + short_wrong == 0)

    def show_all() -> int:
        said.set()
        return show(collective.world, judge_ranks(ranks, result))

    with tf.device("CPU:0"):
        code: int = run_on_rank0(collective, show_all, name="doctor/verdict")
    return code


def leave_alone(world: World, findings: list[Finding], said: threading.Event) -> NoReturn:
    """Exit without the other ranks: rank 0 shows its table, others a line, later."""
    if world.is_rank0:
        said.set()
        show(world, findings, complete=False)
    else:
        broken = [item for item in findings if item.status == "broken"]
        message = " ".join(f"{item.subject}: {item.text.rstrip('.')}. {item.remedy}".strip() for item in broken)
        report_end(UsageError(message), world)
    leave(2)


def leave(code: int) -> NoReturn:
    """Exit at once: Horovod's and MPI's exits wait for other ranks."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def last_words(reason: str, world: World, findings: list[Finding]) -> None:
    if world.is_rank0:
        remedy = "see what the others say, and run python -m ringtrain doctor on each node by itself"
        show(world, [*findings, Finding("broken", reason, remedy, subject="joining")], complete=False)


def show(world: World, findings: list[Finding], *, complete: bool = True) -> int:
    ranks = f"{world.size} ranks, started by {world.launcher}" if world.size > 1 else f"one process, {world.launcher}"
    scope = "" if complete or world.size == 1 else "; what rank 0 found"
    title = f"ringtrain {__version__} doctor on {world.node}: {ranks}{scope}"
    console = open_console(is_rank0=world.is_rank0)
    console.block(format_table(title, findings, colour=console.is_terminal and "NO_COLOR" not in os.environ))
    return exit_code(findings)


@contextlib.contextmanager
def ending_in_time(speak: Callable[[str], None]) -> Iterator[threading.Event]:
    """Exit with code 2 if the launcher stops this process or ranks do not join in time, unless the event is set."""
    said = threading.Event()
    too_long = f"the ranks did not meet in {TOGETHER_SECONDS:.0f} s"

    def end(reason: str) -> None:
        if not said.is_set():
            said.set()
            speak(too_long if reason == too_long else "another rank ended first")
        leave(2)

    with StopRequests() as requests:
        requests.watch_time([TimeLimit(TOGETHER_SECONDS, too_long)])
        requests.start_training(end)
        yield said
        said.set()
