"""What follows when the ranks of a job have ended, and what Slurm is asked for then."""

import dataclasses
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from launch.slurm import after, controller
from launch.slurm.after import Ended, FailedRank, JobState, read_failures
from launch.slurm.cli import main
from ringtrain.errors import UsageError
from ringtrain.runtime.run_record import EndRecord, StartRecord
from tests.unit.launch.batch import Site, create_site

RUN = StartRecord(path=Path("/runs/a"), step=100, is_complete=False)
SIGNAL = EndRecord(status="preempted", exit_code=75, message="stopped by SIGUSR1: saved.", stopped_by="signal")
TIME = SIGNAL._replace(message="stopped by the end of Slurm job 7: saved.", stopped_by="time")
FILE = SIGNAL._replace(message="stopped by the file stop: saved.", stopped_by="file")
DATA = EndRecord(status="data", exit_code=3, message="data_dir 'x' holds no images.")
HANG = EndRecord(status="hang", exit_code=6, message="hang detected: no progress for 300 s.")
LOST = EndRecord(status="lostranks", exit_code=1, message="lost rank 1 on n2.")
DONE = EndRecord(status="completed", exit_code=0)
KILLED = FailedRank("task 1", "n2", "Killed")
LEFT = FailedRank("task 0", "n1", "Exited with exit code 75")


def ended(**changes: object) -> Ended:
    """A start that was told to stop by Slurm, and saved."""
    usual = Ended(
        status=75,
        end=SIGNAL,
        run=RUN,
        newest_step=150,
        state=None,
        failed_rank=LEFT,
        restarts=0,
        max_requeues=20,
        max_restarts=3,
    )
    return dataclasses.replace(usual, **changes)  # type: ignore[arg-type]


