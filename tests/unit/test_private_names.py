"""Private names of Keras and TensorFlow are used in runtime/private.py alone, with exceptions listed here."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRIVATE_PACKAGES = ("keras.src", "tensorflow.python")
WRAPPERS = "ringtrain/runtime/private.py"
# Of Python's library, of mpi4py and of typing.NamedTuple.
OF_OTHERS = {
    "_asdict", "_current_frames", "_exit", "_fields", "_getframe", "_handleof", "_make",
}  # fmt: skip
# A subclass overrides them, or they are names to compare with; each file says why.
OUTSIDE = {
    "ringtrain/collectives/normalization.py": {"_reduction_axes"},  # of the Keras layer that it extends
    "ringtrain/keras/hooks.py": {"keras.src.backend.tensorflow"},  # the names that it replaces in Keras
    "ringtrain/verify/precision.py": {"keras.src.backend.tensorflow.core", "keras.src.ops.core"},  # names of modules
}


def parse_modules() -> dict[str, ast.Module]:
    files = sorted(path for folder in ("ringtrain", "launch") for path in (ROOT / folder).rglob("*.py"))
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8")) for path in files}


def defined_names(tree: ast.Module) -> Iterator[str]:
    """Yield the names of functions, classes, arguments, and attributes of ``self`` and ``cls``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            yield node.attr


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def private_uses(tree: ast.Module, own_names: set[str]) -> Iterator[str]:
    """Yield private names that no module of ringtrain defines, and private packages."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            if node.attr not in own_names | OF_OTHERS:
                yield node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PRIVATE_PACKAGES):
            yield str(node.module)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith(PRIVATE_PACKAGES))
        elif isinstance(node, ast.Constant) and str(node.value).startswith(PRIVATE_PACKAGES):
            yield str(node.value)


def find_uses() -> dict[str, set[str]]:
    modules = parse_modules()
    own_names = {name for tree in modules.values() for name in defined_names(tree)}
    uses = {file: set(private_uses(tree, own_names)) for file, tree in modules.items()}
    return {file: names for file, names in uses.items() if names}


def test_private_names_are_used_in_one_module() -> None:
    uses = find_uses()
    assert uses.pop(WRAPPERS)
    assert uses == OUTSIDE


def test_each_wrapper_says_why() -> None:
    tree = parse_modules()[WRAPPERS]
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert [function.name for function in functions if not ast.get_docstring(function)] == []


def test_a_private_name_elsewhere_is_found() -> None:
    tree = ast.parse("from keras.src import backend\nclass A:\n    def f(self, model):\n        return model._layers\n")
    assert set(private_uses(tree, set(defined_names(tree)))) == {"keras.src", "_layers"}
