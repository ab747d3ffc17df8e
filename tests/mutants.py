"""Plant defects in the source, one at a time: do the tests that hold a file see them?

    python -m tests.mutants [--modules step,reduce] [--count N] [--seed S]

tries N defects of each file, in a copy of the checkout, and writes results/mutation.json. What is killed there, or has
a reason to be equivalent, is not tried again: remove the file to try all anew.
"""

import argparse
import ast
import copy
import itertools
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ringtrain.collectives.native.library import LIBRARY
from tests.faults.summary import describe_commit
from tests.world.processes import REPOSITORY, clean_environment, run_command

RESULT = REPOSITORY / "results/mutation.json"
FEW = "not [3 and not Gloo"  # what a third rank alone sees is not looked for
STEP = "tests/world/test_step.py"

# Each file with the tests that hold it, those that are done soon first: each list is a run of pytest.
MODULES: dict[str, tuple[str, list[list[str]]]] = {
    "order": (
        "data/order.py",
        [["tests/unit/test_order.py"], ["tests/world/test_feeding.py", "-m", "", "-k", "cannot_be_verified"]],
    ),
    "schedule": ("step/schedule.py", [["tests/unit/test_schedule.py"]]),
    "checkpoint": (
        "run/checkpoint.py",
        [
            [f"tests/unit/test_{name}.py" for name in ("checkpoint", "checkpoint_damage", "checkpoint_writing")],
            [f"tests/unit/test_{name}.py" for name in ("best", "resume", "variables", "identity")],
        ],
    ),
    "reduce": (
        "collectives/gradients.py",
        [
            ["tests/unit/test_groups.py"],
            ["tests/world/test_collectives.py", "-k", FEW],
            [STEP, "-k", f"{FEW} and (n_ranks or sparse or overflow or norm)"],
            ["tests/world/test_verify.py", "-k", "small"],
        ],
    ),
    "optimizers": ("step/optimizers.py", [["tests/unit/test_fused.py"], [STEP, "-k", f"{FEW} and averages"]]),
    "loss_scale": ("step/loss_scale.py", [[STEP, "-k", f"{FEW} and (loss_scale or first_values)"]]),
    "evaluation": (
        "training/evaluation.py",
        [
            [STEP, "-k", f"{FEW} and (evaluat or averages or another_order)"],
            ["tests/unit/test_refused_workloads.py", "-k", "labels"],
            ["tests/world/test_feeding.py", "-k", "skipped"],
            ["tests/world/test_verify.py", "-k", "plain_keras and not command"],
        ],
    ),
    "step": (
        "step/train_step.py",
        [
            [STEP, "tests/world/test_nonfinite.py", "-k", FEW],
            ["tests/world/test_jit.py", "tests/world/test_sharding.py", "-k", f"{FEW} and (named or adam or scale)"],
            ["tests/unit/test_refused_workloads.py"],
            ["tests/world/test_verify.py", "-k", "one_process_equals"],
        ],
    ),
    "local_gradients": (
        "step/local_gradients.py",
        [
            [STEP, "tests/world/test_nonfinite.py", "-k", FEW],
            ["tests/world/test_jit.py", "-k", f"{FEW} and (collectives or reports)"],
            ["tests/unit/test_refused_workloads.py"],
            ["tests/world/test_verify.py", "-k", "one_process_equals"],
        ],
    ),
}

SWAPPED: dict[type[ast.AST], type[Any]] = {
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult},
    **{ast.Mod: ast.Add, ast.Pow: ast.Mult, ast.LShift: ast.RShift, ast.RShift: ast.LShift},
    **{ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitOr, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In},
}
OTHER_NAMES = {"min": "max", "any": "all", "minimum": "maximum", "floor": "ceil", "reduce_sum": "reduce_mean"}
OTHER_NAMES |= {"reduce_all": "reduce_any", **{other: name for name, other in OTHER_NAMES.items()}}
DROPPED = ("sorted", "reversed")
# Not planted: what would change a message, a type, a check of the code itself, or how fast TensorFlow traces.
SPARED_PARTS = (ast.Raise, ast.JoinedStr)
SPARED_FIELDS = ("annotation", "returns", "decorator_list")
SPARED_KEYWORDS = ("strict", "autograph", "trainable")