DECISIONS = [
    # told to stop by Slurm, or by the clock
    (ended(), True, 75, ["stopped by SIGUSR1", "restart 1 of at most 20"]),
    (ended(end=TIME), True, 75, ["the end of Slurm job 7"]),
    (ended(status=143), True, 75, []),
    (ended(status=137), True, 75, []),
    (ended(failed_rank=None), True, 75, []),
    (ended(failed_rank=FailedRank("task 1", "n2", "Terminated")), True, 75, []),
    (ended(restarts=19), True, 75, ["restart 20 of at most 20"]),
    # the first start may be told to stop before its first step; a restart that gets nowhere ends it
    (ended(newest_step=100), True, 75, []),
    (ended(run=None, newest_step=None), True, 75, []),
    (ended(restarts=1, newest_step=100), False, 75, ["no further than step 100", "--time"]),
    (ended(restarts=1, run=None, newest_step=None), False, 75, ["no further than step 0"]),
    (ended(restarts=1, newest_step=101), True, 75, []),
    # bounds, and those who want an end
    (ended(restarts=20), False, 75, ["20 restarts", "--max_requeues is 20"]),
    (ended(max_requeues=0), False, 75, ["--max_requeues is 0"]),
    (ended(end=FILE), False, 75, ["stopped by the file stop", "somebody wanted it to stop"]),
    (ended(end=SIGNAL._replace(stopped_by=None)), False, 75, ["Not started again"]),
    (ended(state=JobState.ENDING), False, 75, ["cancelled"]),
    (ended(state=JobState.STARTED_AGAIN), False, 75, ["started again by Slurm itself"]),
    (ended(status=0, end=None, failed_rank=None, state=JobState.STARTED_AGAIN), False, 1, ["Slurm itself"]),
    # done
    (ended(status=0, end=DONE, failed_rank=None), False, 0, ["the run is complete."]),
    (ended(status=137, end=DONE), False, 0, ["the run is complete."]),
    (ended(status=0, end=None, run=None, failed_rank=None), False, 0, ["in good order"]),
    (ended(status=0, end=None, run=None, failed_rank=None, state=JobState.ENDING), False, 1, ["did not say why"]),
    (ended(status=0, end=None, failed_rank=None), True, 1, ["exit code 0", "did not say why"]),
    (ended(status=0, end=None, failed_rank=None, run=RUN._replace(is_complete=True)), False, 0, ["completed before"]),
    # failed, which may not come again: at most 3 restarts without a newer checkpoint
    (ended(status=6, end=HANG), True, 6, ["(hang)", "restart 1 of at most 20, 1 of at most 3 from the checkpoint of"]),
    (ended(status=143, end=LOST), True, 1, ["exit code 1 (lost a rank). lost rank 1 on n2"]),
    (ended(status=137, end=None, failed_rank=KILLED), True, 137, ["exit code 137 (SIGKILL)", "task 1 on n2: Killed"]),
    (ended(status=137, failed_rank=KILLED), True, 137, ["task 1 on n2: Killed"]),
    (ended(end=HANG, newest_step=None, run=None), True, 6, ["from the beginning"]),
    (ended(end=HANG, failures=2, newest_step=100), True, 6, ["3 of at most 3 from the checkpoint of step 100"]),
    (ended(end=HANG, failures=3, newest_step=100), False, 6, ["4 starts have failed", "--max_restarts is 3"]),
    (ended(end=HANG, failures=3, newest_step=101), True, 6, ["1 of at most 3 from the checkpoint of step 101"]),
    (ended(end=HANG, restarts=20), False, 6, ["--max_requeues is 20"]),
    (ended(end=HANG, max_restarts=0), False, 6, []),
    (ended(end=HANG, begins_anew=True), False, 6, ["resume: never"]),
    (ended(end=HANG, state=JobState.ENDING), False, 6, ["cancelled"]),
    (ended(failures=3), True, 75, ["restart 1 of at most 20."]),  # it has saved: no failure
    (ended(status=1, end=None, run=None, newest_step=None), False, 1, ["no run directory was opened"]),
    # failed with a node, which a spare one replaces: no requeue
    (
        ended(status=137, end=None, lost_nodes=["n2"]),
        True,
        137,
        ["lost n2: the ranks ended with exit code 137", "The ranks start again on the other nodes, 1 of"],
    ),
    (ended(end=LOST, lost_nodes=["n2"], max_requeues=0), True, 1, ["lost n2: the run ended with exit code 1"]),
    (ended(end=LOST, lost_nodes=["n2"], failures=3, newest_step=100), False, 1, ["4 starts have failed"]),
    (ended(end=LOST, lost_nodes=["n2"], state=JobState.ENDING), False, 1, ["cancelled"]),
    # failed for good
    (ended(status=3, end=DATA), False, 3, ["exit code 3 (wrong data)", "holds no images"]),
    (ended(status=137, end=DATA), False, 3, ["holds no images"]),
    (ended(end=DATA._replace(message="the ranks differ:\n  seed ...")), False, 3, ["the ranks differ:"]),
    (ended(begins_anew=True), False, 75, ["resume: never"]),
    (ended(status=1, end=DATA, failed_rank=None), False, 3, ["holds no images"]),
    (ended(status=75, end=None), True, 75, ["exit code 75", "did not say why"]),
    (ended(status=143, end=None, failed_rank=None, state=JobState.ENDING), False, 143, ["SIGTERM", "cancelled"]),
]


@pytest.mark.parametrize(("start", "restarts", "exit_code", "words"), DECISIONS)
def test_the_end_of_a_start_decides_on_restart_and_exit_code(
    start: Ended, restarts: bool, exit_code: int, words: list[str]
) -> None:
    assert (after.why_not_again(start) is None, start.exit_code) == (restarts, exit_code)
    message = after.conclude(start)
    for text in words:
        assert text in message
    assert "\n" not in message


# As Slurm 22.05 prints it.
DESCRIPTION = """\
JobId=7 JobName={name}
   UserId=root(0) GroupId=root(0) MCS_label=N/A
   Priority=4294901758 Nice=0 Account=(null) QOS=(null)
   JobState={state} Reason={reason} Dependency=(null)
   Requeue=1 Restarts={restarts} BatchFlag=1 Reboot=0 ExitCode=0:0
"""


def describe(state: str, reason: str = "None", restarts: int = 0, name: str = "a") -> str:
    return DESCRIPTION.format(state=state, reason=reason, restarts=restarts, name=name)


@pytest.mark.parametrize(
    ("description", "state"),
    [
        (describe("RUNNING"), None),
        (describe("RUNNING", name="   JobState=COMPLETING Reason=x   Requeue=1 Restarts=9"), None),
        (describe("COMPLETING", "TimeLimit"), None),
        (describe("TIMEOUT", "TimeLimit"), None),
        (describe("COMPLETING"), JobState.ENDING),
        (describe("CANCELLED"), JobState.ENDING),
        (describe("RUNNING", restarts=1), JobState.STARTED_AGAIN),
        (describe("PENDING", "BeginTime", restarts=1), JobState.STARTED_AGAIN),
        ("", None),
    ],
)
def test_a_job_s_state_is_read_from_scontrol(description: str, state: JobState | None) -> None:
    assert after.read_state(description, restarts=0) is state


