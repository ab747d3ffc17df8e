"""What the documents say is there."""

import inspect
import json
import pkgutil
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

import ringtrain.keras
from benchmarks.__main__ import MODES
from benchmarks.plans import VARIATIONS
from benchmarks.spread import Spread, describe_spread, paired_ratios
from benchmarks.table import QUESTIONS, make_page, read_results
from tests.faults.summary import TESTS, markdown, markdown_promises, summarize

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
GUARANTEES = (ROOT / "docs/guarantees.md").read_text()
REFERENCE = (ROOT / "docs/reference.md").read_text()
SPEED = (ROOT / "docs/speed.md").read_text()
TROUBLESHOOTING = (ROOT / "docs/troubleshooting.md").read_text()
DOCUMENTS = [*sorted(ROOT.glob("*.md")), ROOT / "benchmarks/README.md", *sorted((ROOT / "docs").glob("*.md"))]
SOURCES = [path.read_text() for package in ("ringtrain", "launch") for path in (ROOT / package).rglob("*.py")]
# A message as it is printed: what is split over lines is joined.
JOINED = [" ".join(re.sub(r'"\s+f?"', "", source).split()) for source in SOURCES]

# Of each document, what begins with the name of an example: "# line.py".
LISTING = re.compile(r"^```python\n(# (\w+\.py)\b.*?)^```$", re.MULTILINE | re.DOTALL)
LISTINGS = [(name, text) for document in DOCUMENTS for text, name in LISTING.findall(document.read_text())]

MESSAGES = re.findall(r"`([^`]+)`", "".join(re.findall(r"^### (.*)$", TROUBLESHOOTING, re.MULTILINE)))


@pytest.mark.parametrize("message", MESSAGES)
def test_the_messages_that_are_explained_are_in_the_code(message: str) -> None:
    assert any(message in source for source in JOINED)


def test_about_a_dozen_messages_are_explained() -> None:
    assert len(MESSAGES) >= 12


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_existing_targets(document: Path) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", document.read_text()):
        place, _, heading = link.partition("#")
        target = (document.parent / place).resolve() if place else document
        assert target.exists(), link
        if heading:
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            assert heading in [re.sub(r"[^\w -]", "", text).lower().replace(" ", "-") for text in headings], link


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_files_that_are_named_are_there(document: Path) -> None:
    named = re.findall(r"`((?:ringtrain|launch|tests|docs|examples|results)/[\w./-]+\.\w+)`", document.read_text())
    assert [name for name in named if "NAME" not in name and not (ROOT / name).exists()] == []


def test_each_listing_is_an_example_and_each_example_is_listed_or_linked() -> None:
    examples = {path.name: path.read_text() for path in (ROOT / "examples").iterdir() if path.is_file()}
    listed = dict(LISTINGS)
    assert len(LISTINGS) == len(listed)
    assert listed == {name: examples.get(name) for name in listed}
    pages = [document.read_text() for document in DOCUMENTS]
    assert [name for name in examples.keys() - listed if not any(f"examples/{name})" in page for page in pages)] == []


def public_values() -> dict[str, Any]:
    """What users import, by name; of ``ringtrain.keras`` what is not Horovod's own."""
    values = {name: getattr(ringtrain, name) for name in ringtrain.__all__ if name != "__version__"}
    values |= {name: getattr(ringtrain.keras, name) for name in ringtrain.keras.__all__}
    return {name: value for name, value in values.items() if home_of(value).startswith("ringtrain")}


def home_of(value: Any) -> str:
    """The module of a function or class; a module's own name."""
    return str(getattr(value, "__module__", None) or getattr(value, "__name__", ""))


def shown_in_the_reference() -> list[Any]:
    """What each line ``::: NAME`` stands for, and the public members of modules among them."""
    shown = [pkgutil.resolve_name(name) for name in re.findall(r"^::: (\S+)$", REFERENCE, re.MULTILINE)]
    for module in filter(inspect.ismodule, list(shown)):
        shown += [
            value
            for name, value in vars(module).items()
            if home_of(value) == module.__name__ and callable(value) and not name.startswith("_")
        ]
    return shown


def test_the_reference_has_every_public_name() -> None:
    shown = {id(value) for value in shown_in_the_reference()}
    assert [name for name, value in public_values().items() if id(value) not in shown] == []


def test_everything_in_the_reference_is_documented() -> None:
    # Where a dataclass or a named tuple says nothing, Python says "Name(field, ...)".
    undocumented = [
        value
        for value in shown_in_the_reference()
        if not value.__doc__ or value.__doc__.startswith(f"{value.__name__}(")
    ]
    assert undocumented == []


def test_pre_commit_runs_the_locked_tools_and_downloads_nothing() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert [repository["repo"] for repository in config["repos"]] == ["local"]
    hooks = config["repos"][0]["hooks"]
    assert {hook["language"] for hook in hooks} == {"system"}
    assert {hook["entry"].split()[0] for hook in hooks} == {".venv/bin/ruff", ".venv/bin/mypy"}


