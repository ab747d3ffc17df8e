"""``ringtrain.__all__``: what a user's file needs, and nothing that starts TensorFlow before it is used."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import ringtrain
from tests.unit.test_layers import HEAVY

# When asked for, not before.
STARTS_TENSORFLOW = {
    "SyncBatchNormalization",
    "all_gather",
    "augment",
    "load_image_folder",
    "load_tfrecords",
    "make_parallel",
}


TREE = ast.parse(Path(ringtrain.__file__).read_text(encoding="utf-8"))
SEEN = {  # by mypy and editors: each name with where it is imported from
    alias.name: node.module or ""
    for node in ast.walk(TREE)
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ringtrain.")
    for alias in node.names
}


def test_the_names_are_those_that_mypy_and_editors_see() -> None:
    assert sorted([*SEEN, "__version__"]) == ringtrain.__all__ == dir(ringtrain)


@pytest.mark.parametrize(("name", "home"), SEEN.items())
def test_each_public_name_is_its_module_s_and_documented(name: str, home: str) -> None:
    found = getattr(ringtrain, name)
    assert found.__doc__
    assert found is getattr(importlib.import_module(home), name)


def test_there_are_no_other_names() -> None:
    with pytest.raises(ImportError, match="cannot import name 'trian' from 'ringtrain'"):
        from ringtrain import trian  # type: ignore[attr-defined]  # noqa: F401


def test_only_names_that_compute_import_tensorflow() -> None:
    light = sorted(set(ringtrain.__all__) - STARTS_TENSORFLOW)
    script = f"from ringtrain import {', '.join(light)}\nimport sys\nprint(sorted({HEAVY!r} & set(sys.modules)))"
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert finished.stdout == "[]\n"


def test_samples_to_evaluate_on_may_be_left_out() -> None:
    train = ringtrain.from_generator(lambda rank, size: iter([]))
    assert ringtrain.Sources(train=train) == ringtrain.Sources(train, None)
