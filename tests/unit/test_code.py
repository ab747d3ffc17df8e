"""Which modules are the user's, and what is told of them; without other ranks."""

import importlib
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringtrain.guard.preflight import describe_loaded_code
from ringtrain.messages.defects import is_users_own

Facts = dict[str, str | list[str]]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that modules are imported from, and which are forgotten afterwards."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def load(place: Path, name: str, source: str, file: str | None = None) -> Facts:
    """What is told of all that is loaded, but for what was loaded before, once this is imported as well."""
    before = describe_loaded_code()
    path = place / (file or f"{name.replace('.', '/')}.py")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    importlib.invalidate_caches()
    importlib.import_module(name)
    return {fact: value for fact, value in describe_loaded_code().items() if before.get(fact) != value}


def test_a_module_next_to_the_workload_is_listed_by_line(place: Path) -> None:
    assert load(place, "ownhelpers", "a = 1\nb = 2\n") == {"ownhelpers.py line": ["a = 1", "b = 2"]}


def test_a_module_is_named_by_its_packages_not_its_location(place: Path) -> None:
    (place / "ownnets").mkdir()
    (place / "ownnets/__init__.py").write_text("c = 3\n")
    facts = load(place, "ownnets.blocks", "a = 1\n")
    assert facts == {"ownnets/__init__.py line": ["c = 3"], "ownnets/blocks.py line": ["a = 1"]}


def test_a_linked_file_of_an_editable_install_is_the_user_s(place: Path) -> None:
    assert is_users_own(str(place / "src/own.py"))
    assert not is_users_own(str(place / "lib/python3.12/site-packages/own.py"))
    assert not is_users_own(importlib.__file__)
    assert not is_users_own("<frozen importlib._bootstrap>")


def test_two_files_of_one_name_are_both_listed(place: Path) -> None:
    for folder, name in (("a", "first"), ("b", "second")):
        (place / folder).mkdir()
        (place / folder / "models.py").write_text(f"name = {name!r}\n")
    source = (
        "import importlib.util, sys\n"
        "for name, folder in (('first_models', 'a'), ('second_models', 'b')):\n"
        f"    spec = importlib.util.spec_from_file_location(name, {str(place)!r} + f'/{{folder}}/models.py')\n"
        "    module = importlib.util.module_from_spec(spec)\n"
        "    sys.modules[name] = module\n"
        "    spec.loader.exec_module(module)\n"
    )
    facts = load(place, "loads_both", source)
    assert (facts["models.py line"], facts["b/models.py line"]) == (["name = 'first'"], ["name = 'second'"])


def test_a_module_in_an_archive_is_listed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(place / "own.zip", "w") as archive:
        archive.writestr("zipped.py", "a = 1\n")
    monkeypatch.syspath_prepend(place / "own.zip")
    assert load(place, "zipped", "", file="unused.txt") == {"zipped.py line": ["a = 1"]}


def test_the_versions_of_imported_packages_are_listed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = place / "site-packages"
    monkeypatch.syspath_prepend(folder)
    (folder / "installed_one").mkdir(parents=True)
    (folder / "installed_one/__init__.py").write_text("__version__ = '3.1'\nfrom installed_one.part import f\n")
    (folder / "installed_one/part.py").write_text("def f(): pass\n")
    (folder / "unused_one.py").write_text("__version__ = '1'\n")
    facts = load(place, "imports_one", "from installed_one import f\nimport numpy\n")
    assert facts == {"imports_one.py line": ["from installed_one import f", "import numpy"], "installed_one": "3.1"}
