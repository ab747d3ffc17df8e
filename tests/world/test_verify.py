"""`ringtrain verify` passes on what is right, and fails on each defect that is planted."""

from __future__ import annotations

import re
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from ringtrain.verify.compare import fold_notes
from ringtrain.verify.world_sizes import DEFAULT_STEPS, choose_steps
from ringtrain.workloads import BUILT_IN
from tests.world.conftest import RunRingtrain
from tests.world.defects import PLANTED, planted
from tests.world.fork_server import keep_stack_traces
from tests.world.group import on_ranks
from tests.world.processes import REPOSITORY, MarkedProcess, clean_environment

SETTINGS: dict[str, Any] = {
    "steps": 12,  # more than two epochs of 107 samples
    "global_batch_size": 25,
    "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9},
}
WORKLOADS = REPOSITORY / "tests/world/workloads"
OPTIMIZERS = {
    "adam": ["--optimizer.name", "adam"],
    "adamw": ["--optimizer.name", "adamw", "--optimizer.weight_decay", "0.01"],
}
# 36, 36 and 35 of the 107 samples, and a step of the next epoch
OVER_AN_EPOCH: dict[str, Any] = {"steps": 4, "global_batch_size": 36}
SHARED_DEFECTS: dict[str, dict[str, Any]] = {  # those that all world sizes share and a plain loop shows
    "the same order in every epoch": OVER_AN_EPOCH,
    "an epoch's rest in its last batch": OVER_AN_EPOCH,
    "the last evaluation batch counted twice": {"steps": 1},
    "evaluation's regularisation doubled": {"steps": 1},
    "batch normalization's state kept as it was": {"steps": 2},
    "micro-batches that count alike": {"steps": 2, "accumulate": 3},
}


@pytest.mark.parametrize(
    ("workload", "samples", "optimizer", "sizes"),
    [
        (f"{WORKLOADS / 'small.py'}:Small", "25", "adam", "1,2"),
        pytest.param("digits", "101", "adamw", "1,2,3", marks=pytest.mark.slow),
    ],
    ids=["small", "digits"],
)
def test_any_number_of_ranks_trains_equally(
    run_ringtrain: RunRingtrain, workload: str, samples: str, optimizer: str, sizes: str
) -> None:
    """20 uneven steps, which neither 2 nor 3 divides, nor the last one of an epoch: 7 samples, or 34 of digits."""
    flags = ["--workload", workload, "--global_batch_size", samples, *OPTIMIZERS[optimizer]]
    finished = run_ringtrain(["verify", "--world_sizes", sizes, *flags], timeout=280)
    assert finished.rc == 0, finished.stdout + finished.stderr
    assert "20 steps, float64" in finished.stdout
    compared = re.findall(r"^(\d) process\w*: 20 steps, \d+ s$", finished.stdout, re.MULTILINE)
    assert ",".join(compared) == sizes
    assert "DIFFERS" not in finished.stdout
    found = re.findall(r": \w+ +ok\b", finished.stdout)
    assert len(found) == (len(compared) - 1) * (6 + 7 + 5 + 5)  # sizes; comparisons of four trials
    assert len(finished.stdout.partition("\ncompared:\n")[2].partition("\nnot compared:\n")[0].splitlines()) == 4