def test_a_job_that_was_requeued_before_counts_as_running() -> None:
    assert after.read_state(describe("RUNNING", restarts=3), restarts=3) is None


# As Slurm 22.05 and Open MPI 4.1 print it.
OUTPUT = """\
launch: job 7, restart 0, on n[1-2]
srun: error: n1: task 0: Exited with exit code 75
launch: job 7, restart 1, on n[1-2]
ringtrain: error: rank 1 on n2: something
srun: error: n2: task 1: Killed
srun: launch/slurm: _step_signal: Terminating StepId=7.0
slurmstepd-n1: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-21T15:00:27 ***
srun: error: n1: task 0: Exited with exit code 75
"""
MPIRUN = "mpirun noticed that process rank 1 with PID 0 on node n2 exited on signal 9 (Killed).\n"


def test_the_first_failed_rank_since_the_last_start_is_found() -> None:
    assert after.find_failed_rank(OUTPUT) == KILLED
    assert after.find_failed_rank(OUTPUT.partition("launch: job 7, restart 1")[0]) == LEFT
    assert after.find_failed_rank(OUTPUT.partition("ringtrain")[0]) is None
    assert after.find_failed_rank(MPIRUN) == FailedRank("rank 1", "n2", "signal 9 (Killed)")
    assert after.find_failed_rank("srun: error: n2: tasks 0-1,3: Exited with exit code 2\n") == FailedRank(
        "tasks 0-1,3", "n2", "Exited with exit code 2"
    )


@pytest.mark.parametrize(
    ("how", "was_told"),
    [
        *((how, True) for how in ("Exited with exit code 75", "Terminated", "signal 15 (Terminated)")),
        ("User defined signal 1", True),
        *((how, False) for how in ("Exited with exit code 175", "Exited with exit code 1", "Killed", "Out Of Memory")),
        ("Segmentation fault (core dumped)", False),
    ],
)
def test_ranks_signalled_to_stop_do_not_count_as_failed(how: str, was_told: bool) -> None:
    assert FailedRank("task 0", "n1", how).was_told_to_stop is was_told


def test_restarts_count_under_all_numbers_of_a_job() -> None:
    assert after.count_restarts({}) == 0
    assert after.count_restarts({"SLURM_RESTART_COUNT": "2", "RINGTRAIN_LAUNCH_RESTARTS": "3"}) == 5


# --- Acting, on programs that write down how they were called ---


SHOW = [b"show", b"job", b"7"]
REQUEUE = ["scontrol", "requeue", "7"]


def set_scontrol(site: Site, requeue: str = "", *, state: str = "RUNNING", restarts: int = 0) -> None:
    """What scontrol does when it is told to requeue, and what it shows."""
    (site.programs / "description").write_text(describe(state, restarts=restarts))
    site.set("scontrol", f'if [ "$1" = show ]; then cat "$CALLS/description"; exit; fi\n{requeue}')


@pytest.fixture
def site(tmp_path: Path) -> Site:
    site = create_site(tmp_path)
    (site.programs / "python").unlink()
    set_scontrol(site)
    site.set("sbatch", 'env >"$CALLS/sbatch.environ"; echo "8;cluster"')
    return site


def follow_up(
    site: Site,
    end: EndRecord | None,
    variables: Mapping[str, str] | None = None,
    *,
    newest_step: int = 150,
    failures: int = 0,
    options: Sequence[str] = (),
) -> tuple[int, list[str]]:
    """What ``launch slurm after`` returns and prints after a run that resumed from step 100."""
    told, run = site.submit / ".launch" / "7-0", site.submit / "runs" / "a"
    told.mkdir(parents=True)
    (run / "checkpoints" / f"step-{newest_step:09d}").mkdir(parents=True)
    if failures:
        (told / "failures").write_text(str(failures))
    (told / "run.json").write_text(json.dumps({"path": str(run), "step": 100, "is_complete": False}))
    if end is not None:
        (told / "end.json").write_text(json.dumps(end._asdict()))
    command = [sys.executable, "-m", "launch", "slurm", "after", "--status", "137", "--script", "slurm_script"]
    root = str(Path(__file__).resolve().parents[3])
    with (site.submit / "job.out").open("a+") as output:
        finished = subprocess.run(
            [*command, "--max_requeues", "20", "--max_restarts", "3", *options],
            cwd=site.submit,
            env={**site.environ, "RINGTRAIN_LAUNCH_DIR": str(told), "PYTHONPATH": root, **(variables or {})},
            stdout=output,
            stderr=output,
        )
        output.seek(0)
        return finished.returncode, output.read().splitlines()


