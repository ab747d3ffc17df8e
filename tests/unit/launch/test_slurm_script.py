"""The batch scripts: recorded texts, what bash and sbatch read in them, what becomes of signals and exit codes."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.slurm.cli import main
from launch.slurm.job import JobRequest
from launch.slurm.script import _ENVIRONMENT, quote_sbatch, quote_shell, render
from tests.unit.launch.batch import Site, create_site

RECORDED = Path(__file__).parent
HOSTILE = ["$(touch flag)", "`touch flag`", "'", '"', "\\", "\n#SBATCH --nodes=9", "\r", "-"]
DIGITS = ["--workload", "digits"]
CASES = {
    "gpus": [
        *["--nodes", "2", "--gpus_per_node", "4", "--cpus_per_rank", "8", "--mpi", "pmix"],
        *["--time", "12:00:00", "--partition", "gpu", "--account", "vision", "--mem", "200G"],
        *["--job_name", "inception"],
        *["--module", "cuda/12.5", "--module", "openmpi/4.1.6", "--venv", "/home/ada/ringtrain/.venv"],
        *["--", "--workload", "inception", "--data_dir", "/data/images", "--options.image_size", "299"],
    ],
    "cores": ["--nodes", "1", "--ranks_per_node", "2", "--mpi", "pmi2", "--no_requeue", "--", *DIGITS],
    "spare": ["--nodes", "2", "--ranks_per_node", "1", "--mpi", "pmix", "--spare_nodes", "1"],
    "horovodrun": [
        *["--nodes", "4", "--ranks_per_node", "16", "--mpi", "horovodrun", "--conda", "ringtrain", "--qos", "long"],
        *["--constraint", "rack1|rack2", "--signal_seconds", "300", "--env", "HOROVOD_LOG_LEVEL=info"],
    ],
    "horovodrun_one_node": ["--nodes", "1", "--ranks_per_node", "2", "--mpi", "horovodrun", "--", *DIGITS],
    "array": [
        *["--nodes", "2", "--ranks_per_node", "1", "--mpi", "pmix", "--spare_nodes", "1", "--array_limit", "2"],
        *["--array", "optimizer.lr=0.1,0.01 seed=1..2 'data_dir=/data/a b'", "--", "--out", "runs/a b"],
    ],
    "hostile": [
        *["--nodes", "2", "--ranks_per_node", "1", "--mpi", "pmix", "--python", "/opt/my python/bin/python3"],
        *["--job_name", "a 'b' \"c\" $(touch name) `touch name` #; é", "--output", "$(touch output) '%x'.out"],
        *["--constraint", "$(touch)&\"'", "--account", "#", "--env", "NOTE=it's $(touch env)\nsecond line"],
        *["--", *(f"--out={text}" for text in HOSTILE), "--out", "runs/a b", "--data_dir", "$(touch flag)"],
    ],
}


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return create_site(tmp_path)


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """Name and text of each script."""
    assert main(["render", *CASES[request.param]]) == 0
    return request.param, capsys.readouterr().out


def job(*flags: str, **settings: object) -> JobRequest:
    return JobRequest(nodes=2, ranks_per_node=1, flags=flags, **settings)  # type: ignore[arg-type]


# --- The text ---


def test_the_scripts_are_those_that_were_reviewed(case: tuple[str, str]) -> None:
    """To record a change: python -m launch slurm render OPTIONS --to tests/unit/launch/NAME.sh -- FLAGS."""
    name, text = case
    assert text == (RECORDED / f"{name}.sh").read_text(encoding="utf-8")


def test_bash_and_shellcheck_accept_the_scripts(case: tuple[str, str], tmp_path: Path) -> None:
    assert shutil.which("shellcheck"), "shellcheck is not installed: apt-get install shellcheck"
    script = tmp_path / "script.sh"
    script.write_text(case[1], encoding="utf-8")
    # Quoted $(...) and '\' are what the hostile one is about.
    leave_out = ["--exclude=SC2016,SC1003"] if case[0] == "hostile" else []
    for command in (["bash", "-n"], ["shellcheck", *leave_out]):
        finished = subprocess.run([*command, str(script)], capture_output=True, text=True)
        assert (finished.returncode, finished.stdout + finished.stderr) == (0, "")


def test_a_script_is_written_to_the_given_path(tmp_path: Path) -> None:
    assert main(["render", *CASES["cores"][:-3], "--to", str(tmp_path / "run.sh"), *CASES["cores"][-3:]]) == 0
    assert (tmp_path / "run.sh").read_text() == (RECORDED / "cores.sh").read_text()


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize(("env", "mode"), [(["--env", "TOKEN=secret"], 0o600), ([], 0o644)])
def test_a_script_that_may_hold_a_secret_is_its_owners_alone(
    env: list[str], mode: int, is_there: bool, tmp_path: Path
) -> None:
    script = tmp_path / "run.sh"
    before = os.umask(0o022)
    try:
        if is_there:
            script.touch()
        assert (
            main(["render", "--nodes", "1", "--ranks_per_node", "2", "--mpi", "pmix", *env, "--to", str(script)]) == 0
        )
    finally:
        os.umask(before)
    assert script.stat().st_mode & 0o777 == mode
    assert ("secret" in script.read_text()) == bool(env)


def test_a_template_cannot_print_unquoted_values() -> None:
    environment = _ENVIRONMENT
    assert environment.from_string("{{ a | shell }} {{ b }}").render(a="x y", b=1) == "'x y' 1"
    for template in ("{{ a }}", "{{ a ~ (a | shell) }}", "{{ [a] | join }}"):
        with pytest.raises(TypeError, match="no filter has quoted"):
            environment.from_string(template).render(a="x y")
    with pytest.raises(jinja2.UndefinedError):
        environment.from_string("{{ no_such_thing }}").render()


# --- What sbatch reads ---


def read_directives(text: str) -> list[str]:
    """The arguments of the ``#SBATCH`` lines as sbatch takes them: get_argument in Slurm's src/sbatch/opt.c."""
    arguments = []
    for line in text.split("\n"):
        if line.strip() and not line.startswith("#"):
            break  # sbatch reads no further than the first command
        if not line.startswith("#SBATCH"):
            continue
        argument, quote, is_escaped = "", "", False
        for character in line.removeprefix("#SBATCH").strip():
            if is_escaped:
                argument, is_escaped = argument + character, False
            elif character == "\\":
                is_escaped = True
            elif quote and character == quote:
                quote = ""
            elif not quote and character in "\"'":
                quote = character
            elif not quote and (character == "#" or character.isspace()):
                break
            else:
                argument += character
        assert not quote
        arguments.append(argument)
    return arguments


