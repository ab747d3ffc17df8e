"""Each package imports only from packages above it, and no two files import each other."""

import graphlib
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.layers import PAGE, PICTURE, ROOT, draw, find_modules, package_of, read_imports, read_packages

LAYERS = read_packages(PAGE.read_text(encoding="utf-8"))
MODULES = find_modules(ROOT)
PUBLIC = ("ringtrain",)  # the package's own file: the version, and public names
MAX_FLAT_MODULES = 9
WITHOUT_TENSORFLOW = [
    "cli", "commands.parser", "config", "errors", "files.bounded", "messages.defects", "report", "script",
    "run.checkpoint", "run.directory", "runtime.devices", "runtime.world", "step.schedule", "terminal.console",
    "verify.compare", "commands.doctor", "doctor.inside", "workloads.digits", "commands.workloads",
]  # fmt: skip
HEAVY = {"tensorflow", "keras", "horovod", "mpi4py"}


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    """Read in a test: at the import of this file, every worker of pytest-xdist would read them."""
    return read_imports(MODULES)


def upward_imports(imports: Mapping[str, set[str]]) -> list[str]:
    """The imports that do not go from a package to one above it."""
    return [
        f"{module} imports {other}"
        for module, others in imports.items()
        if module not in PUBLIC
        for other in others - set(PUBLIC)
        if package_of(module) != package_of(other)
        and not LAYERS.index(package_of(other)) < LAYERS.index(package_of(module))
    ]


def find_circle(imports: Mapping[str, set[str]]) -> list[str]:
    """Files each of which imports the next one, and the last one the first; empty where there are none."""
    try:
        graphlib.TopologicalSorter({module: others - set(PUBLIC) for module, others in imports.items()}).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def plant(root: Path, files: Mapping[str, str]) -> dict[str, set[str]]:
    """The imports of a package with these files."""
    for name, text in files.items():
        path = root / "ringtrain" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return read_imports(find_modules(root))


def test_every_file_belongs_to_a_package() -> None:
    assert {package_of(module) for module in MODULES} - set(PUBLIC) == set(LAYERS)


def test_few_modules_lie_flat() -> None:
    assert len(list((ROOT / "ringtrain").glob("*.py"))) <= MAX_FLAT_MODULES


def test_every_package_has_a_docstring() -> None:
    for init in (ROOT / "ringtrain").rglob("*/__init__.py"):
        assert init.read_text().startswith('"""'), init


def test_a_room_imports_only_from_rooms_above_it(imports: dict[str, set[str]]) -> None:
    assert upward_imports(imports) == []


def test_no_files_import_each_other(imports: dict[str, set[str]]) -> None:
    assert find_circle(imports) == []


def test_an_upward_import_inside_a_function_is_seen(tmp_path: Path) -> None:
    files = {
        "__init__.py": "",
        "data/order.py": "def f():\n    from ringtrain.training.loop import train\n",
        "training/loop.py": "from ringtrain.data.order import f\n",
    }
    assert upward_imports(plant(tmp_path, files)) == ["ringtrain.data.order imports ringtrain.training.loop"]


@pytest.mark.parametrize(
    "second",
    [
        "importlib.import_module('ringtrain.data.order')",
        "from ringtrain.data.order import f",
        "def g():\n    from . import order",
    ],
)
def test_a_circle_between_two_files_of_one_room_is_seen(second: str, tmp_path: Path) -> None:
    files = {"__init__.py": "", "data/__init__.py": "", "data/order.py": "import ringtrain.data.sources\n"}
    circle = find_circle(plant(tmp_path, {**files, "data/sources.py": second}))
    assert set(circle) == {"ringtrain.data.order", "ringtrain.data.sources"}


def test_the_picture_is_drawn_from_the_imports(imports: dict[str, set[str]]) -> None:
    """`python -m tests.layers` draws it anew."""
    [picture] = PICTURE.findall(PAGE.read_text(encoding="utf-8"))
    assert picture == draw(LAYERS, imports)


def test_modules_used_before_pinning_do_not_import_tensorflow() -> None:
    script = (
        f"import sys, {', '.join(f'ringtrain.{name}' for name in WITHOUT_TENSORFLOW)}\n"
        f"print(sorted({HEAVY!r} & set(sys.modules)))"
    )
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert finished.stdout == "[]\n"