JIT = ["--jit_compile", "true"]
SMALLER = {"inception": ("1", "4"), "cifar10_resnet": ("1", "8")}  # steps, and samples of one
WAYS = {  # XLA takes minutes to compile Inception for each trial
    **dict.fromkeys(sorted(BUILT_IN), JIT),
    "inception": [],
    "autoencoder": [*JIT, "--options.width", "4"],
    "cifar10_resnet": [*JIT, "--options.width", "8"],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workload", "flags"),
    [
        *WAYS.items(),
        ("digits", [*JIT, "--shard_optimizer", "true"]),
        ("digits", ["--optimizer.name", "lars", "--optimizer.weight_decay", "0.01", "--optimizer.exclude", "bias"]),
        ("digits", ["--optimizer.name", "lamb", "--shard_optimizer", "true"]),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
@pytest.mark.timeout(900)
def test_two_ranks_train_the_built_in_workloads_as_one_does(
    run_ringtrain: RunRingtrain, workload: str, flags: list[str]
) -> None:
    steps, samples = SMALLER.get(workload, ("2", "20"))
    few = ["--synthetic", "true", "--world_sizes", "1,2", "--steps", steps, "--global_batch_size", samples]
    finished = run_ringtrain(["verify", "--workload", workload, *few, *flags], timeout=850)
    assert finished.rc == 0, finished.stdout + finished.stderr


@pytest.mark.slow
def test_verify_exits_with_5_if_a_workload_is_wrong(run_ringtrain: RunRingtrain) -> None:
    workload = f"{WORKLOADS / 'wrong_by_rank.py'}:WrongByRank"
    finished = run_ringtrain(["verify", "--workload", workload, "--world_sizes", "1,2", "--steps", "3"], timeout=120)
    assert finished.rc == 5, finished.stdout + finished.stderr
    assert "2 against 1: weights    DIFFERS" in finished.stderr
    assert "Traceback" not in finished.stderr


def test_a_small_number_of_workload_steps_is_used() -> None:
    assert choose_steps({"steps": 7}) == 7
    assert choose_steps({"epochs": 3}) == choose_steps({"steps": 100_000}) == DEFAULT_STEPS


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_verify_ends_its_processes_when_terminated(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "ringtrain", "verify", "--world_sizes", "2,3", "--steps", "5000"]
    with (tmp_path / "log").open("wb") as log:
        process = MarkedProcess(command, clean_environment(), stdout=log, stderr=subprocess.STDOUT)
    try:
        end = time.monotonic() + 60
        while len(process.pids()) < 4:  # verify, mpirun and two ranks
            assert process.popen.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < end, (tmp_path / "log").read_text()
            time.sleep(0.05)
        process.popen.send_signal(number)
        assert process.wait_until_gone(20)
        assert process.popen.returncode == 128 + number
    finally:
        process.end()
    lines = (tmp_path / "log").read_text().splitlines()
    said = f"ringtrain: verify was ended by {number.name}; its processes are gone."
    assert lines == ["training under each of the world sizes 2, 3", said]


@pytest.mark.slow
def test_the_command_compares_with_a_plain_keras_loop(run_ringtrain: RunRingtrain) -> None:
    arguments = ["verify", "--workload", f"{WORKLOADS / 'small.py'}:LiveBatchNorm", "--world_sizes", "1,2"]
    finished = run_ringtrain([*arguments, "--oracle", "true", "--steps", "6", "--accumulate", "2"])
    assert finished.rc == 0, finished.stdout + finished.stderr
    assert len(re.findall(r"1 against plain Keras: \w+ +ok\b", finished.stdout)) == 6


@on_ranks(2)
def test_layers_that_differ_by_design_are_named_and_disabled(collective: Any) -> None:
    from tests.world.workloads.small import DropoutAndBatchNorm

    findings, notes = findings_of(DropoutAndBatchNorm(), collective, trials=("float64",), steps=2)
    assert all(finding.passes for finding in findings), findings
    if collective.world.is_rank0:
        assert [note.split(":")[0] for note in notes] == ["normalization", "dropout"]


def test_layers_with_equal_notes_share_a_line() -> None:
    notes = [*(f"norm_{number}: frozen" for number in range(5)), "dropout: off"]
    assert fold_notes(notes) == ["norm_0, norm_1, norm_2 and 2 more layers: frozen", "dropout: off"]


@on_ranks(2)
def test_verify_passes_without_a_defect(collective: Any) -> None:
    from tests.world.workloads.small import Small

    findings, notes = findings_of(Small(), collective)
    assert all(finding.passes for finding in findings), findings
    assert notes == []


def test_at_most_two_defects_need_a_plain_keras_loop_to_show() -> None:
    assert len(PLANTED) >= 30
    assert len([case for case in PLANTED.values() if case.trial == "plain"]) <= 2


@pytest.mark.parametrize(
    "defect",
    [
        pytest.param(defect, marks=[pytest.mark.native] * case.is_native + [pytest.mark.slow] * (not case.is_quick))
        for defect, case in PLANTED.items()
        if case.trial != "plain"
    ],
)
@on_ranks(2)
def test_verify_fails_on_a_planted_defect(collective: Any, defect: str) -> None:
    from tests.world.workloads import small

    case = PLANTED[defect]
    findings, _ = findings_of(
        getattr(small, case.workload)(),
        collective,
        defect=defect,
        trials=(case.trial,),
        is_shared=case.is_shared,
        steps=SETTINGS["steps"] if case.is_shared else 4,
        **case.settings,
    )
    if collective.world.is_rank0:
        assert not all(finding.passes for finding in findings), findings


@pytest.mark.slow
@on_ranks(2)
def test_all_paths_pass_without_a_defect(collective: Any) -> None:
    from tests.world.workloads import small

    optimizer = {"name": "sgd", "lr": 0.1, "momentum": 0.9, "clip_global_norm": 0.1, "ema": 0.9}
    every = ("float64", "float32", "own", "float64-sharded", "float64-accumulated")
    own: list[tuple[str, dict[str, Any]]] = [
        ("Small", {"precision": "mixed_float16"}),
        ("Embedded", {"compression": "fp16"}),
        *([("Embedded", {"compression": "bf16"})] if collective.sums_bfloat16 else []),
    ]
    for name, options in own:
        findings, _ = findings_of(getattr(small, name)(), collective, trials=every, optimizer=optimizer, **options)
        assert all(finding.passes for finding in findings), findings


@on_ranks(2)
def test_exclusions_from_the_comparison_are_listed(collective: Any) -> None:
    from ringtrain.verify.compare import describe_findings
    from tests.world.workloads.small import OwnStep

    trials, sgd = ("own", "float64-sharded"), {"name": "sgd", "lr": 0.1}
    records = records_of(OwnStep(), collective, trials=trials, compression="fp16", optimizer=sgd, steps=2)
    if collective.world.is_rank0:
        lines, passed = describe_findings([1, 2], records)
        assert passed, lines
        text = "\n".join(lines)
        compared, _, left_out = text.partition("\ncompared:\n")[2].partition("\nnot compared:\n")
        assert "1 step, --compression fp16" in compared
        assert "2 steps, float64, gradients in groups, updates sharded" in compared
        assert "OwnModel.train_step: never called" in left_out
        assert "--compression fp16: what it rounds" in left_out


@on_ranks(2)
def test_losses_across_samples_are_named_as_the_cause(collective: Any) -> None:
    from ringtrain.verify.compare import OTHER_SAMPLES, describe_findings
    from tests.world.workloads.company import Centred
    from tests.world.workloads.small import Small

    centred = records_of(Centred(), collective, trials=("float64",), steps=2)
    wrong = records_of(Small(), collective, trials=("float64",), defect="a mean of means", steps=4)
    if collective.world.is_rank0:
        lines, passed = describe_findings([1, 2], centred)
        assert not passed
        assert lines[0] == OTHER_SAMPLES
        lines, passed = describe_findings([1, 2], wrong)
        assert not passed
        assert OTHER_SAMPLES not in lines


@on_ranks(2, slow=(3,))
def test_the_contrastive_example_trains_on_ranks_as_on_one(collective: Any) -> None:
    """Steps of 505 samples, which 2 does not divide."""
    pairs = runpy.run_path(str(REPOSITORY / "examples/contrastive.py"))["Pairs"]()
    adam = {"name": "adam", "lr": 0.01}
    findings, _ = findings_of(pairs, collective, trials=("float64",), global_batch_size=505, steps=4, optimizer=adam)
    assert all(finding.passes for finding in findings), findings
    if collective.world.is_rank0:
        assert findings[0].tolerance == 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("name", ["CentredTogether", "CentredInside"])
@on_ranks(2, 3)
def test_losses_across_samples_use_those_of_all_ranks(collective: Any, name: str) -> None:
    """106 samples and one left: the second rank has none in each second step."""
    from tests.world.workloads import company

    every = ("float64", "float32", "float64-sharded", "float64-accumulated")
    workload = getattr(company, name)()
    findings, _ = findings_of(workload, collective, trials=every, global_batch_size=106, steps=4)
    assert all(finding.passes for finding in findings), findings
    if collective.world.is_rank0:
        assert findings[0].tolerance == 1e-10


@on_ranks(1)
def test_a_loss_with_undeclared_collectives_is_refused(collective: Any) -> None:
    from ringtrain.errors import UsageError
    from tests.world.workloads.company import Undeclared

    with pytest.raises(UsageError, match=r"Undeclared calls ringtrain\.all_gather, but its needs_every_rank is False"):
        findings_of(Undeclared(), collective)


@pytest.mark.parametrize("defect", SHARED_DEFECTS)
@on_ranks(1)
def test_a_plain_keras_loop_finds_defects_of_all_world_sizes(collective: Any, defect: str) -> None:
    from tests.world.workloads.small import LiveBatchNorm

    assert not oracle_passes(LiveBatchNorm(), defect, **SHARED_DEFECTS[defect])


@pytest.mark.parametrize("name", ["LiveBatchNorm", "Normalized", pytest.param("Attention", marks=pytest.mark.slow)])
@on_ranks(1)
def test_one_process_equals_a_plain_keras_loop(collective: Any, name: str) -> None:
    from tests.world.workloads import small

    optimizer = {"name": "adamw", "lr": 0.01, "weight_decay": 0.01, "clip_global_norm": 0.5, "ema": 0.9}
    # SyncBatchNormalization and micro-batches: the loop's are the step's
    accumulate = 2 if name != "Normalized" else 1
    assert oracle_passes(getattr(small, name)(), optimizer=optimizer, accumulate=accumulate, **OVER_AN_EPOCH)


@on_ranks(1)
def test_weight_decay_exclusions_are_words_not_patterns(collective: Any) -> None:
    from tests.world.workloads.small import Small

    optimizer = {"name": "adamw", "lr": 0.01, "weight_decay": 0.5, "exclude": "hidden.k"}  # of small/hidden/kernel
    assert oracle_passes(Small(), optimizer=optimizer, steps=3)


@on_ranks(2)
def test_the_step_tests_find_defects_shared_by_all_ranks(collective: Any) -> None:
    from tests.world import test_step

    for defect, body, *arguments in (
        (
            "batch normalization's state weighted by ranks",
            test_step.test_moving_statistics_are_those_of_all_samples_on_all_ranks,
        ),
        ("dropout's seeds without the step", test_step.test_dropout_masks_are_a_function_of_seed_step_and_rank, False),
    ):
        with planted(defect, collective.world.rank), pytest.raises(AssertionError):
            body.body(collective, *arguments)


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        ("Normalized", "lion"),
        pytest.param("Normalized", "adam", marks=pytest.mark.slow),
        *(pytest.param("Attention", optimizer, marks=pytest.mark.slow) for optimizer in ("adam", "lion")),
    ],
)
@on_ranks(2)
def test_weights_with_a_rounding_gradient_are_no_difference(collective: Any, name: str, optimizer: str) -> None:
    from tests.world.workloads import small

    settings: dict[str, Any] = {"optimizer": {"name": optimizer, "lr": 0.01}, "global_batch_size": 26, "steps": 4}
    findings, _ = findings_of(getattr(small, name)(), collective, trials=("float64",), **settings)
    assert all(finding.passes for finding in findings), findings
    named = [path for finding in findings for path in finding.undetermined]
    if optimizer == "lion" and collective.world.is_rank0:  # which takes the sign of rounding
        bias = {"Attention": "attention/key/bias", "Normalized": "shifted/bias"}[name]
        assert bias in named, findings
        assert not [path for path in named if path.endswith("kernel")]