def test_sbatch_gets_the_requested_options() -> None:
    request = job(job_name="a b", time="2-00:00:00", partition="p", account="a", qos="q", constraint="x&y", mem="1G")
    assert read_directives(render(request)) == [
        *["--job-name=a b", "--output=%x-%j.out", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1", "--mem=1G"],
        *["--time=2-00:00:00", "--partition=p", "--account=a", "--qos=q", "--constraint=x&y", "--signal=USR1@120"],
        *["--requeue", "--open-mode=append"],
    ]
    assert "--gpus-per-node=8" in read_directives(render(JobRequest(nodes=1, gpus_per_node=8)))
    assert "gpus-per-task=" not in render(JobRequest(nodes=1, gpus_per_node=8))


printable = st.text().filter(lambda text: text.isprintable() and text.strip()) | st.text(" #\"'\\$`a", min_size=1)


@given(printable)
@settings(deadline=None)
def test_sbatch_reads_quoted_text_back(text: str) -> None:
    assert read_directives(f"#SBATCH --job-name={quote_sbatch(text)}\n") == [f"--job-name={text}"]


@pytest.mark.parametrize("text", ["a\nb", "\r", "\x00", "\x1b", "\udcff"])
def test_text_that_fits_no_sbatch_line_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        quote_sbatch(text)


# --- What bash reads ---


def test_user_input_is_never_executed(site: Site) -> None:
    text = (RECORDED / "hostile.sh").read_text(encoding="utf-8").replace("'/opt/my python/bin/python3'", "python")
    assert site.run(text)[0] == 0
    assert [entry.name for entry in site.submit.iterdir()] == [".launch"]
    flags = CASES["hostile"][CASES["hostile"].index("--") + 1 :]
    assert site.calls("srun") == [
        [b"--mpi=pmix", b"--export=ALL", b"--kill-on-bad-exit=1", b"python", b"-m", b"ringtrain"]
        + [os.fsencode(flag) for flag in flags]
    ]


flags_of_any_kind = (
    st.binary(max_size=40).map(lambda data: os.fsdecode(data.replace(b"\0", b"")))
    | st.text(st.characters(codec="utf-8", exclude_characters="\0"))
    | st.text("\n\r\x01'\"\\$`{}! 07aé\udcff")
)


@given(st.lists(flags_of_any_kind, max_size=20))
@settings(deadline=None, max_examples=60)
def test_flags_arrive_byte_for_byte(flags: list[str]) -> None:
    command = "printf '%s\\0' " + " ".join(quote_shell(flag) for flag in ["first", *flags])
    assert "\n" not in command
    assert command.isprintable()
    for locale in ("C", "C.UTF-8"):
        finished = subprocess.run(
            ["bash"], input=command.encode(), capture_output=True, env={"LC_ALL": locale}, cwd="/", check=True
        )
        assert finished.stdout == b"".join(os.fsencode(flag) + b"\0" for flag in ["first", *flags])
        assert finished.stderr == b""


@pytest.mark.parametrize("mpi", ["pmix", "horovodrun"])
def test_flags_reach_the_launcher_untouched(mpi: str, site: Site) -> None:
    flags = ["", "a b", "$HOME", "*", "'\\''", "x\ty", "\udcff", "~", "--", "&", "é"]
    assert site.run(render(job(*flags, mpi=mpi)))[0] == 0
    [call] = site.calls("srun" if mpi == "pmix" else "horovodrun")
    assert call[call.index(b"ringtrain") + 1 :] == [os.fsencode(flag) for flag in flags]


def test_a_user_script_runs_unchanged(site: Site) -> None:
    assert site.run(render(job("my fit.py", "--resume", "never")))[0] == 0
    [call] = site.calls("srun")
    assert call[-4:] == [b"python", b"my fit.py", b"--resume", b"never"]


def test_horovodrun_gets_the_nodes_of_the_job_with_their_slots(site: Site) -> None:
    assert site.run(render(JobRequest(nodes=2, ranks_per_node=4, mpi="horovodrun")))[0] == 0
    assert site.calls("scontrol") == [[b"show", b"hostnames", b"n[1-2]"]]
    assert site.calls("horovodrun") == [[b"-np", b"8", b"-H", b"n1:4,n2:4", b"python", b"-m", b"ringtrain"]]


def test_a_script_called_with_lost_nodes_starts_the_ranks_on_others(site: Site) -> None:
    site.set("srun", 'echo "$RINGTRAIN_LAUNCH_DIR"')
    launched = site.submit / ".launch"
    (launched / "7-0").mkdir(parents=True)
    status, printed = site.run(render(job(spare_nodes=2, mpi="pmix")), words=["n2", "n4"])
    [call] = site.calls("srun")
    assert (status, printed.splitlines()[1:]) == (0, [f"{launched}/7-0.2"])
    assert "on n[1-2] without n2 n4, " in printed
    assert call[3:7] == [b"--overlap", b"--nodes=2", b"--ntasks=2", b"--exclude=n2,n4"]
    assert site.calls("python")[0][-5:] == [b"--spare_nodes", b"2", b"--lost_nodes", b"n2", b"n4"]


def test_a_job_without_node_names_reports_it(site: Site) -> None:
    site.set("scontrol", "exit 1")
    status, printed = site.run(render(job(mpi="horovodrun")))
    assert (status, site.calls("horovodrun")) == (2, [])
    assert "launch: error: scontrol does not name the nodes" in printed


# --- The environment ---


def test_the_environment_is_made_in_order_and_reaches_the_ranks(site: Site) -> None:
    venv = site.submit / "my env"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "activate").write_text("echo venv\n")
    site.set("srun", 'echo "$NOTE|$SRUN_CPUS_PER_TASK|$RINGTRAIN_LAUNCH_DIR"')
    text = render(job(modules=("cuda/12", "a b"), venv="my env", env=(("NOTE", "it's $HOME"),)))
    status, printed = site.run(text, {"BASH_FUNC_module%%": '() { echo "module $*"; }', "SLURM_RESTART_COUNT": "2"})
    lines = printed.splitlines()
    assert status == 0
    assert lines[:3] == ["module load cuda/12", "module load a b", "venv"]
    assert lines[3].startswith("launch: job 7, restart 2, on n[1-2], 20")
    assert lines[4] == f"it's $HOME|3|{site.submit}/.launch/7-2"


