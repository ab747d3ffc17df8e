"""What is said of errors and of results."""

from pathlib import Path
from typing import Any

import pytest

from ringtrain.collectives import run_on_rank0
from ringtrain.collectives.base import Solo
from ringtrain.config import Config
from ringtrain.messages.defects import describe_defect, format_defect
from ringtrain.run.resume import Start
from ringtrain.runtime.world import World
from ringtrain.training.actions import Ending
from ringtrain.training.evaluation import EvalReport
from ringtrain.training.loop import Result
from ringtrain.training.together import describe_result

ALONE = World(rank=0, size=1, local_rank=0, local_size=1, node="n1", launcher="no launcher")


def error_of(source: str, file: str) -> BaseException:
    """What a function ``fail`` raises that ringtrain calls, without the frame of this test."""
    scope: dict[str, Any] = {}
    exec(compile(source, file, "exec"), scope)
    with pytest.raises(Exception) as caught:  # noqa: PT011 - whatever it is
        run_on_rank0(Solo(ALONE), scope["fail"], name="test")
    error = caught.value
    return error.with_traceback(error.__traceback__.tb_next if error.__traceback__ else None)


def test_a_traceback_begins_with_the_users_own_code() -> None:
    error = error_of("def fail():\n    return [][1]\n", "/home/me/model.py")
    lines = format_defect(error).splitlines()
    assert lines[:2] == ["Traceback (most recent call last):", '  File "/home/me/model.py", line 2, in fail']
    assert lines[-1] == "IndexError: list index out of range"
    assert describe_defect(error) == "IndexError: list index out of range"


def test_an_error_in_a_graph_is_described_by_its_own_line() -> None:
    text = (
        "Graph execution error:\n\nDetected at node X defined at\n  frames\n\nKeyError: 'a'\n\n\t [[{{node X}}]] [Op:f]"
    )
    assert describe_defect(RuntimeError(text)) == "RuntimeError: KeyError: 'a'"
    assert describe_defect(RuntimeError("one\ntwo")) == "RuntimeError: one"
    assert describe_defect(RuntimeError()) == "RuntimeError: "


def test_an_error_in_a_keras_layer_is_described_with_the_layer() -> None:
    text = "Exception encountered when calling Dense.call().\n\n\x1b[1mno such weight\x1b[0m\n\nArguments received: x"
    assert describe_defect(ValueError(text)) == (
        "ValueError: Exception encountered when calling Dense.call(). no such weight"
    )


IN_USER_CODE = """in user code:

    File "/home/me/model.py", line 10, in augment  *
        return mix(x), y
    File "/home/me/model.py", line 4, in mix  *
        x, y, z = x

    ValueError: not enough values to unpack (expected 3, got 2)
"""


def test_an_error_in_autograph_code_is_described_by_its_line() -> None:
    error = ValueError(IN_USER_CODE)
    assert describe_defect(error) == "ValueError: not enough values to unpack (expected 3, got 2)"
    in_a_layer = IN_USER_CODE.replace("not enough", "Exception encountered when calling Mix.call().\n\n    not enough")
    assert describe_defect(ValueError(in_a_layer)) == (
        "ValueError: Exception encountered when calling Mix.call(). not enough values to unpack (expected 3, got 2)"
    )


def test_the_names_of_operations_are_left_out() -> None:
    node = "{{function_node __wrapped__FlushSummaryWriter_device_/job:localhost/replica:0/task:0/device:CPU:0}}"
    assert describe_defect(OSError(f"{node} no space left [Op:X]")) == "OSError: no space left [Op:X]"


def test_a_traceback_of_no_users_code_is_whole() -> None:
    error = error_of("def fail():\n    return [][1]\n", "/usr/lib/python3/site-packages/package/code.py")
    assert "ringtrain/collectives/objects.py" in format_defect(error)


def test_a_traceback_shows_the_cause_of_an_error() -> None:
    source = (
        "def fail():\n    try:\n        [][1]\n    except IndexError as error:\n        raise OSError('x') from error\n"
    )
    text = format_defect(error_of(source, "/home/me/model.py"))
    assert "IndexError" in text
    assert "direct cause" in text


def test_the_last_lines_give_the_result_and_the_path(tmp_path: Path) -> None:
    run = tmp_path / "my run"
    run.mkdir()
    evaluation = EvalReport(samples=4, loss=0.5, data_loss=0.5, metrics={"accuracy": 0.75})
    result = Result(ending=Ending.EARLY, evaluation=evaluation, best=0.8125, best_step=3)
    assert describe_result(
        result, Start(path=str(run), name=str(run)), Config(workload="my model.py", best_metric="accuracy")
    ) == [
        "done (stopped early: no better evaluation for a while): accuracy 0.7500 after the last step, "
        "best accuracy 0.8125 at step 3",
        f"  the run is in:      '{run}'",
        f"  evaluate the best:  python -m ringtrain eval '{run}' --workload 'my model.py'",
    ]
    nothing = Result(ending=Ending.COMPLETED, evaluation=None)
    assert describe_result(nothing, Start(path="/runs/x", name="runs/x"), Config()) == [
        "done",
        "  the run is in:      runs/x",
    ]