class Mutant(NamedTuple):
    """A defect: another text in the place of these bytes of a source."""

    start: int
    end: int
    text: str


def mutants_of(source: bytes) -> list[Mutant]:
    """All defects that can be planted in a file."""
    lines = [0, *itertools.accumulate(len(line) for line in source.splitlines(keepends=True))]
    found = []
    for part in parts_of(ast.parse(source)):
        for node, other in changes(part):
            start, end = lines[node.lineno - 1] + node.col_offset, lines[node.end_lineno - 1] + node.end_col_offset
            text = ast.unparse(other)
            found.append(Mutant(start, end, text if isinstance(node, ast.stmt) else f"({text})"))
    return found


def parts_of(node: ast.AST) -> Iterator[ast.AST]:
    """The parts of a program that do something."""
    if isinstance(node, SPARED_PARTS) or getattr(node, "arg", "") in SPARED_KEYWORDS:
        return
    yield node
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and name not in SPARED_FIELDS:
                yield from parts_of(child)


def changes(node: Any) -> Iterator[tuple[Any, ast.AST]]:
    """Parts of this part, with what may stand there instead."""
    if isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign) and not is_path(node):
        yield node, changed(node, op=SWAPPED[type(node.op)]())
    elif isinstance(node, ast.Compare):
        yield node, changed(node, ops=[SWAPPED[type(node.ops[0])](), *node.ops[1:]])
    elif isinstance(node, ast.UnaryOp):
        yield node, node.operand
    elif isinstance(node, ast.If | ast.While | ast.IfExp):
        if isinstance(node.test, ast.Name | ast.Attribute | ast.Call) and "TYPE_CHECKING" not in ast.dump(node.test):
            yield node.test, ast.UnaryOp(ast.Not(), node.test)
    elif isinstance(node, ast.comprehension):
        yield from ((test, ast.Constant(True)) for test in node.ifs)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield node, ast.Constant(not node.value if isinstance(node.value, bool) else node.value + 1)
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield node, ast.Pass()
    elif isinstance(node, ast.Call):
        field = "attr" if isinstance(node.func, ast.Attribute) else "id"
        name = getattr(node.func, field, "")
        if name in OTHER_NAMES:
            yield node, changed(node, func=changed(node.func, **{field: OTHER_NAMES[name]}))
        if name in DROPPED:
            yield node, node.args[0]


def is_path(node: Any) -> bool:
    """Whether this joins a path: any other operator there is an error in any test."""
    return isinstance(node.op, ast.Div) and re.search("root|path|directory|_FILE", ast.unparse(node)) is not None


def changed(node: Any, **fields: Any) -> Any:
    other = copy.copy(node)
    for name, value in fields.items():
        setattr(other, name, value)
    return other


def choose(source: bytes, count: int, seed: str) -> list[Mutant]:
    """A sample of the defects in the order of the source: a second one of a line only where all lines have one."""
    shuffled = mutants_of(source)
    random.Random(seed).shuffle(shuffled)
    on_line: dict[int, int] = {}
    numbered = []
    for mutant in shuffled:
        line = source.count(b"\n", 0, mutant.start)
        on_line[line] = on_line.get(line, 0) + 1
        numbered.append((on_line[line], mutant))
    return sorted(mutant for _, mutant in sorted(numbered, key=lambda item: item[0])[:count])


def describe(file: str, source: bytes, mutant: Mutant) -> dict[str, Any]:
    """A defect before it is tried."""
    line_start = source.rfind(b"\n", 0, mutant.start) + 1
    functions = re.findall(rb"^ *def (\w+)", source[: mutant.start], re.MULTILINE)
    return {
        "file": f"ringtrain/{file}",
        "function": functions[-1].decode() if functions else "",
        "line": source.count(b"\n", 0, mutant.start) + 1,
        "column": mutant.start - line_start,
        "source": source[line_start:].split(b"\n", 1)[0].decode().strip(),
        "was": source[mutant.start : mutant.end].decode(),
        "became": mutant.text,
    }


def identity(case: Mapping[str, Any]) -> tuple[Any, ...]:
    """What stays the same while lines are added elsewhere."""
    return tuple(case[name] for name in ("file", "function", "column", "source", "was", "became"))


