"""What each contender is started with."""

import ast
import importlib.metadata
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import benchmarks
from benchmarks.__main__ import MODES, bench, find_obstacle, main
from benchmarks.children import clean_environment, fill_in
from benchmarks.contenders import DIRECTORY, Command, Experiment
from benchmarks.origin import shorten
from benchmarks.peers.peer_models import MODELS
from benchmarks.plans import PLANS, VARIATIONS, plan_starts, plan_variations
from benchmarks.rounds import plan_orders
from benchmarks.settings import BenchOptions, Settings, choose_settings
from benchmarks.steps import GOALS, ORDER_FILE, STEP_CONTENDERS, plan_guards, plan_loops, plan_steps, write_order
from ringtrain.cli import run_command
from ringtrain.config import Config
from ringtrain.data.order import SampleOrder
from ringtrain.errors import UsageError
from ringtrain.runtime.machine import Machine

PEERS = Path(benchmarks.__file__).parent / "peers"
TWO_CORES = Machine(cores=(2, 5), quota=None, bound_by_launcher=False, may_have_gpus=False)
SETTINGS = choose_settings(2, TWO_CORES)


def plan(model: str = "CNN", names: tuple[str, ...] = (), settings: Settings = SETTINGS) -> Experiment:
    [experiment] = plan_steps(BenchOptions(models=model, contenders=",".join(names)), settings)
    return experiment


def commands(experiment: Experiment, name: str) -> tuple[Command, ...]:
    [contender] = [each for each in experiment.contenders if each.name == name]
    return contender.commands


@pytest.mark.parametrize("path", sorted(PEERS.glob("*.py")), ids=lambda path: path.name)
def test_peers_hold_no_code_of_ringtrain(path: Path) -> None:
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            names.append(node.module or "")
    assert not [name for name in names if name.partition(".")[0] in ("ringtrain", "launch", "tests")]
    assert "importlib" not in names


def test_settings_are_those_that_ringtrain_plans_for_each_rank() -> None:
    assert SETTINGS.flags == [
        "--cores", "2", "--cores", "5", "--intra_op_threads", "1", "--inter_op_threads", "2"
    ]  # fmt: skip
    assert SETTINGS.rank_flags == [*SETTINGS.flags[:-1], "1"]  # whose sums go through memory
    assert SETTINGS.env["HOROVOD_CYCLE_TIME"] == "1"
    assert SETTINGS.env["OMPI_MCA_mpi_yield_when_idle"] == "1"
    assert SETTINGS.env["HOROVOD_FUSION_THRESHOLD"] == "8388608"


def test_ringtrain_is_the_users_own_command_without_any_setting() -> None:
    [command] = commands(plan(), "ringtrain")
    assert command.argv[:3] == ("horovodrun", "-np", "2")
    assert command.argv[4:6] == ("-m", "ringtrain")
    assert command.env == {}
    assert commands(plan(), "ringtrain_again") == (command,)


def test_the_cnn_logs_as_often_as_ringtrain_does_by_itself() -> None:
    [command] = commands(plan(), "ringtrain")
    assert command.argv[command.argv.index("--log_every") + 1] == str(Config.log_every)


def test_minimal_has_all_ringtrain_settings_and_stock_has_none() -> None:
    [stock], [same] = commands(plan(), "minimal_stock"), commands(plan(), "minimal")
    assert stock.env == {}
    assert "--cores" not in stock.argv
    assert same.env == SETTINGS.env
    assert same.argv == (*stock.argv, *SETTINGS.flags)


def test_horovod_tunes_all_that_it_can() -> None:
    [same], [tuned] = commands(plan(), "minimal"), commands(plan(), "minimal_autotune")
    assert tuned.argv == same.argv
    assert tuned.env["HOROVOD_AUTOTUNE"] == "1"
    assert same.env.keys() - tuned.env.keys() == {"HOROVOD_CYCLE_TIME", "HOROVOD_FUSION_THRESHOLD"}


@pytest.mark.parametrize("name", ["bound", "tf_distribute"])
def test_processes_without_a_launcher_are_one_for_each_rank(name: str) -> None:
    started = commands(plan(), name)
    assert [command.argv[command.argv.index("--rank") + 1] for command in started] == ["0", "1"]