@on_ranks(2)
def test_weights_decided_by_rounding_compare_by_gradient(collective: Any) -> None:
    from tests.world.workloads.small import Normalized

    findings, _ = findings_of(
        Normalized(),
        collective,
        trials=("float64",),
        optimizer={"name": "lion", "lr": 0.01},
        global_batch_size=26,
        steps=4,
        defect="a bias' gradient doubled on rank 1",
    )
    if collective.world.is_rank0:
        assert [finding.name for finding in findings if not finding.passes and "shifted" in finding.where], findings


@pytest.mark.slow
@on_ranks(2)
def test_labels_and_regularisers_of_float32_meet_float64(collective: Any) -> None:
    from ringtrain.errors import UsageError
    from tests.world.workloads.small import MixedTypes, Squares

    findings, _ = findings_of(Squares(), collective)
    assert all(finding.passes for finding in findings), findings
    if collective.world.is_rank0:  # in the reference, before it meets the others
        with pytest.raises(UsageError, match=r"float64, and \S+small\.py:\d+ does not .* Take types"):
            findings_of(MixedTypes(), collective)


@pytest.mark.parametrize(
    "name",
    [
        "OwnPolicy",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("LossObject", "FloatSoftmax", "HalfLayer")),
    ],
)
@on_ranks(2)
def test_explicit_types_of_layers_and_losses_are_widened(collective: Any, name: str) -> None:
    from tests.world.workloads import narrow

    findings, notes = findings_of(getattr(narrow, name)(), collective, steps=4)
    assert all(finding.passes for finding in findings), findings
    assert notes == []
    assert [f.tolerance for f in findings[:4]] == [1e-10] * 4 * collective.world.is_rank0
    assert all(finding.difference < 1e-12 for finding in findings[:4]), findings


