"""End of a job's ranks: requeue the job, or report why not and how it ended."""

from __future__ import annotations

import contextlib
import enum
import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, NoReturn

from ringtrain.errors import STATUS_WORDS, PreemptedError, UsageError
from ringtrain.files.atomic import replace_text
from ringtrain.files.bounded import open_regular, read_bounded
from ringtrain.run.directory import read_config
from ringtrain.runtime.run_record import DIRECTORY_VARIABLE, EndRecord, StartRecord, clear, read_end, read_run

from .. import PROGRAM
from ..decision import FINAL_CODES
from ..lines import print_line
from .controller import ask, submit

# Restarts under earlier job numbers, at sites that refuse to requeue.
RESTARTS_VARIABLE = "RINGTRAIN_LAUNCH_RESTARTS"
# Variables that Slurm's programs read, apart from SBATCH_*.
SLURMS_OWN = {"SLURM_CONF", "SLURM_CLUSTERS"}
# Failed starts since the latest checkpoint.
FAILURES_FILE = "failures"
TAIL_BYTES = 256 * 1024
LOST_SECONDS, LOST_POLL_SECONDS = 30.0, 2.0
START_LINE = re.compile(r"^launch: job \d+, restart \d+, on ", re.MULTILINE)
FAILED = (
    # srun: "srun: error: n1: task 3: Killed", "srun: error: n2: tasks 0-3: Exited with exit code 1"
    re.compile(r"^srun: error: (?P<node>\S+): (?P<who>tasks? [\d,-]+): (?P<how>.+)$", re.MULTILINE),
    # Open MPI: "mpirun noticed that process rank 1 with PID 7 on node n1 exited on signal 9 (Killed)."
    re.compile(r"process (?P<who>rank \d+) with PID \d+ on node (?P<node>\S+) exited on (?P<how>signal \d+ \(.*\))"),
)
# Exits on request, even before the signal was handled.
ORDERLY = re.compile(r"exit code 75$|Terminated|User defined signal 1")
# On separate lines: job names may contain anything.
STATE_LINE = re.compile(r"^ +JobState=(\w+) Reason=(\S+)", re.MULTILINE)
RESTARTS_LINE = re.compile(r"^ +Requeue=\d+ Restarts=(\d+)", re.MULTILINE)


class JobState(enum.Enum):
    """States that need no action."""

    ENDING = "cancelled, or requeued by Slurm itself"
    STARTED_AGAIN = "started again by Slurm itself after a lost node"


class FailedRank(NamedTuple):
    who: str
    node: str
    how: str

    def __str__(self) -> str:
        return f"{self.who} on {self.node}: {self.how}"

    @property
    def was_told_to_stop(self) -> bool:
        return ORDERLY.search(self.how) is not None


@dataclass(frozen=True, kw_only=True)
class Ended:
    status: int  # of srun or horovodrun
    end: EndRecord | None
    run: StartRecord | None  # None: no run directory was opened
    newest_step: int | None  # of the latest checkpoint
    state: JobState | None  # None: no action by Slurm
    failed_rank: FailedRank | None
    restarts: int
    max_requeues: int
    failures: int = 0  # earlier failed starts since the latest checkpoint
    max_restarts: int = 0  # after failures without a newer checkpoint
    begins_anew: bool = False  # resume: never
    lost_nodes: Sequence[str] = ()  # if the job can do without them

    @property
    def exit_code(self) -> int:
        """The run's, else srun's: the highest of all tasks."""
        if self.end is not None and not self.has_lost_rank:
            return self.end.exit_code
        return self.status or (0 if self.is_in_good_order else 1)

    @property
    def is_in_good_order(self) -> bool:
        """srun returns 0 even after it lost a node."""
        is_over = self.run is None or self.run.is_complete
        return self.status == 0 and is_over and not self.state

    @property
    def has_lost_rank(self) -> bool:
        """True if the launcher stopped the others after a rank's failure."""
        was_told_to_stop = self.end is not None and self.end.exit_code == PreemptedError.exit_code
        return was_told_to_stop and self.failed_rank is not None and not self.failed_rank.was_told_to_stop

    @property
    def has_saved(self) -> bool:
        return self.end is not None and self.end.exit_code == PreemptedError.exit_code and not self.has_lost_rank

    @property
    def first_step(self) -> int:
        return self.run.step if self.run else 0

    @property
    def has_newer_checkpoint(self) -> bool:
        return (self.newest_step or 0) > self.first_step

    @property
    def failures_since_checkpoint(self) -> int:
        if self.has_saved:
            return 0
        return 1 if self.has_newer_checkpoint else self.failures + 1


def conclude(ended: Ended) -> str:
    why_not = why_not_again(ended)
    again = f"The job starts again: restart {ended.restarts + 1} of at most {ended.max_requeues}"
    if ended.lost_nodes:
        again = "The ranks start again on the other nodes"
    if not ended.has_saved:
        again += f", {ended.failures_since_checkpoint} of at most {ended.max_restarts} from {describe_newest(ended)}"
    return f"{describe_end(ended)} {f'{again}.' if why_not is None else why_not}".strip()