def test_the_guarantees_quote_the_result_of_the_soak() -> None:
    result = json.loads((ROOT / "results/soak.json").read_text())
    num_faults = sum(count for fault, count in result["faults"].items() if not fault.startswith("none"))
    words = " ".join(GUARANTEES.split())
    assert f"`results/soak.json`: {num_faults} faults" in words
    assert f"{result['steps']:,} steps" in words
    assert result["disturbed_minutes"] >= 60
    assert all(result[fact] for fact in ("weights_bit_equal", "losses_equal", "each_sample_once_an_epoch"))


def test_the_guarantees_show_the_table_of_the_injected_faults() -> None:
    result = json.loads((ROOT / "results/faults.json").read_text())
    assert summarize(result["cases"]) == result
    assert markdown(result) in GUARANTEES
    assert markdown_promises(result) in GUARANTEES
    assert all((ROOT / test).exists() for test in TESTS)
    assert [name for name, case in result["cases"].items() if not case["held"]] == []
    assert result["all"]["tried"] >= 100


@pytest.mark.parametrize(
    ("experiment", "sentence"),
    [("cifar10", "a step of `cifar10` takes {} of the time without them ({}; "), ("TINY", "a step of 2.7 ms {} ({}; ")],
)
def test_the_speed_page_quotes_the_results_of_the_guards(experiment: str, sentence: str) -> None:
    rounds = rounds_of("bench-guards", experiment)
    cost, control = (ratio(rounds, *pair) for pair in (("guards_on", "guards_off"), ("guards_on_again", "guards_on")))
    said = sentence.format(f"{cost.median:.3f}", f"{cost.low:.3f} to {cost.high:.3f}")
    words = " ".join(SPEED.split())
    assert f"{said}A/A control {control.low:.3f} to {control.high:.3f})" in words


COLUMNS = {"unconnected processes": "bound", "stock Horovod": "minimal_stock"}
FIT_COLUMNS = {"unconnected `fit`s": "bound", "`fit` by Horovod": "horovod", "Keras 2 on Horovod": "tf_keras"}


SHORT_COLUMNS = {"no communication": "bound", "stock Horovod": "minimal_stock"}


@pytest.mark.parametrize(("page", "columns"), [(README, SHORT_COLUMNS), (SPEED, COLUMNS)], ids=["README", "speed"])
@pytest.mark.parametrize(
    ("words", "model"),
    [
        ("tutorial's network", "CNN"),
        ("perceptron of 21.9 M parameters", "WIDE"),
        ("perceptron of 0.62 M parameters in 300 tensors", "MANY"),
        ("perceptron of 0.13 M parameters", "TINY"),
    ],
)
def test_the_table_of_steps_is_that_of_the_results(words: str, model: str, page: str, columns: dict[str, str]) -> None:
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("|")]
    begin = next(number for number, cells in enumerate(lines) if cells[0] == "a step of")
    head = lines[begin][1:]
    shown = next(cells[1:] for cells in lines[begin:] if words in cells[0])
    steps, fits = rounds_of(f"bench-step-{model}", model), rounds_of("bench-fit", model)
    assert head == [*columns, *(FIT_COLUMNS if page == SPEED else ())]
    assert len(steps) >= (5 if model == "CNN" else 7)
    for column, cell in zip(head, shown, strict=True):
        rounds, other = (steps, columns[column]) if column in columns else (fits or [{"runs": {}}], FIT_COLUMNS[column])
        expected = f"{ratio(rounds, other, 'ringtrain').median:.2f}" if other in rounds[0]["runs"] else ""
        assert cell == expected, column


@pytest.mark.parametrize(
    ("words", "result", "model"),
    [
        ("a perceptron of 21.9 M parameters", "WIDE_ADAM", "WIDE_ADAM"),
        ("a perceptron of 0.62 M parameters in 300 tensors", "adam", "MANY_ADAM"),
        ("a transformer of 1.9 M parameters", "adam", "TRANSFORMER"),
    ],
)
def test_the_table_of_shared_out_updates_is_that_of_the_results(words: str, result: str, model: str) -> None:
    rounds = rounds_of(f"bench-step-{result}", model)
    step = statistics.median(each["runs"]["ringtrain_sharded"]["figures"]["step"] for each in rounds)
    spreads = [ratio(rounds, other, "ringtrain_sharded") for other in ("ringtrain", "bound_fused", "bound")]
    spreads.append(ratio(rounds, "ringtrain", "ringtrain_again"))
    cells = [words, f"{1e3 * step:.1f} ms", *(f"{s.median:.2f} ({s.low:.2f} to {s.high:.2f})" for s in spreads)]
    assert f"| {' | '.join(cells)} |" in SPEED


def test_the_speed_page_quotes_the_measured_slot_memory() -> None:
    rows = json.loads((ROOT / "results/memory.json").read_text())["rows"]
    found = {(row["ranks"], row["sharded"]): (row["slots_mib"], max(row["peak_mib"])) for row in rows}
    [whole], peak = found[1, False]
    assert f"| 1 | {whole:.1f} | | {peak:,.0f} | |" in SPEED
    for size in (2, 4):
        (slots, peak), (pieces, least) = found[size, False], found[size, True]
        assert slots == pytest.approx(size * [whole])
        assert pieces == pytest.approx(size * [whole / size], rel=0.1)
        cells = [f"{size}", f"{max(slots):.1f}", f"{max(pieces):.1f}", f"{peak:,.0f}", f"{least:,.0f}"]
        assert f"| {' | '.join(cells)} |" in SPEED