@on_ranks(1)
def test_a_gpu_does_not_round_float32_to_tf32(collective: Any) -> None:
    import tensorflow as tf

    from ringtrain.verify.precision import widened

    is_allowed = tf.config.experimental.tensor_float_32_execution_enabled
    with widened("float32"):
        assert not is_allowed()
    assert is_allowed()


@pytest.mark.parametrize(
    ("name", "dtype"), [("Casts", "float32"), pytest.param("RawCasts", "bfloat16", marks=pytest.mark.slow)]
)
@on_ranks(2)
def test_casts_are_named_and_compared_within_their_rounding(collective: Any, name: str, dtype: str) -> None:
    trials = ("float64",) if dtype == "float32" else ("float64", "float32")  # the wider of the narrow types
    from ringtrain.verify.compare import ROUNDING
    from tests.world.workloads import narrow

    were_kept = keep_stack_traces(True)
    findings, notes = findings_of(getattr(narrow, name)(), collective, trials=trials, steps=4)
    assert all(finding.passes for finding in findings), findings
    if collective.world.is_rank0:
        [note] = notes
        assert re.search(rf"narrow\.py:\d+: computes in {dtype}", note)
        assert ROUNDING[dtype].tolerance <= findings[0].tolerance < 1
    options: dict[str, Any] = {"trials": ("float64",), "defect": "a duplicated sample"}
    wrong, _ = findings_of(getattr(narrow, name)(), collective, steps=4, **options)
    keep_stack_traces(were_kept)
    if collective.world.is_rank0:
        assert not all(finding.passes for finding in wrong), wrong