def why_not_again(ended: Ended) -> str | None:
    """Empty if obvious; None: restart."""
    end = ended.end
    if not ended.has_saved and ended.exit_code in FINAL_CODES:
        return ""
    if end is not None and ended.has_saved and end.stopped_by not in ("signal", "time"):
        return "Not started again, as somebody wanted it to stop."
    if ended.state:
        return f"Not started again by this script: the job is {ended.state.value}."
    if not ended.has_saved and not ended.max_restarts:
        return ""
    if ended.begins_anew:
        return "Not started again: the settings say resume: never, so that it would start from the beginning."
    if ended.restarts >= ended.max_requeues and not ended.lost_nodes:
        return (
            f"Not started again: {ended.restarts} restarts are behind it, and --max_requeues is {ended.max_requeues}."
        )
    if ended.has_saved and ended.restarts and not ended.has_newer_checkpoint:
        return (
            f"Not started again: this restart has got no further than step {ended.first_step}, where it began, and the "
            "next one would not either. Ask for more --time, or look above for what took it."
        )
    if ended.run is None and end is None:
        return "Not started again: no run directory was opened, so that there is nothing to resume."
    if ended.failures_since_checkpoint > ended.max_restarts:
        return (
            f"Not started again: {ended.failures_since_checkpoint} starts have failed since {describe_newest(ended)}, "
            f"and --max_restarts is {ended.max_restarts}. A smaller --checkpoint_every saves more often."
        )
    return None


def describe_newest(ended: Ended) -> str:
    return f"the checkpoint of step {ended.newest_step}" if ended.newest_step else "the beginning"


def describe_end(ended: Ended) -> str:
    end = ended.end
    if ended.lost_nodes:
        return f"lost {', '.join(ended.lost_nodes)}: {describe_end(replace(ended, lost_nodes=()))}"
    if end is not None and not ended.has_lost_rank:
        if end.status == "completed":
            return "the run is complete."
        why = (end.message or "").partition("\n")[0]  # printed above
        return (
            f"the run ended with exit code {end.exit_code} ({STATUS_WORDS.get(end.status, end.status)}). {why}".strip()
        )
    if ended.is_in_good_order:
        return "the run had been completed before." if ended.run else "all ranks ended in good order."
    first = f" The first to fail was {ended.failed_rank}." if ended.failed_rank else ""
    how = f"the ranks ended with {describe_status(ended.status)}, and the run did not say why.{first}"
    if ended.state is JobState.STARTED_AGAIN:
        return how
    way_on = "" if ended.begins_anew else " The same command resumes from the newest checkpoint."
    return f"{how} See above for what it printed.{way_on}"


def describe_status(status: int) -> str:
    try:
        return f"exit code {status} ({signal.Signals(status - 128).name})"
    except ValueError:
        return f"exit code {status}"


def read_state(description: str, *, restarts: int) -> JobState | None:
    """Parse ``scontrol show job``; None for anything else.

    A COMPLETING job can still be requeued. Reason TimeLimit: no user cancelled. After a lost node this script may
    overlap the job's next start; the restart count then exceeds ``restarts``.
    """
    state = STATE_LINE.search(description)
    counted = RESTARTS_LINE.search(description)
    if state is None or counted is None:
        return None
    if int(counted[1]) > restarts:
        return JobState.STARTED_AGAIN
    is_wished = state[1] not in ("RUNNING", "TIMEOUT") and state[2] != "TimeLimit"
    return JobState.ENDING if is_wished else None


def find_failed_rank(output: str) -> FailedRank | None:
    starts = [match.end() for match in START_LINE.finditer(output)]
    matches = [match for pattern in FAILED if (match := pattern.search(output, starts[-1] if starts else 0))]
    first = min(matches, key=lambda match: match.start(), default=None)
    return FailedRank(first["who"], first["node"], first["how"]) if first else None


def read_output() -> str:
    try:
        with open_regular(Path(os.readlink("/proc/self/fd/2"))) as file:
            file.seek(-min(TAIL_BYTES, os.fstat(file.fileno()).st_size), os.SEEK_END)
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def count_restarts(environ: Mapping[str, str]) -> int:
    """Count those under earlier job numbers too."""
    return sum(int(environ.get(name) or 0) for name in ("SLURM_RESTART_COUNT", RESTARTS_VARIABLE))


def follow_up(
    *,
    status: int,
    script: Path,
    max_requeues: int,
    max_restarts: int,
    spare_nodes: int = 0,
    lost_nodes: Sequence[str] = (),
) -> int:
    job = os.environ.get("SLURM_JOB_ID")
    told = os.environ.get(DIRECTORY_VARIABLE)
    if not job or not told:
        raise UsageError(
            f"SLURM_JOB_ID or {DIRECTORY_VARIABLE} is not set; `launch slurm after` is the last line of a batch "
            f"script. Make one with: {PROGRAM} slurm render"
        )
    directory = Path(told)
    ended = look(directory, status=status, max_requeues=max_requeues, max_restarts=max_restarts)
    may_replace = not ended.has_saved and why_not_again(replace(ended, lost_nodes=["any"])) is None
    if len(lost_nodes) < spare_nodes and may_replace:
        lost = wait_for_lost_nodes(lost_nodes)
        ended = replace(ended, lost_nodes=lost if len(lost) <= spare_nodes else ())
    print_line(conclude(ended))
    if why_not_again(ended) is None:
        if ended.lost_nodes:
            start_in_place(job, script, ended, told=directory)
        start_again(job, script, ended, told=directory)
    if ended.state is not JobState.STARTED_AGAIN:  # ranks on the lost node may still report
        first = directory.with_name(f"{job}-{count_requeues()}")
        for start in (first, *directory.parent.glob(f"{first.name}.*")):
            forget(start)
    return ended.exit_code