def test_workers_share_the_cluster_and_have_their_own_index() -> None:
    clusters = [
        json.loads(fill_in(command, Path("/d"), [1234, 5678]).env["TF_CONFIG"])
        for command in commands(plan(), "tf_distribute")
    ]
    assert [each["task"]["index"] for each in clusters] == [0, 1]
    assert clusters[0]["cluster"] == clusters[1]["cluster"] == {"worker": ["127.0.0.1:1234", "127.0.0.1:5678"]}


@pytest.mark.parametrize("model", GOALS)
def test_each_goal_compares_contenders_that_are_measured(model: str) -> None:
    experiment = plan(model)
    names = {each.name for each in experiment.contenders}
    assert names <= set(STEP_CONTENDERS)
    left_out = {"ringtrain_other", "ringtrain_tracked"}  # of another environment, and if MLflow is installed
    assert set(STEP_CONTENDERS) - names <= left_out
    assert [each for each in experiment.comparisons if each.goal] == [each for each in GOALS[model] if each.goal]
    assert all({each.name, each.other} <= names for each in experiment.comparisons)


def test_contenders_that_are_left_out_are_not_compared() -> None:
    experiment = plan(names=("ringtrain", "bound"))
    assert [(each.name, each.other) for each in experiment.comparisons] == [("ringtrain", "bound")]


def test_the_run_that_a_start_resumes_is_trained_before_rounds() -> None:
    [experiment] = plan_starts(BenchOptions(), SETTINGS)
    assert experiment.reference is not None
    [first], [cold] = experiment.reference.commands, commands(experiment, "ringtrain")
    assert first.argv == (*cold.argv[:-1], f"{DIRECTORY}/../begun-run")


def test_every_experiment_has_a_control() -> None:
    modes = [mode for mode in PLANS if mode != "input"]
    for experiment in [each for mode in modes for each in PLANS[mode](BenchOptions(), SETTINGS)]:
        twins = [(each.name, each.other) for each in experiment.comparisons if each.name == f"{each.other}_again"]
        assert twins, experiment.name
        for name, other in twins:
            assert commands(experiment, name) == commands(experiment, other)


def test_guards_on_and_off_differ_by_their_flags_alone() -> None:
    for experiment in plan_guards(BenchOptions(steps=20, log_every=10), SETTINGS):
        [on], [off] = commands(experiment, "guards_on"), commands(experiment, "guards_off")
        guards = ("--check_replicas_every", "--hang_timeout")
        assert flags_of(off.argv, guards) == dict.fromkeys(guards, "0")
        assert flags_of(on.argv, guards) == {"--check_replicas_every": "10"}, "a comparison in each interval"
        assert without(on.argv, guards) == without(off.argv, guards)


