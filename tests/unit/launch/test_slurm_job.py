"""What a user may ask of Slurm, and what is wrong with the rest."""

from pathlib import Path

import pytest

from launch.slurm.array import read_members
from launch.slurm.cli import main
from launch.slurm.job import JobRequest, read_flag, read_time
from ringtrain.errors import UsageError

SHAPE = ["--nodes", "2", "--ranks_per_node", "4", "--mpi", "pmix"]
GPUS = ["--nodes", "2", "--gpus_per_node", "4", "--mpi", "pmix"]

WRONG = [
    (["--nodes", "0", "--ranks_per_node", "1"], ["nodes is 0", "at least 1"]),
    (["--nodes", "1000000", "--ranks_per_node", "1"], ["nodes is 1000000", "at most 200,000"]),
    (["--nodes", "two", "--ranks_per_node", "1"], ["--nodes", "'two'"]),
    (["--nodes", "2", "--mpi", "pmix"], ["--gpus_per_node G", "--ranks_per_node R"]),
    ([*GPUS, "--ranks_per_node", "2"], ["ranks_per_node is 2", "gpus_per_node is 4", "equal"]),
    ([*SHAPE, "--spare_nodes", "-1"], ["spare_nodes is -1", "at least 0"]),
    ([*SHAPE[:-1], "horovodrun", "--spare_nodes", "1"], ["spare_nodes is 1", "'horovodrun'", "--mpi pmix"]),
    ([*SHAPE, "--spare_nodes", "1", "--max_restarts", "0"], ["spare_nodes is 1", "max_restarts is 0", "1 or more"]),
    ([*SHAPE, "--gpus_per_node", "-1"], ["gpus_per_node is -1"]),
    ([*SHAPE, "--cpus_per_rank", "0"], ["cpus_per_rank is 0"]),
    ([*SHAPE, "--time", "soon"], ["time is 'soon'", "days-hours"]),
    ([*SHAPE, "--time", "1:2:3:4"], ["time is '1:2:3:4'"]),
    ([*SHAPE, "--time", "2"], ["time is '2', 120 seconds", "signal_seconds is 120", "--signal_seconds"]),
    ([*SHAPE, "--signal_seconds", "0"], ["signal_seconds is 0"]),
    ([*SHAPE, "--signal_seconds", "65536"], ["signal_seconds is 65536", "65535"]),
    ([*SHAPE, "--max_requeues", "-1"], ["max_requeues is -1"]),
    ([*SHAPE, "--max_restarts", "-1"], ["max_restarts is -1"]),
    ([*SHAPE, "--mem", "64 GB"], ["mem is '64 GB'", "64G"]),
    ([*SHAPE, "--partition", "a b"], ["partition is 'a b'", "one word"]),
    ([*SHAPE, "--account", "a\n#SBATCH --uid=0"], ["account is"]),
    ([*SHAPE, "--qos", ""], ["qos is ''"]),
    ([*SHAPE, "--constraint=-x"], ["constraint is '-x'"]),
    ([*SHAPE, "--job_name", "a/b"], ["job_name is 'a/b'", "file name"]),
    ([*SHAPE, "--job_name", "a\\b"], ["job_name is"]),
    ([*SHAPE, "--job_name", "a\nb"], [r"job_name is 'a\nb'", "line break"]),
    ([*SHAPE, "--job_name", "a\x1b[2Jb"], ["job_name is"]),
    ([*SHAPE, "--job_name", "a\u2028b"], ["job_name is"]),
    ([*SHAPE, "--job_name", "\udcff"], ["job_name is"]),
    ([*SHAPE, "--job_name", " "], ["job_name is ' '"]),
    ([*SHAPE, "--job_name", "a" * 201], ["201 bytes", "at most 200"]),
    ([*SHAPE, "--output", "a\n.out"], ["output is"]),
    ([*SHAPE, "--output", "a\\%j.out"], ["output is"]),
    ([*SHAPE, "--mpi", "openmpi"], ["mpi is 'openmpi'", "pmi2"]),
    ([*SHAPE, "--conda", "a", "--venv", "b"], ["conda is 'a' and venv is 'b'", "one of the two"]),
    ([*SHAPE, "--venv=-x"], ["venv is '-x'"]),
    ([*SHAPE, "--module", ""], ["module is ''"]),
    ([*SHAPE, "--env", "HOME"], ["env is 'HOME'", "NAME=VALUE"]),
    ([*SHAPE, "--env", "a b=c"], ["'a b'", "name of a variable"]),
    ([*SHAPE, "--env", "$(id)=c"], ["'$(id)'"]),
    ([*SHAPE, "--", "--resume", "never"], ["resume is 'never'", "--no_requeue"]),
    ([*SHAPE, "--", "--resume=never"], ["resume is 'never'"]),
    ([*SHAPE, "--no_requeue", "--spare_nodes", "1", "--", "--resume=never"], ["resume is 'never'", "--spare_nodes"]),
    ([*SHAPE, "--workload", "digits"], ["'--workload'", "after --"]),
    ([*SHAPE, "--", "--workload", "digit"], ["no workload 'digit'", "Did you mean 'digits'?"]),
    ([*SHAPE, "--", "--epoch", "3"], ["no flag --epoch", "Did you mean --epochs?", "python -m ringtrain train --help"]),
    ([*SHAPE, "--", "--batch_size", "0"], ["batch_size is 0"]),
    ([*SHAPE, "--", "--config", "none.yaml"], ["none.yaml"]),
    ([*SHAPE, "--array", "seed=1,x"], ["run 'seed=x' of the array", "seed is 'x'", "whole number"]),
    ([*SHAPE, "--array", "sead=1"], ["run 'sead=1' of the array", "Did you mean --seed?"]),
    ([*SHAPE, "--array", "seed=1 seed=2"], ["sets seed twice", "after one seed="]),
    ([*SHAPE, "--array", "seed=3..1"], ["'3..1'", "upwards"]),
    ([*SHAPE, "--array", "seed=1..999 steps=1..999"], ["998,001 runs", "between 1 and 200,000"]),
    ([*SHAPE, "--array", "seed=1,1"], ["would share the directory 'runs/digits/seed=1'", "out=DIRECTORY"]),
    ([*SHAPE, "--array", "out=a seed=1,2"], ["'out=a seed=1' and 'out=a seed=2'"]),
    ([*SHAPE, "--array", "'seed=1"], ["No closing quotation", "Close"]),
    ([*SHAPE, "--array", "seed"], ["array is 'seed'", "No such file", "seed=1..5"]),
    ([*SHAPE, "--array", "seed=1 2"], ["array has '2'", "NAME=VALUE"]),
    ([*SHAPE, "--array", "seed=1..2", "--array_limit", "0"], ["array_limit is 0"]),
    ([*SHAPE, "--array_limit", "1"], ["array_limit is given without array"]),
    ([*SHAPE, "--array", "seed=1", "--", "eval", "runs/a"], ["array is for runs of workloads", "'eval'"]),
    ([*SHAPE, "--array", "resume=never,auto"], ["resume is 'never'"]),
    ([*SHAPE, "--", "evil", "runs/a"], ["no command of ringtrain's named 'evil'", "Did you mean 'eval'?"]),
]