def test_a_run_that_has_saved_is_requeued_once(site: Site) -> None:
    exit_code, lines = follow_up(site, SIGNAL)
    assert (exit_code, len(lines)) == (75, 1)
    assert lines[0].endswith("stopped by SIGUSR1: saved. The job starts again: restart 1 of at most 20.")
    assert site.calls("scontrol") == [SHOW, [b"requeue", b"7"]]
    assert site.calls("sbatch") == []
    assert not (site.submit / ".launch" / "7-0").exists()


LOST_BEFORE = ["--spare_nodes", "2", "--lost_nodes", "n4"]


def test_the_script_runs_again_without_the_lost_nodes(site: Site) -> None:
    site.set("sinfo", "echo n4 n2 n2")
    (site.submit / "slurm_script").write_text('trap "echo USR1" USR1; kill -USR1 $$; echo "again: $*"\n')
    exit_code, lines = follow_up(site, LOST, options=LOST_BEFORE)
    assert (exit_code, site.calls("scontrol")) == (0, [SHOW])
    assert lines[0].startswith("launch: lost n2, n4: the run ended with exit code 1 (lost a rank).")
    assert "The ranks start again on the other nodes, 1 of at most 3 from the " in lines[0]
    assert lines[1:] == ["USR1", "again: n2 n4"]
    assert [call[2] for call in site.calls("sinfo")] == [b"--nodes=n[1-2]"]
    assert read_failures(site.submit / ".launch" / "7-0.2") == 1


@pytest.mark.parametrize("lost", ["n4 n2 n3", ""])
def test_a_job_that_lost_no_or_too_many_nodes_is_requeued(lost: str, site: Site) -> None:
    site.set("sinfo", f"echo {lost}")
    options = LOST_BEFORE if lost else [*LOST_BEFORE[:2], "--lost_nodes"]
    (site.submit / ".launch" / "7-0.1").mkdir(parents=True)
    assert follow_up(site, HANG if lost else SIGNAL, options=options)[0] == (6 if lost else 75)
    assert site.calls("scontrol") == [SHOW, [b"requeue", b"7"]]
    assert len(site.calls("sinfo")) == bool(lost), "a run that was told to stop has lost no node"
    assert [path.name for path in (site.submit / ".launch").iterdir()] == (["7-1"] if lost else [])


def test_a_refused_requeue_resubmits_and_counts_restarts(site: Site) -> None:
    set_scontrol(site, "echo 'Requested operation is presently disabled for job 7' >&2; exit 1")
    variables = {"SLURM_RESTART_COUNT": "2", "RINGTRAIN_LAUNCH_RESTARTS": "3", "SLURM_CONF": "/etc/slurm.conf"}
    exit_code, lines = follow_up(site, SIGNAL, variables)
    assert exit_code == 75
    assert "restart 6 of at most 20" in lines[0]
    assert "does not requeue job 7: Requested operation is presently disabled for job 7." in lines[1]
    assert lines[2].startswith("launch: job 8 continues")
    assert site.calls("sbatch") == [[b"--parsable", b"--dependency=afterany:7", b"slurm_script"]]
    environ = (site.programs / "sbatch.environ").read_text().splitlines()
    slurm = sorted(line for line in environ if line.startswith(("SLURM_", "RINGTRAIN_LAUNCH_RESTARTS")))
    assert slurm == ["RINGTRAIN_LAUNCH_RESTARTS=6", "SLURM_CONF=/etc/slurm.conf"]


@pytest.mark.parametrize("refusal", ["", "echo disabled >&2; exit 1"])
def test_one_run_of_an_array_starts_again_alone(refusal: str, site: Site) -> None:
    set_scontrol(site, refusal)
    assert follow_up(site, SIGNAL, {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "2"})[0] == 75
    assert site.calls("scontrol")[:2] == [[b"show", b"job", b"5_2"], [b"requeue", b"5_2"]]
    again = [[b"--parsable", b"--dependency=afterany:5_2", b"--array=2", b"slurm_script"]]
    assert site.calls("sbatch") == (again if refusal else [])