@on_ranks(1)
def test_a_cast_without_a_python_stack_is_named_by_its_layer(collective: Any) -> None:
    from ringtrain.config import make_config
    from ringtrain.verify.precision import Narrow, find_narrow
    from ringtrain.verify.record import create_recorded_job
    from ringtrain.verify.trials import plan_trials
    from tests.world.workloads.narrow import RawCasts

    config = make_config({**SETTINGS, "precision": "float64"}, RawCasts().defaults)
    trial, *_ = plan_trials(config, is_reference=True)
    job, *_ = create_recorded_job(RawCasts(), trial, collective)
    were_kept = keep_stack_traces(False)
    found = find_narrow(job)
    keep_stack_traces(were_kept)
    assert found == [Narrow("layer nearby", "bfloat16")]


@on_ranks(2)
def test_a_sharded_reference_measures_only_rounding(collective: Any) -> None:
    from ringtrain.config import make_config
    from ringtrain.verify.compare import load_record, measure_noise
    from ringtrain.verify.record import create_recorded_job, record_job
    from ringtrain.verify.trials import plan_trials
    from tests.world.workloads.small import Small

    config = make_config({**SETTINGS, "steps": 3, "shard_optimizer": True, "precision": "float64"}, Small().defaults)
    with tempfile.TemporaryDirectory() as directory:
        trial, *_ = plan_trials(config, is_reference=True)
        record_job(*create_recorded_job(Small(), trial, collective), Path(directory), trial, is_reference=True)
        if collective.world.is_rank0:
            run, perturbed = (load_record(Path(directory) / f"float64{end}.npz") for end in ("", "-perturbed"))
            noise = {name: float(value.max()) for name, value in measure_noise(run, perturbed).items()}
            assert 0 < max(noise.values()) < 1e-12, noise


