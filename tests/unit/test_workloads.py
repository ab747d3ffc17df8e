"""How a workload is made of its class."""

import hashlib
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from ringtrain.commands.init import write_starting_file
from ringtrain.commands.workloads import ENTRIES, list_workloads
from ringtrain.data.sources import ArraySource
from ringtrain.errors import UsageError
from ringtrain.workloads import BUILT_IN, create_workload, load_workload
from ringtrain.workloads.digits import Digits
from ringtrain.workloads.polynomial import Polynomial


class Wide(Polynomial):
    """Reads its option when it is made."""

    options: ClassVar[Mapping[str, Any]] = {"width": 64}

    def __init__(self) -> None:
        self.doubled = 2 * self.options["width"]


def test_options_are_there_when_the_workload_is_made() -> None:
    workload = create_workload(Wide, {"width": 3})
    assert isinstance(workload, Wide)
    assert (workload.doubled, workload.options) == (6, {"width": 3})
    assert Wide().doubled == 128


def test_built_in_workloads_are_known_without_tensorflow() -> None:
    script = (
        "import sys; from ringtrain.workloads import BUILT_IN, load_workload\n"
        "print(len([load_workload(name).defaults for name in BUILT_IN]))\n"
        "print({'tensorflow', 'keras', 'horovod'} & set(sys.modules))"
    )
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert finished.stdout == f"{len(BUILT_IN)}\nset()\n"


@pytest.mark.parametrize(
    ("synthetic", "digest"),
    [
        (False, "2a028546ca8ca0e11a3839fbca5af5a2a99231453c9b82b6af066492f568559f"),
        (True, "b923d804cf572af8f13ad329bb34bb52c0424d74d9e106baa3ab3b79ff3a7172"),
    ],
)
def test_the_samples_of_digits_stay_those_that_runs_resume_with(synthetic: bool, digest: str) -> None:
    hashed = hashlib.sha256()
    for source in Digits().create_sources(None, synthetic=synthetic):
        assert isinstance(source, ArraySource)
        for array in map(np.asarray, source.arrays().values()):
            hashed.update(f"{array.dtype} {array.shape}".encode() + array.tobytes())
    assert hashed.hexdigest() == digest


def test_the_list_gives_the_size_of_each_built_in_workload() -> None:
    text = list_workloads()
    assert max(map(len, text.splitlines())) <= 80
    assert set(ENTRIES) == set(BUILT_IN)
    for name in BUILT_IN:
        workload_class = load_workload(name)
        parameters = create_workload(workload_class, workload_class.options).create_model().count_params()
        [row] = [line for line in text.splitlines() if line.startswith(f"{name} ")]
        assert row.endswith(f" {parameters:,}")


MINE = """
from ringtrain.workloads.polynomial import Polynomial
class Mine(Polynomial):
    pass
"""


def test_a_file_with_one_workload_needs_no_class_name(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    assert load_workload(str(file)).__name__ == "Mine"
    assert load_workload(f"{file}:Mine").__name__ == "Mine"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "a file without a workload"),
        (f"{MINE}class Other(Mine):\n    pass", r"the workloads Mine, Other; name one, as in .*mine.py:Mine"),
    ],
)
def test_a_file_with_none_or_several_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(text)
    with pytest.raises(UsageError, match=message):
        load_workload(str(file))


def test_a_file_with_a_syntax_error_is_named_with_its_line_once(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("first = 1\nsecond = [1, 2\nthird = 3)\n")
    with pytest.raises(UsageError) as caught:
        load_workload(str(path))
    assert "SyntaxError" in str(caught.value)
    assert str(caught.value).count("line ") == 1 or str(caught.value).endswith("(mine.py, line 3).")
    assert "importlib" not in str(caught.value)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("def __init__(self, width): ...", r"Mine\(\) cannot be made: TypeError: .*'width'.* belongs into options"),
        ("def __init__(self): 1 / 0", r"Mine\(\) cannot be made: ZeroDivisionError: .*line 4"),
        ("options = {5: 3}", r"Mine.options is \{5: 3\}; it must be a mapping of names to plain values"),
        ("options = ['width']", r"Mine.options is \['width'\]; it must be a mapping"),
        ("options = {'size': (3, 4)}", r"Mine.options is .*plain values"),
        ("defaults = [('epochs', 3)]", r"Mine.defaults is .*; it must be a mapping"),
    ],
)
def test_a_class_that_cannot_be_made_is_refused(lines: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"from ringtrain.workloads.polynomial import Polynomial\n\nclass Mine(Polynomial):\n    {lines}\n")
    with pytest.raises(UsageError, match=message):
        create_workload(load_workload(str(file)), {})


def test_a_file_to_begin_with_takes_no_name_of_a_package(tmp_path: Path) -> None:
    for name in ("rich.py", "keras.py"):
        with pytest.raises(UsageError, match="such as my_"):
            write_starting_file(tmp_path / name)
    write_starting_file(tmp_path / "mine.py")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]