def flags_of(argv: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    return {word: argv[number + 1] for number, word in enumerate(argv) if word in names}


def without(argv: Sequence[str], names: Sequence[str]) -> list[str]:
    return [word for number, word in enumerate(argv) if not {word, argv[number - 1]} & set(names)]


def test_all_features_are_on_in_the_loop_compared_with_minimal() -> None:
    for experiment in plan_loops(BenchOptions(models="CNN,WIDE,TINY"), SETTINGS):
        [command] = commands(experiment, "ringtrain_saving")
        assert command.env == {}
        assert flags_of(command.argv, ["--checkpoint_every"]) == {"--checkpoint_every": "100"}
        assert not set(command.argv) & {"--check_replicas_every", "--hang_timeout"}, "they are on by default"
        [comparison] = [each for each in experiment.comparisons if each.other == "minimal"]
        assert comparison.goal == {"CNN": 1 / 1.01, "TINY": 1 / 1.05}[experiment.name]


def test_a_loop_of_models_that_have_no_goal_is_refused() -> None:
    assert [experiment.name for experiment in plan_loops(BenchOptions(models="TINY,MANY"), SETTINGS)] == ["TINY"]
    with pytest.raises(UsageError, match="models is 'WIDE,MANY'; loop measures CNN and TINY alone"):
        bench("loop", BenchOptions(models="WIDE,MANY"), [], print)


@pytest.mark.parametrize(
    ("mode", "contenders", "words"),
    [
        (
            "step",
            "ringtrain,spinning",
            "contenders names 'spinning'; step has ringtrain, ringtrain_again, ringtrain_single, ringtrain_sharded",
        ),
        ("settings", "bound", "contenders names 'bound'; settings has ringtrain, ringtrain_again, cycle_5_ms"),
        ("checkpoint", "ringtrain", "contenders is 'ringtrain'; they are chosen in step, fit and settings alone"),
        ("all", "ringtrain", "all measures all contenders"),
    ],
)
def test_contenders_that_a_mode_has_not_are_refused(mode: str, contenders: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        bench(mode, BenchOptions(contenders=contenders), [], print)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["stpe"], "there is no benchmark stpe; there are step, fit, loop, allreduce"),
        (["step", "--round", "3"], "there is no flag --round. Did you mean --rounds?"),
        (["step", "--rounds", "0"], "rounds is 0; it must be at least 1"),
        (["input"], "input needs --data_dir"),
        (["show", "missing.json"], "'missing.json' is no result file"),
    ],
)
def test_wrong_input_gives_a_one_line_error(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(main, arguments, program="benchmarks") == 2
    [line] = capsys.readouterr().err.splitlines()
    assert words in line


def test_mode_all_skips_modes_that_the_options_exclude(monkeypatch: pytest.MonkeyPatch) -> None:
    bench_one = mock.Mock(return_value=0)
    monkeypatch.setattr("benchmarks.__main__.bench_one", bench_one)
    monkeypatch.setattr(signal, "signal", mock.Mock())
    said: list[str] = []
    assert bench("all", BenchOptions(models="WIDE"), [], said.append) == 0
    begun = [call.args[0] for call in bench_one.mock_calls]
    assert begun == [mode for mode in MODES if mode not in ("loop", "input")]
    assert sum("is left out: " in line for line in said) == 2


def test_variations_differ_by_their_variables_and_flags_alone() -> None:
    [experiment] = plan_variations(BenchOptions(models="WIDE"), SETTINGS)
    [as_it_is] = commands(experiment, "ringtrain")
    for name, variation in VARIATIONS.items():
        [command] = commands(experiment, name)
        assert command.env == variation.env
        assert flags_of(command.argv, ["--backend"]).get("--backend", "auto") == variation.backend
        assert (variation.backend == "horovod") == name.startswith("horovod")
        assert without(command.argv, ["--backend"]) == list(as_it_is.argv)
        assert sum({each.name, each.other} == {name, variation.other} for each in experiment.comparisons) == 1


def test_some_variations_alone_can_be_measured() -> None:
    options = BenchOptions(models="WIDE", contenders="spinning,ringtrain,horovod_tcp")
    [experiment] = plan_variations(options, SETTINGS)
    assert [each.name for each in experiment.contenders] == ["ringtrain", "spinning", "horovod_tcp"]
    assert [(each.name, each.other) for each in experiment.comparisons] == [("ringtrain", "spinning")]


def test_a_variation_undoes_each_variable_that_ringtrain_sets() -> None:
    varied = {variable for variation in VARIATIONS.values() for variable in variation.env}
    chosen = {"HOROVOD_CYCLE_TIME", "HOROVOD_FUSION_THRESHOLD", "OMPI_MCA_mpi_yield_when_idle"}
    assert chosen <= varied & set(SETTINGS.env)
    assert set(VARIATIONS["horovod_fusion_128_mib"].env) == {"HOROVOD_FUSION_THRESHOLD"}


def test_the_directory_is_filled_in_everywhere() -> None:
    command = Command(argv=("a", f"{DIRECTORY}/run"), env={"X": DIRECTORY})
    assert fill_in(command, Path("/d"), []) == Command(argv=("a", "/d/run"), env={"X": "/d"})


def test_contenders_get_none_of_the_users_settings() -> None:
    environ = {"HOROVOD_CYCLE_TIME": "9", "TF_NUM_INTRAOP_THREADS": "7", "OMPI_MCA_x": "1", "HOME": "/h", "PATH": "/b"}
    env = clean_environment(environ, programs=Path("/venv/bin"))
    assert env["HOME"] == "/h"
    assert env["PATH"].split(":") == ["/venv/bin", "/b"]
    assert not {"HOROVOD_CYCLE_TIME", "TF_NUM_INTRAOP_THREADS", "OMPI_MCA_x"} & set(env)


def test_each_round_has_every_contender_once_in_seeded_order() -> None:
    contenders = plan().contenders
    orders = plan_orders(contenders, 20, seed=3)
    names = [[each.name for each in order] for order in orders]
    assert all(sorted(each) == sorted(contender.name for contender in contenders) for each in names)
    assert len({tuple(each) for each in names}) > 10
    assert orders == plan_orders(contenders, 20, seed=3)
    assert orders != plan_orders(contenders, 20, seed=4)


def test_result_files_contain_no_path_of_this_machine(tmp_path: Path) -> None:
    assert shorten(str(PEERS / "one_process.py")) == "benchmarks/peers/one_process.py"
    assert shorten(str(tmp_path / "data")) == "data"
    assert shorten("--steps") == "--steps"


def test_another_environment_runs_the_command_with_its_programs() -> None:
    names = ("ringtrain", "ringtrain_again", "ringtrain_other")
    options = BenchOptions(models="TINY", contenders=",".join(names), other_python=Path(sys.executable))
    [experiment] = plan_steps(options, SETTINGS)
    assert [contender.name for contender in experiment.contenders] == list(names)
    assert {("ringtrain", "ringtrain_other")} <= {(each.name, each.other) for each in experiment.comparisons}
    [here], [there] = (commands(experiment, name) for name in ("ringtrain", "ringtrain_other"))
    assert here.argv[0] == "horovodrun"
    assert there.argv == (str(Path(sys.executable).with_name("horovodrun")), *here.argv[1:])
    version = importlib.metadata.version("tensorflow")
    assert experiment.contenders[2].description.startswith(f"ringtrain with tensorflow {version}, keras ")


@pytest.mark.parametrize("python", ["/no/such/python", "/bin/false"])
def test_an_invalid_other_environment_is_refused(python: str) -> None:
    with pytest.raises(UsageError, match=rf"other_python '{python}' is no interpreter with all of tensorflow, keras"):
        plan_steps(BenchOptions(models="TINY", other_python=Path(python)), SETTINGS)


@pytest.mark.parametrize(
    ("mode", "options", "words"),
    [
        ("loop", {"other_python": Path("p")}, "step alone measures another environment"),
        ("step", {"contenders": "ringtrain", "other_python": Path("p")}, "go together"),
        ("step", {"contenders": "ringtrain_other"}, "go together"),
        ("allreduce", {"size": 1}, "allreduce needs at least 2"),
    ],
)
def test_options_that_do_not_fit_a_mode_are_its_obstacle(mode: str, options: dict[str, object], words: str) -> None:
    assert words in find_obstacle(mode, BenchOptions(**options))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rounds": 0}, "rounds is 0"),
        ({"size": 7}, "size is 7; the 15360 samples of CNN must be whole batches"),
        ({"models": "CNN,WIDER"}, "models names 'WIDER'"),
        ({"steps": 10}, "go together"),
        ({"steps": 10, "log_every": 10}, "at least twice as many"),
        ({"steps": 25, "log_every": 10}, "a multiple of log_every"),
        ({"log_every": 0, "steps": 10}, "log_every is 0"),
        ({"data_dir": Path("/no/such/place")}, "is no directory"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        BenchOptions(**options)  # type: ignore[arg-type]


def test_peers_get_the_samples_of_each_step(tmp_path: Path) -> None:
    write_order("TINY", 2, 7, tmp_path)
    order = np.load(tmp_path / ORDER_FILE)
    spec = MODELS["TINY"]
    expected = SampleOrder(num_samples=spec.num_samples, global_batch_size=2 * spec.local_batch_size)
    for step, numbers in enumerate(order):
        ranks = [expected.local_batch(step, rank=rank, size=2).indices for rank in range(2)]
        np.testing.assert_array_equal(np.split(numbers, 2), ranks)
    assert len(order) == 7


@pytest.mark.parametrize("name", MODELS)
def test_an_epoch_of_two_ranks_has_whole_batches_alone(name: str) -> None:
    assert MODELS[name].num_samples % (2 * MODELS[name].local_batch_size) == 0