def who_fails(root: Path, stages: Sequence[Sequence[str]], limit_seconds: float) -> str | None:
    """The first test that fails in this copy of the checkout, or takes too long; None where all pass."""
    for stage in stages:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider", *stage]
        try:
            finished = run_command(command, env=clean_environment(), timeout=limit_seconds, cwd=root)
        except subprocess.TimeoutExpired:
            return f"more than {limit_seconds:.0f} s"
        if finished.rc != 0:
            failed = re.search(r"^(?:FAILED|ERROR) (\S+)", finished.stdout, re.MULTILINE)
            return failed[1] if failed else (finished.stdout + finished.stderr)[-1000:]
    return None


def try_module(root: Path, module: str, arguments: argparse.Namespace, known: dict[Any, dict[str, Any]]) -> None:
    """Try the defects of a file; what is known already stays as it is."""
    file, stages = MODULES[module]
    path, start = root / "ringtrain" / file, time.monotonic()
    source = path.read_bytes()
    if failing := who_fails(root, stages, 600):
        sys.exit(f"{module}: without a defect fails {failing}")
    limit_seconds = 30 + 3 * (time.monotonic() - start)  # of one run of pytest; what lets it wait for longer is killed
    print(f"{module}: the tests take {time.monotonic() - start:.0f} s", flush=True)
    chosen = set(choose(source, arguments.count, f"{module} {arguments.seed}"))
    for mutant in mutants_of(source):
        case = describe(file, source, mutant)
        before = known.get(identity(case), {})
        is_decided = before.get("killed_by") or "reason" in before
        if is_decided or not (before or mutant in chosen):
            continue
        path.write_bytes(source[: mutant.start] + mutant.text.encode() + source[mutant.end :])
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):  # it is told from its source by time and size
            compiled.unlink()
        start = time.monotonic()
        case |= {"killed_by": who_fails(root, stages, limit_seconds), "commit": arguments.commit}
        known[identity(case)] = case
        print(f"{time.monotonic() - start:4.0f} s", *case.values(), sep=" | ", flush=True)
        write_result(list(known.values()), arguments)
    path.write_bytes(source)


def write_result(cases: Sequence[Mapping[str, Any]], arguments: argparse.Namespace) -> dict[str, dict[str, int]]:
    """Write the cases, and their counts by file. Of a survivor the reason says why it is equivalent."""
    counts = {}
    for name in (*MODULES, "all"):
        mine = [case for case in cases if name == "all" or case["file"] == f"ringtrain/{MODULES[name][0]}"]
        killed, equivalent = sum(bool(case["killed_by"]) for case in mine), sum("reason" in case for case in mine)
        survived = len(mine) - killed - equivalent
        counts[name] = {"tried": len(mine), "killed": killed, "equivalent": equivalent, "survived": survived}
    command = f"python -m tests.mutants --count {arguments.count} --seed {arguments.seed}"
    RESULT.write_text(json.dumps({"command": command, "counts": counts, "cases": list(cases)}, indent=1) + "\n")
    return counts


def main() -> None:
    """Try the defects, and print what became of all that were ever tried."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modules", default=",".join(MODULES), help="default: %(default)s")
    parser.add_argument("--count", type=int, default=16, help="defects of each file (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="which of them (default: %(default)s)")
    arguments = parser.parse_args(namespace=argparse.Namespace(commit=describe_commit()))
    known = {identity(case): case for case in json.loads(RESULT.read_text())["cases"]} if RESULT.exists() else {}
    with tempfile.TemporaryDirectory(prefix="ringtrain-mutants-") as directory:
        listed = subprocess.check_output(["git", "ls-files", "-coz", "--exclude-standard"], cwd=REPOSITORY, text=True)
        compiled = str(LIBRARY.relative_to(REPOSITORY))
        for name in filter(lambda name: (REPOSITORY / name).is_file(), [*listed.split("\0"), compiled]):
            copied = Path(directory) / name
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, copied)
        for module in arguments.modules.split(","):
            try_module(Path(directory), module, arguments, known)
    for module, counts in write_result(list(known.values()), arguments).items():
        print(f"{module:<12}", *(f"{count:>4} {what}" for what, count in counts.items()))


if __name__ == "__main__":
    main()