def test_failures_without_a_new_checkpoint_add_up_over_restarts(site: Site) -> None:
    exit_code, lines = follow_up(site, HANG, newest_step=100, failures=2)
    assert (exit_code, site.calls("scontrol")) == (6, [SHOW, [b"requeue", b"7"]])
    assert lines[-1].endswith("restart 1 of at most 20, 3 of at most 3 from the checkpoint of step 100.")
    launched = site.submit / ".launch"
    assert [(path.name, read_failures(path)) for path in launched.iterdir()] == [("7-1", 3)]
    assert read_failures(launched / "7-0") == 0


def test_a_resubmitted_job_inherits_the_number_of_failures(site: Site) -> None:
    set_scontrol(site, "exit 1")
    assert follow_up(site, HANG, newest_step=100, failures=1)[0] == 6
    assert [(path.name, read_failures(path)) for path in (site.submit / ".launch").iterdir()] == [("8-0", 2)]


def test_too_many_failures_start_no_job_and_leave_no_files(site: Site) -> None:
    exit_code, lines = follow_up(site, HANG, newest_step=100, failures=3)
    assert (exit_code, site.calls("scontrol")) == (6, [SHOW])
    assert "4 starts have failed since the checkpoint of step 100" in lines[-1]
    assert list((site.submit / ".launch").iterdir()) == []


def test_a_requeue_whose_reply_was_lost_is_not_repeated(site: Site) -> None:
    done = 'sed -i s/JobState=RUNNING/JobState=COMPLETING/ "$CALLS/description"'
    set_scontrol(site, f"{done}; echo 'Socket timed out on send/recv operation' >&2; exit 1")
    exit_code, lines = follow_up(site, SIGNAL)
    assert (exit_code, len(lines)) == (75, 1)
    assert site.calls("sbatch") == []


def test_resume_never_in_the_settings_prevents_a_requeue(site: Site) -> None:
    run = site.submit / "runs" / "a"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("resume: never\noptimizer: {}\n")
    exit_code, lines = follow_up(site, SIGNAL)
    assert (exit_code, site.calls("scontrol")) == (75, [SHOW])
    assert "resume: never" in lines[-1]


def test_a_refusal_of_requeue_and_sbatch_is_reported(site: Site) -> None:
    set_scontrol(site, "exit 1")
    site.set("sbatch", "echo 'sbatch: error: no' >&2; exit 1")
    exit_code, lines = follow_up(site, SIGNAL)
    assert exit_code == 75
    assert "exit code 1" in lines[1]
    assert lines[2].endswith("sbatch: error: no. The job does not continue: submit it again.")


@pytest.mark.parametrize(
    ("end", "exit_code", "words"), [(DONE, 0, "the run is complete."), (DATA, 3, "holds no images"), (FILE, 75, "file")]
)
def test_other_ends_are_reported_last_without_a_restart(
    end: EndRecord | None, exit_code: int, words: str, site: Site
) -> None:
    (site.submit / "job.out").write_text("ringtrain's lines\n")
    returned, lines = follow_up(site, end)
    assert returned == exit_code
    assert words in lines[-1]
    assert site.calls("scontrol") == [SHOW]
    assert site.calls("sbatch") == []


def test_a_start_that_slurm_abandoned_changes_nothing(site: Site) -> None:
    set_scontrol(site, restarts=1)
    exit_code, lines = follow_up(site, None)
    assert (exit_code, site.calls("scontrol")) == (137, [[b"show", b"job", b"7"]])
    assert lines[-1].endswith("the job is started again by Slurm itself after a lost node.")
    assert (site.submit / ".launch" / "7-0" / "run.json").exists(), "the next start would not know of this one"


def test_a_cancelled_job_stays_cancelled(site: Site) -> None:
    set_scontrol(site, state="COMPLETING")
    exit_code, lines = follow_up(site, SIGNAL)
    assert (exit_code, site.calls("scontrol")) == (75, [SHOW])
    assert "cancelled" in lines[-1]


def test_a_killed_rank_is_named_although_others_were_signalled(site: Site) -> None:
    (site.submit / "job.out").write_text(OUTPUT)
    exit_code, lines = follow_up(site, SIGNAL)
    assert (exit_code, site.calls("scontrol")) == (137, [SHOW, [b"requeue", b"7"]])
    assert "The first to fail was task 1 on n2: Killed." in lines[-1]