def test_a_missing_seed_is_named_as_the_cause_in_float64_alone() -> None:
    """In narrower types the noise may be nothing but rounding."""
    import numpy as np

    from ringtrain.verify.compare import ROUNDING, compare_series

    reference, other, noise = ({"losses": np.array([loss])} for loss in (1.0, 1.5, 0.9))
    for dtype, is_named in (("float64", True), ("float32", False)):
        found = compare_series("losses", reference, other, noise, ROUNDING[dtype])
        assert "moves by 9.0e-01" in found.where
        assert ("no seed" in found.where) == is_named


@on_ranks(1)
def test_no_keras_layer_draws_random_numbers_in_a_comparison(collective: Any) -> None:
    import keras
    import numpy as np
    import tensorflow as tf

    from ringtrain.step.train_step import set_precision
    from ringtrain.verify.record import make_comparable
    from tests.world.workloads import every_layer

    set_precision("float64")
    tried = {getattr(keras.layers, name) for create in every_layer.GROUPS.values() for name in create()}
    left_out = {name for name in dir(keras.layers) if isinstance(getattr(keras.layers, name), type)}
    left_out -= every_layer.NOT_TRIED
    assert not {name for name in left_out if getattr(keras.layers, name) not in tried}
    x = tf.constant(np.random.default_rng(0).uniform(size=(3, every_layer.NUM_FEATURES)))
    for group in ("draw", "images"):
        for name in every_layer.GROUPS[group]():
            workload = every_layer.EveryLayer()
            workload.options = {"group": group, "only": name}  # type: ignore[misc]
            model = workload.create_model()
            notes = make_comparable(model)
            assert notes or not [v for v in model.variables if v.name == "seed_generator_state"], name
            np.testing.assert_array_equal(model(x, training=True), model(x, training=True), err_msg=name)

    frozen = keras.Sequential([keras.Input((2,)), keras.layers.BatchNormalization(trainable=False)])
    assert make_comparable(frozen) == [], "its statistics are the same on all ranks as it is"


DRAWING = ["Drawing", "DrawingUnseeded", "DrawingByTensorFlow", "DrawingDropout", "DrawingCategorical", "DrawingLoss"]


@pytest.mark.parametrize("name", DRAWING)
@on_ranks(2, slow=[3])
def test_draws_of_every_call_are_made_equal_and_reported(collective: Any, name: str) -> None:
    from tests.world.workloads import drawing

    trials = ("float64", "float32")
    findings, notes = findings_of(getattr(drawing, name)(), collective, trials=trials, steps=3)
    assert all(finding.passes for finding in findings), findings
    if collective.world.is_rank0:
        place = "the loss" if name == "DrawingLoss" else "sampling"
        assert f"{place}: its random draws differ by rank; for the comparison all samples get the same ones" in notes
        assert not [note for note in notes if "switched off" in note]