def test_conda_is_activated_by_its_own_hook(site: Site) -> None:
    hook = 'conda() { echo "conda $*"; }'
    site.set("conda", f'[ "$*" = "shell.bash hook" ] && cat <<"END"\n{hook}\nEND')
    status, printed = site.run(render(job(conda="my env")))
    assert (status, printed.splitlines()[0]) == (0, "conda activate my env")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"modules": ("cuda",)}, "module load cuda failed; see: module avail"),
        ({"conda": "a b"}, "there is no conda on PATH"),
        ({"venv": "no such place"}, "no such place is no virtual environment on this node"),
    ],
    ids=str,
)
def test_a_missing_environment_ends_the_job_with_a_remedy(
    settings: dict[str, object], message: str, site: Site
) -> None:
    status, printed = site.run(render(job(**settings)), {"BASH_FUNC_module%%": "() { false; }"})
    assert (status, site.calls("srun")) == (2, [])
    assert f"launch: error: {message}" in printed


def test_the_record_of_a_former_start_is_removed(site: Site) -> None:
    told = site.submit / ".launch" / "7-0"
    told.mkdir(parents=True)
    (told / "end.json").write_text("{}")
    site.set("srun", 'ls "$RINGTRAIN_LAUNCH_DIR"')
    assert site.run(render(job()))[1].splitlines()[1:] == []