@pytest.mark.parametrize(("arguments", "expected"), WRONG, ids=lambda value: " ".join(value)[-40:])
def test_errors_name_the_setting_its_value_and_the_remedy(arguments: list[str], expected: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        main(["render", *arguments])
    for text in expected:
        assert text in str(caught.value)


@pytest.mark.parametrize(
    "flags",
    [["eval", "runs/a"], ["train", "--epochs", "3"], ["--data_dir", "none", "--init_from", "none"], ["--print_config"]],
    ids=" ".join,
)
def test_other_commands_and_paths_on_the_nodes_are_accepted(flags: list[str]) -> None:
    assert main(["render", *SHAPE, "--", *flags]) == 0


def test_an_array_is_a_grid_or_a_grid_on_each_line_of_a_file(tmp_path: Path) -> None:
    grid = read_members("optimizer.lr=0.1,0.01 seed=-1..0", ["--workload", "a.py:Mine"])
    assert [str(member) for member in grid] == [
        *("optimizer.lr=0.1 seed=-1", "optimizer.lr=0.1 seed=0", "optimizer.lr=0.01 seed=-1"),
        "optimizer.lr=0.01 seed=0",
    ]
    assert grid[0].flags == ("--optimizer.lr=0.1", "--seed=-1", "--out=runs/mine/lr=0.1,seed=-1")
    file = tmp_path / "settings"
    file.write_text("seed=1,2 out=a  # twice\n\n'--options={a: [1, 2], b: 3},null'\n'augment=[x, y]' out=c\n")
    with pytest.raises(UsageError, match="'seed=1 out=a' and 'seed=2 out=a'"):
        read_members(str(file), [])
    file.write_text(file.read_text().replace("1,2", "2"))
    assert [member.settings for member in read_members(str(file), ["--out=d"])] == [
        (("seed", "2"), ("out", "a")),
        (("options", "{a: [1, 2], b: 3}"),),
        (("options", "null"),),
        (("augment", "[x, y]"), ("out", "c")),
    ]


def test_a_node_has_a_rank_for_each_gpu() -> None:
    for request in (
        JobRequest(nodes=2, gpus_per_node=4),
        JobRequest(nodes=2, gpus_per_node=4, ranks_per_node=4),
        JobRequest(nodes=2, gpus_per_node=0, ranks_per_node=4),
        JobRequest(nodes=2, ranks_per_node=4),
    ):
        assert (request.num_ranks_per_node, request.num_ranks) == (4, 8)


def test_resume_never_is_accepted_without_requeue() -> None:
    JobRequest(nodes=1, ranks_per_node=1, can_requeue=False, flags=("--resume", "never"))
    JobRequest(nodes=1, ranks_per_node=1, flags=("--resume", "never", "--resume", "auto"))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800),
        ("30:15", 1815),
        ("01:00:00", 3600),
        ("2-1", 176400),
        ("2-01:30", 178200),
        ("2-01:30:10", 178210),
        *((text, None) for text in ("", "1-", "-1", "1h", "٣", "1:2:3:4", "infinite")),
    ],
)
def test_time_limits_are_read_in_slurm_s_words(text: str, seconds: int | None) -> None:
    assert read_time(text) == seconds


@pytest.mark.parametrize(
    ("flags", "value"),
    [
        ([], None),
        (["--out"], None),
        (["--output", "a"], None),
        (["--out", "a b"], "a b"),
        (["--out=a=b"], "a=b"),
        (["--out", "a", "--out=b"], "b"),
    ],
)
def test_a_setting_is_found_among_ringtrain_s_flags(flags: list[str], value: str | None) -> None:
    assert read_flag(flags, "out") == value