@pytest.mark.parametrize("model", ["MANY", "WIDE", "CNN"])
def test_the_table_of_the_settings_is_that_of_the_results(model: str) -> None:
    results = [rounds_of(f"bench-settings-{model}", model)]
    if model == "WIDE":  # for which "horovod" itself is another since that file: none of its rows may stay
        results.append(rounds_of(f"bench-settings-horovod-{model}", model))
        assert {name for name, other in VARIATIONS.items() if other.backend == "horovod"} <= results[1][0][
            "runs"
        ].keys()
    assert all(len(rounds) >= 7 for rounds in results)
    lines = (ROOT / "benchmarks/README.md").read_text().splitlines()
    [head] = [line for line in lines if line.startswith("| name | what is undone |")]
    column = [cell.strip() for cell in head.split("|")].index(model)
    shown = {}
    for line in lines:
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) > column and cells[1].strip("`") in VARIATIONS:
            shown[cells[1].strip("`")] = cells[column]
    assert set(shown) == set(VARIATIONS)
    for name, variation in VARIATIONS.items():
        cell = ""
        for rounds in results:  # the later one counts
            if {name, variation.other} <= rounds[0]["runs"].keys():
                spread = ratio(rounds, name, variation.other)
                cell = f"{spread.median:.2f} ({spread.low:.2f} to {spread.high:.2f})"
        assert shown[name] == cell, name


def rounds_of(result: str, experiment: str) -> list[dict[str, Any]]:
    experiments = json.loads((ROOT / f"results/{result}.json").read_text())["experiments"]
    return [each for found in experiments if found["name"] == experiment for each in found["rounds"]]


def ratio(rounds: Sequence[dict[str, Any]], name: str, other: str) -> Spread:
    """Of their seconds, round by round."""
    seconds = [[each["runs"][who]["figures"]["step"] for each in rounds] for who in (name, other)]
    return describe_spread(paired_ratios(*seconds))


def test_the_page_shows_the_table_of_networks() -> None:
    lines: dict[str, list[str]] = {}
    for row in json.loads((ROOT / "results/network.json").read_text())["rows"]:
        milliseconds = f"{1000 * statistics.median(row['sec_per_batch']):.0f}"
        lines.setdefault(f"{row['model']} {row['link']}", []).append(milliseconds)
    page = (ROOT / "docs/speed.md").read_text()
    for line, values in lines.items():
        assert f"| {' | '.join(values)} |" in page, line


def test_the_page_shows_how_control_messages_grow() -> None:
    result = json.loads((ROOT / "results/scale.json").read_text())
    page = " ".join((ROOT / "docs/scaling.md").read_text().split())
    for row, words in (
        (result["rows"][0], "with 2 ranks and"),
        (result["rows"][-1], f"with {result['rows'][-1]['ranks']}"),
    ):
        assert f"{row['CPU seconds of a rank']:.1f} s" in page
        assert f"{row['control bytes that a rank receives'] / 1000:.2g} kB {words}" in page
    fit, last = result["fits"]["control bytes that a rank receives"], result["light"][-1]
    assert f"{fit['1024'] / 1e6:.1f} MB (± {fit['plus_minus'] / 1e6:.1f}) with 1,024" in page
    second = "a second to rank 0's watchdog"
    assert f"watchdogs of {last['ranks']} processes" in page
    share = last["share of a core for rank 0's watchdog"]
    assert f"{100 * share:.0f} % of a core" in page
    assert f"({last[f'bytes {second}'] / 1000:.0f} kB) a second" in page


def test_the_benchmark_page_equals_its_command_s_output() -> None:
    assert (ROOT / "results/README.md").read_text() == make_page(read_results(ROOT / "results"))


def test_the_benchmark_page_lists_what_is_not_measured() -> None:
    assert set(QUESTIONS) == set(MODES)
    assert make_page({}).endswith(f"## Not measured yet\n\n{', '.join(f'`{mode}`' for mode in QUESTIONS)}\n")


def test_the_signatures_of_the_reference_are_those_of_the_code() -> None:
    import ringtrain.keras as hvd

    [listing] = re.findall(r"```python\n(.*?)```", (ROOT / "docs/reference.md").read_text(), re.DOTALL)
    shown = re.findall(r"^([\w.]+)\(([^)]*)\)(?: +(?:->|#)[^\n]*)?$", listing, re.MULTILINE)
    assert len(shown) == 18
    for name, parameters in shown:
        value: Any = hvd if name.startswith("hvd.") else ringtrain
        for part in name.removeprefix("hvd.").split("."):
            value = getattr(value, part)
        signature = inspect.signature(value)
        plain = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
        right = str(inspect.Signature(plain)).replace("'", '"')
        assert f"({' '.join(parameters.split())})" == right, name