def test_an_augmentation_that_differs_by_rank_is_named_as_the_cause(run_ringtrain: RunRingtrain) -> None:
    arguments = ["verify", "--workload", f"{WORKLOADS}/drawing.py:DrawingAugment", "--steps", "1"]
    finished = run_ringtrain([*arguments, "--world_sizes", "1,2"])
    assert finished.rc == 5, finished.stdout + finished.stderr
    assert "likely cause: the workload's augment()" in finished.stderr


def test_a_right_augmentation_is_not_blamed_for_what_another_size_does(run_ringtrain: RunRingtrain) -> None:
    """It is left out for the size that differs, not for the first two sizes, which agree anyway."""
    arguments = ["verify", "--workload", f"{WORKLOADS}/drawing.py:OtherLossOnThreeRanks", "--steps", "1"]
    finished = run_ringtrain([*arguments, "--world_sizes", "1,2,3"])
    assert finished.rc == 5, finished.stdout + finished.stderr
    assert "3 processes, without augment()" in finished.stdout
    assert "the workload's augment()" not in finished.stderr


def test_a_model_that_needs_its_augmentation_gets_its_report(run_ringtrain: RunRingtrain) -> None:
    arguments = ["verify", "--workload", f"{WORKLOADS}/drawing.py:NeededAugment", "--steps", "1"]
    finished = run_ringtrain([*arguments, "--world_sizes", "1,2"])
    assert finished.rc == 5, finished.stdout + finished.stderr
    assert "2 against 1: weights    DIFFERS" in finished.stderr
    assert "the training fails without it" in finished.stderr
    assert "likely cause: the workload's augment()" not in finished.stderr


@on_ranks(2)
def test_draws_that_are_not_made_equal_are_named_as_the_cause(collective: Any) -> None:
    from ringtrain.verify.compare import RANDOM_DRAWS, describe_findings
    from tests.world.workloads.drawing import DrawingGamma

    records = records_of(DrawingGamma(), collective, trials=("float64",), steps=2)
    if collective.world.is_rank0:
        lines, passed = describe_findings([1, 2], records)
        assert not passed
        assert lines[0] == RANDOM_DRAWS


@pytest.mark.parametrize(
    "only",
    [
        "SimpleRNN,Dropout",  # with the attribute `dropout` and without; a loop is a function in the graph
        *(pytest.param(group, marks=pytest.mark.slow) for group in ("draw", "images", "alike")),
    ],
)
@on_ranks(2, timeout=400)
def test_two_ranks_train_the_layers_of_keras_as_one_does(collective: Any, only: str) -> None:
    from tests.world.workloads.every_layer import GROUPS, EveryLayer

    workload = EveryLayer()
    workload.options = {"group": only, "only": ""} if only in GROUPS else {"group": "draw", "only": only}  # type: ignore[misc]
    trials = ("float64", "float32") if only == "images" else ("float64",)
    settings: dict[str, Any] = {"steps": 2, "global_batch_size": 5, "optimizer": {"name": "adam"}}
    findings, _ = findings_of(workload, collective, trials=trials, **settings)
    assert all(finding.passes for finding in findings), findings


def findings_of(
    workload: Any,
    collective: Any,
    *,
    defect: str | None = None,
    trials: Sequence[str] = ("float64", "float32"),
    is_shared: bool = False,
    **settings: Any,
) -> tuple[list[Any], list[str]]:
    """Hold this group of ranks, with a defect planted, against one process without, as `ringtrain verify` does.

    Args:
        trials: those of them that are trained.
        is_shared: True to plant the defect in the one process as well.

    Returns:
        On rank 0 the findings of all trials, and the notes; nothing on the others.
    """
    from ringtrain.verify.compare import check_alone, compare_trials

    records = records_of(workload, collective, defect=defect, trials=trials, is_shared=is_shared, **settings)
    if not records:
        return [], []
    one, both = records[1], records[2]
    findings = [finding for trial in compare_trials(one, both).values() for finding in trial]
    findings += [finding for name in both for finding in check_alone(one.get(name, {}))]
    return findings, one["float64"]["notes"].tolist() if "float64" in one else []