def wait_for_lost_nodes(known: Sequence[str]) -> Sequence[str]:
    """Return the lost nodes of the job, if there are others than the known; else nothing, after ``LOST_SECONDS``."""
    end = time.monotonic() + LOST_SECONDS
    while time.monotonic() < end:
        nodes = f"--nodes={os.environ['SLURM_JOB_NODELIST']}"  # such as n[1-4]
        answer = ask(["sinfo", "--noheader", "--Node", nodes, "--states=down,fail,no_respond", "--format=%N"])
        lost = answer.text.split() if answer.is_good else []
        if not set(lost) <= set(known):
            return sorted({*known, *lost})
        time.sleep(LOST_POLL_SECONDS)
    return ()


def forget(directory: Path) -> None:
    """Remove a launch directory, which the next start would misread."""
    with contextlib.suppress(OSError):
        clear(directory)
        (directory / FAILURES_FILE).unlink(missing_ok=True)
        directory.rmdir()


def read_failures(directory: Path) -> int:
    try:
        return int(read_bounded(directory / FAILURES_FILE, 20))
    except (OSError, ValueError):
        return 0


def write_failures(directory: Path, failures: int) -> None:
    if failures:
        with contextlib.suppress(OSError):
            directory.mkdir(exist_ok=True)
            replace_text(directory / FAILURES_FILE, str(failures))


def look(told: Path, *, status: int, max_requeues: int, max_restarts: int) -> Ended:
    from ringtrain.run.store import list_steps

    run = read_run(told)
    return Ended(
        status=status,
        end=read_end(told),
        run=run,
        newest_step=max(list_steps(run.path / "checkpoints"), default=None) if run else None,
        state=ask_state(),
        failed_rank=find_failed_rank(read_output()) if status else None,
        restarts=count_restarts(os.environ),
        max_requeues=max_requeues,
        failures=read_failures(told),
        max_restarts=max_restarts,
        begins_anew=begins_anew(run),
    )


def ask_state() -> JobState | None:
    return read_state(ask(["scontrol", "show", "job", name_job()]).text, restarts=count_requeues())


def name_job() -> str:
    """As scontrol takes it: the number of one run of an array may mean the whole array."""
    job, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{job}_{task}" if job and task else os.environ["SLURM_JOB_ID"]


def count_requeues() -> int:
    return int(os.environ.get("SLURM_RESTART_COUNT") or 0)


def begins_anew(run: StartRecord | None) -> bool:
    try:
        return run is not None and (read_config(run.path) or {}).get("resume") == "never"
    except UsageError:
        return False


def start_in_place(job: str, script: Path, ended: Ended, *, told: Path) -> NoReturn:
    """Run the script again, with the lost nodes as arguments."""
    write_failures(told.with_name(f"{job}-{count_requeues()}.{len(ended.lost_nodes)}"), ended.failures_since_checkpoint)
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGPIPE, signal.SIGXFSZ):  # ignored by the script or Python
        signal.signal(number, signal.SIG_DFL)
    os.execvp("bash", ["bash", str(script), *ended.lost_nodes])


def start_again(job: str, script: Path, ended: Ended, *, told: Path) -> None:
    """Requeue the job; if refused, submit its script again, as a dependent job."""
    failures = ended.failures_since_checkpoint
    next_start = told.with_name(f"{job}-{count_requeues() + 1}")
    write_failures(next_start, failures)  # first: the requeue ends this program
    requeue = ask(["scontrol", "requeue", name_job()])
    if requeue.is_good or ask_state():
        return  # if the answer was lost: a second job would train the same run
    forget(next_start)
    print_line(f"scontrol does not requeue job {job}: {requeue.text}. Submitting its script again.")
    kept = [name for name in os.environ if not name.startswith("SLURM_") or name in SLURMS_OWN]
    environ = {name: os.environ[name] for name in kept} | {RESTARTS_VARIABLE: str(ended.restarts + 1)}
    task = os.environ.get("SLURM_ARRAY_TASK_ID")
    array = [f"--array={task}"] if task else []
    answer = submit(f"--dependency=afterany:{name_job()}", *array, str(script), environ=environ)
    if answer.is_good:
        write_failures(told.with_name(f"{answer.text}-0"), failures)
        print_line(
            f"job {answer.text} continues when this one has ended. Follow it in the output file with that number."
        )
    else:
        print_line(f"sbatch refused the script as well: {answer.text}. The job does not continue: submit it again.")