# --- The end ---


@pytest.mark.parametrize("status", [0, 1, 3, 75, 137])
def test_after_gets_the_ranks_exit_code_and_sets_the_job_s(status: int, site: Site) -> None:
    finished, _ = site.run(
        render(job(max_requeues=5, max_restarts=2)), {"SRUN_STATUS": str(status), "AFTER_STATUS": "42"}
    )
    assert finished == 42
    script = os.fsencode(site.programs / "slurm_script")
    assert site.calls("python") == [
        [
            *[b"-m", b"launch", b"slurm", b"after", b"--status", str(status).encode()],
            *[b"--script", script, b"--max_requeues", b"5", b"--max_restarts", b"2"],
        ]
    ]


RANKS = """
trap 'echo USR1; n=$((n + 1)); [ "$n" = "$WANTED" ] && exit 75' USR1
trap 'echo TERM; exit 137' TERM
echo ready
while true; do sleep 0.02; done
"""


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal."""
    mask = re.search(r"SigCgt:\t(\w+)", Path(f"/proc/{pid}/status").read_text())
    return mask is not None and bool(int(mask[1], 16) >> (number - 1) & 1)


# Debian's /bin/sh stays, as the parent of mpirun, where others' becomes mpirun.
LAUNCHERS = {
    "srun": ("pmix", "srun", RANKS),
    "horovodrun": (
        "horovodrun",
        "horovodrun",
        f"cat >$CALLS/mpirun <<'END'\n{RANKS}\nEND\nbash $CALLS/mpirun; exit $?",
    ),
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("signals", [["USR1"], ["TERM"], ["USR1", "TERM", "USR1"]], ids=" ".join)
def test_signals_reach_ranks_as_usr1_and_exit_codes_return(signals: list[str], launcher: str, site: Site) -> None:
    mpi, program, script = LAUNCHERS[launcher]
    site.set(program, script)
    process = site.start(render(job(mpi=mpi)), {"WANTED": str(len(signals))})
    assert process.stdout is not None
    with process.stdout as printed:
        try:
            assert printed.readline().startswith("launch: job 7")
            assert printed.readline() == "ready\n"
            wait_until(lambda: catches(process.pid, signal.SIGTERM))
            for name in signals:
                process.send_signal(signal.Signals[f"SIG{name}"])
                assert printed.readline() == "USR1\n"  # none is lost, and none arrives as another
            assert process.wait(timeout=20) == 0
            assert printed.read() == ""
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    [call] = site.calls("python")
    assert call[call.index(b"--status") + 1] == b"75"


def test_the_follow_up_is_not_cut_short_by_the_end_of_the_job(site: Site) -> None:
    """scontrol requeue ends the very script that calls it, by SIGTERM."""
    site.set("python", "kill -TERM $$; kill -USR1 $$; echo done; exit 75")
    status, printed = site.run(render(job()))
    assert (status, printed.splitlines()[-1]) == (75, "done")