def records_of(
    workload: Any,
    collective: Any,
    *,
    defect: str | None = None,
    trials: Sequence[str] = (),
    is_shared: bool = False,
    **settings: Any,
) -> dict[int, dict[str, Any]]:
    """On rank 0 the records of one process and of these ranks; nothing on the others."""
    from ringtrain.config import make_config

    config = make_config({**SETTINGS, **settings}, workload.defaults)
    shared = defect if is_shared else None
    one: dict[str, Any] = {}
    if collective.world.is_rank0:
        for name in sorted({trial.partition("-")[0] for trial in trials}) or [""]:
            one |= _record_reference(workload, config, shared, name)
    with tempfile.TemporaryDirectory() as directory:
        with planted(defect, collective.world.rank):
            _record_trials(workload, config, collective, directory, trials)
        return {1: one, 2: _load_records(directory)} if collective.world.is_rank0 else {}


def _record_trials(
    workload: Any, config: Any, collective: Any, directory: str, names: Collection[str] = (), **options: Any
) -> None:
    """Record some trials, or all."""
    from ringtrain.collectives.context import use_collective
    from ringtrain.verify import record
    from ringtrain.verify.trials import plan_trials

    def plan_some(config: Any, *, is_reference: bool) -> list[Any]:
        planned = plan_trials(config, is_reference=is_reference)
        assert set(names) <= {trial.name for trial in planned}, (names, planned)
        return [trial for trial in planned if not names or trial.name in names]

    with mock.patch.object(record, "plan_trials", plan_some), use_collective(collective):
        record.record(workload, config, collective, Path(directory), **options)


_references: dict[Any, dict[str, Any]] = {}


def _record_reference(workload: Any, config: Any, defect: str | None, trial: str) -> dict[str, Any]:
    """Records of one process, of one trial or (``""``) of all.

    They are computed once in this process for each workload, config and defect.
    """
    from ringtrain.collectives.base import Solo

    key = (type(workload), repr(getattr(workload, "options", None)), repr(config), defect, trial)
    if key not in _references:
        with tempfile.TemporaryDirectory() as directory, planted(defect, 0):
            _record_trials(workload, config, Solo(alone()), directory, [trial] if trial else [], is_reference=True)
            _references[key] = _load_records(directory)
    return _references[key]


def _load_records(directory: str) -> dict[str, Any]:
    from ringtrain.verify.compare import load_record

    paths = sorted(Path(directory).iterdir(), key=lambda path: path.stat().st_mtime_ns)  # in the order of the trials
    return {path.stem: load_record(path) for path in paths}


def oracle_passes(workload: Any, defect: str | None = None, **settings: Any) -> bool:
    """Whether this process alone, with a defect planted, trains what a plain Keras loop trains."""
    from ringtrain.collectives.base import Solo
    from ringtrain.config import make_config
    from ringtrain.verify.compare import describe_oracle
    from ringtrain.verify.oracle import record_with_oracle

    config = make_config({**SETTINGS, **settings}, workload.defaults)
    with tempfile.TemporaryDirectory() as directory, planted(defect, 0):
        record_with_oracle(workload, config, Solo(alone()), Path(directory))
        lines, passed = describe_oracle(_load_records(directory))
        assert passed == ("DIFFERS" not in " ".join(lines))
        return passed


def alone() -> Any:
    """The world of one process."""
    from ringtrain.runtime.world import World

    return World(rank=0, size=1, local_rank=0, local_size=1, node="here", launcher="no launcher")