def test_after_outside_of_a_batch_script_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(UsageError, match="last line of a batch script"):
        main(["after", "--status", "0", "--script", "x", "--max_requeues", "1"])


# --- Slurm's programs ---


@pytest.fixture
def on_path(site: Site, monkeypatch: pytest.MonkeyPatch) -> Site:
    """A site whose programs this process finds."""
    monkeypatch.setenv("PATH", f"{site.programs}:{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(site.programs))
    return site


def test_a_controller_that_is_away_is_asked_again(on_path: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller, "PAUSES_SECONDS", (0.0, 0.0))
    away = 'echo "error: Unable to contact slurm controller" >&2; exit 1'
    on_path.set("scontrol", f'mkdir "$CALLS/came" || exit 0; {away}')
    assert controller.ask(REQUEUE).is_good
    assert len(on_path.calls("scontrol")) == 2
    on_path.set("scontrol", away)
    assert controller.ask(REQUEUE) == (False, "error: Unable to contact slurm controller")
    assert len(on_path.calls("scontrol")) == 5


def test_a_refusal_is_taken_at_once(on_path: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    on_path.set("scontrol", 'echo "no" >&2; exit 1')
    assert controller.ask(REQUEUE) == (False, "no")
    assert len(on_path.calls("scontrol")) == 1
    monkeypatch.setattr(controller, "ANSWER_SECONDS", 0.05)
    on_path.set("scontrol", "exec sleep 60")
    assert "did not answer" in controller.ask(REQUEUE).text
    (on_path.programs / "scontrol").unlink()
    monkeypatch.setenv("PATH", str(on_path.programs))
    assert "scontrol is not on PATH" in controller.ask(REQUEUE).text


def test_an_array_larger_than_the_site_allows_is_not_submitted(on_path: Site) -> None:
    on_path.set("scontrol", "echo 'MaxArraySize            = 4'")
    shape = ["--nodes", "1", "--ranks_per_node", "2", "--mpi", "pmix"]
    with pytest.raises(UsageError, match="array has 5 runs, and this site's MaxArraySize is 4"):
        main(["submit", *shape, "--array", "seed=1..5"])
    assert on_path.calls("sbatch") == []
    assert main(["submit", *shape, "--array", "seed=1..4"]) == 0


@pytest.mark.parametrize("text", ["12", "12;cluster", "a notice of the site\n12"])
def test_the_job_number_is_read_from_sbatch_s_output(text: str, on_path: Site) -> None:
    on_path.set("sbatch", f"echo {shlex.quote(text)}")
    assert controller.submit() == (True, "12")


def test_submit_prints_how_to_manage_the_job(on_path: Site, capsys: pytest.CaptureFixture[str]) -> None:
    on_path.set("sbatch", 'cat >"$CALLS/stdin"; echo "8;cluster"')
    options = ["--nodes", "1", "--ranks_per_node", "2", "--mpi", "pmix", "--job_name", "a %j"]
    flags = ["--out", "runs/it's"]
    assert main(["submit", *options, "--", *flags]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "job 8 is submitted; it writes into 'a %j-8.out'",
        "  follow it:             tail -F 'a %j-8.out'",
        "  save and stop it:      touch 'runs/it'\"'\"'s/stop'",
        "  save and start again:  scancel --signal=USR1 8",
        "  end it in seconds:     scancel 8",
    ]
    assert main(["render", *options, "--", *flags]) == 0
    assert capsys.readouterr().out == (on_path.programs / "stdin").read_text()
    assert on_path.calls("sbatch") == [[b"--parsable"]]


def test_submit_reports_why_sbatch_refuses(on_path: Site) -> None:
    on_path.set("sbatch", "echo 'sbatch: error: invalid partition specified: x' >&2; exit 1")
    with pytest.raises(UsageError, match="invalid partition specified: x"):
        main(["submit", "--nodes", "1", "--ranks_per_node", "2", "--mpi", "pmix", "--partition", "x"])


def test_submit_without_sbatch_gives_a_remedy(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    (site.programs / "sbatch").unlink()
    monkeypatch.setenv("PATH", str(site.programs))
    with pytest.raises(UsageError, match=r"sbatch is not on PATH.*login node.*render --to"):
        main(["submit", "--nodes", "1", "--ranks_per_node", "2", "--mpi", "pmix"])
