"""The report in a real browser: what it draws, what it reads out, how it fits, what it asks for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ringtrain.report import write_report
from tests.report.chromium import Page
from tests.report.made_run import START, eval_event, make_run, timed, train_event, usual_events

MAX_POINTS = 800
# A chart's curves as they are drawn: the points of each line, back from pixels to values by the texts of two ticks.
DRAWN = """
(() => {
  const figures = [...document.querySelectorAll("figure.chart")];
  const figure = figures.find((found) => found.querySelector("h3").textContent === TITLE);
  const place = (text) => [text.textContent, +text.getAttribute("x"), +text.getAttribute("y")];
  const texts = [...figure.querySelectorAll(".plot > text")].map(place);
  const line = figure.querySelectorAll(".plot g path.line")[INDEX];
  const points = line.getAttribute("d").split(/[ML]/).slice(1).map((p) => p.replace("h0", "").split(" ").map(Number));
  return { texts, points };
})()
"""
COLOUR = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
SPOKEN = "document.getElementById('spoken').textContent"
FOCUS_CHART = "document.querySelector('figure.chart svg.plot').focus()"


def events_of(run: Path, kind: str) -> list[dict[str, Any]]:
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [event for event in events if event["event"] == kind]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = make_run(tmp_path_factory.mktemp("runs") / "first")
    write_report([run], run / "report.html")
    return run


@pytest.fixture(scope="module")
def compared(run: Path) -> Path:
    second = make_run(run.parent / "second", timed(list(usual_events(60))), steps=60)
    without_times = make_run(run.parent / "third", list(usual_events(30)), seed=7)
    target = run.parent / "report.html"
    write_report([run, second, without_times], target)
    return target


def drawn(browser: Page, title: str, index: int) -> tuple[list[float], list[float]]:
    """The steps and the values of a line of a chart with linear axes, as its pixels show them."""
    found = browser.evaluate(DRAWN.replace("TITLE", json.dumps(title)).replace("INDEX", str(index)))
    along = [(float(text), x) for text, x, y in found["texts"] if is_number(text) and y > 200]
    up = [(float(text), y - 4) for text, x, y in found["texts"] if is_number(text) and y <= 205 and x < 60]
    steps = [between(along[0], along[-2], x) for x, _ in found["points"]]  # the last text is moved to fit
    return steps, [between(up[0], up[-1], y) for _, y in found["points"]]


def between(first: tuple[float, float], last: tuple[float, float], pixel: float) -> float:
    (a, at_a), (b, at_b) = first, last
    return a + (pixel - at_a) / (at_b - at_a) * (b - a)


def is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdigit()


def test_the_curves_that_are_drawn_are_those_of_the_events(browser: Page, run: Path) -> None:
    browser.show(run / "report.html")
    for index, kind in enumerate(("train", "eval")):
        steps, values = drawn(browser, "Loss", index)
        events = events_of(run, kind)
        assert steps == pytest.approx([event["step"] for event in events], abs=0.1)
        assert values == pytest.approx([event["loss"] for event in events], abs=0.02)
    [_, accuracy] = drawn(browser, "Accuracy", 0)
    assert accuracy == pytest.approx([event["accuracy"] for event in events_of(run, "eval")], abs=0.005)


def test_the_page_asks_for_nothing_and_says_nothing_wrong(browser: Page, compared: Path, run: Path) -> None:
    for path in (run / "report.html", compared):
        browser.show(path)
        assert browser.evaluate("document.documentElement.dataset.ready") is not None
        assert browser.errors == []
        assert browser.requests == [path.as_uri()]


def test_a_program_that_is_not_the_pages_own_is_not_run(browser: Page, run: Path) -> None:
    """The policy in the page holds: what might have slipped in is refused, and nothing can be sent."""
    browser.show(run / "report.html")
    browser.evaluate(
        "(() => { const s = document.createElement('script'); s.textContent = 'window.slipped = 1'; "
        "document.body.append(s); const i = document.createElement('div'); i.innerHTML = "
        "'<img src=x onerror=\"window.slipped = 1\">'; document.body.append(i); })()"
    )
    refused = browser.evaluate("fetch('http://127.0.0.1:9/').then(() => false, () => true)")
    assert refused
    assert browser.evaluate("window.slipped === undefined")
    assert sum("Content Security Policy" in error for error in browser.errors) >= 2


@pytest.mark.parametrize("width", [1280, 375])
@pytest.mark.parametrize("several", [False, True], ids=["one run", "three runs"])
def test_nothing_is_wider_than_the_window(browser: Page, run: Path, compared: Path, width: int, several: bool) -> None:
    browser.show(compared if several else run / "report.html", width=width)
    assert browser.evaluate(OVERFLOW) <= 0
    boxes = browser.evaluate("report.charts.map((chart) => chart.svg.getBoundingClientRect().toJSON())")
    assert len(boxes) == 5
    assert all(0 < box["left"] < box["left"] + 240 < box["right"] < width for box in boxes)


def test_long_names_do_not_widen_the_page(browser: Page, tmp_path: Path) -> None:
    name = "long_" * 40
    events = timed([START | {"node": name}, train_event(1, **{name: 1.0}), {"event": "warning", "message": name}])
    runs = [make_run(tmp_path / name[:100] / part, events, options={name: name}) for part in ("a", "b")]
    for number in (1, 2):
        write_report(runs[:number], tmp_path / "report.html")
        browser.show(tmp_path / "report.html", width=375)
        assert browser.evaluate(OVERFLOW) <= 0


def test_the_page_is_light_or_dark_as_the_reader_has_it(browser: Page, run: Path) -> None:
    browser.show(run / "report.html", dark=False)
    light = browser.evaluate(COLOUR)
    ink = browser.evaluate(COLOUR.replace("backgroundColor", "color"))
    browser.resize(1280, 900, dark=True)
    assert min(light) > 200
    assert max(ink) < 80
    assert max(browser.evaluate(COLOUR)) < 60
    assert min(browser.evaluate(COLOUR.replace("backgroundColor", "color"))) > 180


def test_arrow_keys_read_the_values(browser: Page, run: Path) -> None:
    browser.show(run / "report.html")
    browser.evaluate(FOCUS_CHART)
    trained, evaluated = events_of(run, "train"), events_of(run, "eval")
    for key, step in [
        ("ArrowRight", 1),
        ("ArrowRight", 2),
        ("PageDown", 12),
        ("ArrowLeft", 11),
        ("End", 40),
        ("Home", 1),
    ]:
        browser.press(key)
        spoken = browser.evaluate(SPOKEN)
        value = float(f"{trained[step - 1]['loss']:.4g}")
        assert spoken.startswith(f"Loss, step {step}: training {value}, evaluation ")
        shown = browser.evaluate("[...document.querySelectorAll('figure.chart .legend')].map((l) => l.textContent)")
        assert f"training {value}" in shown[0]
        assert f"training {trained[step - 1]['gradient_norm']:g}" in shown[3]  # all charts have the one cursor
    assert spoken.endswith(f"evaluation {float(format(evaluated[0]['loss'], '.4g'))} at step 10")


def test_what_happened_is_read_out_where_it_happened(browser: Page, run: Path) -> None:
    browser.show(run / "report.html")
    browser.evaluate(FOCUS_CHART)
    browser.press("Home")
    browser.press("PageDown")
    for _ in range(9):
        browser.press("ArrowRight")
    assert browser.evaluate(SPOKEN).endswith(
        "; warning: rank 1 on node1 is slow; end: preempted, exit code 75: stopped by SIGTERM; "
        "restart: started again on 4 ranks from step 20"
    )


def test_keys_enlarge_a_part_and_show_all_again(browser: Page, run: Path) -> None:
    browser.show(run / "report.html")
    browser.evaluate(FOCUS_CHART)
    assert browser.evaluate("document.getElementById('whole').disabled")
    browser.press("End")
    browser.press("+")
    assert browser.evaluate("report.view.domain") == [20, 40]
    assert not browser.evaluate("document.getElementById('whole').disabled")
    browser.press("Home")
    assert browser.evaluate(SPOKEN).startswith("Loss, step 20:")
    browser.press("Escape")
    assert browser.evaluate("report.view.domain") == [0, 40]


def test_everything_is_reached_by_tab_with_a_focus_that_is_seen(browser: Page, compared: Path) -> None:
    browser.show(compared)
    reached: list[str] = []
    for _ in range(60):
        browser.press("Tab")
        outline = browser.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        name = browser.evaluate(
            "(document.activeElement.closest('figure') || document.activeElement).querySelector('h3')?.textContent"
            " || document.activeElement.name || document.activeElement.ariaLabel || document.activeElement.textContent"
        )
        if browser.evaluate("document.activeElement === document.body") or name in reached[:1]:
            break
        assert outline != "none", name
        reached.append(name)
    charts = ["Loss logarithmic", "Accuracy", "Learning rate", "Gradient norm", "Throughput, all ranks (examples/s)"]
    assert [name for name in reached if name in charts] == charts
    assert reached[0] == "Skip to the curves"
    assert reached.count("run") == 3
    assert {"axis", "Summary of the runs", "What happened"} <= set(reached)


def test_a_mouse_shows_values_and_enlarges_what_it_drags_across(browser: Page, run: Path) -> None:
    browser.show(run / "report.html")
    box = browser.evaluate(
        "(() => { const chart = report.charts[0]; const b = chart.svg.getBoundingClientRect(); "
        "return [10, 30].map((step) => b.left + chart.x(step) * b.width / chart.width).concat(b.top + 100); })()"
    )
    first, last, y = box
    browser.mouse("mouseMoved", first, y)
    assert "evaluation 0.3" in browser.evaluate("document.querySelector('figure.chart .legend').textContent")
    browser.mouse("mousePressed", first, y)
    browser.mouse("mouseMoved", last, y)
    browser.mouse("mouseReleased", last, y)
    assert browser.evaluate("report.view.domain") == pytest.approx([10, 30], abs=0.1)
    browser.evaluate("document.getElementById('whole').click()")
    assert browser.evaluate("report.view.domain") == [0, 40]


def test_time_instead_of_steps_along_the_axis(browser: Page, run: Path, compared: Path) -> None:
    browser.show(run / "report.html")
    browser.evaluate("document.querySelector('input[value=elapsed]').click()")
    browser.evaluate(FOCUS_CHART)
    browser.press("End")
    seconds = events_of(run, "train")[-1]["time"] - events_of(run, "start")[0]["time"]
    assert browser.evaluate("report.view.cursor") == pytest.approx(
        events_of(run, "eval")[-1]["time"] - events_of(run, "start")[0]["time"]
    )
    assert 0 < seconds < browser.evaluate("report.view.cursor")
    assert "time since the start (s)" in browser.evaluate("document.querySelector('figure.chart .plot').textContent")
    train = "document.querySelector('figure.chart .plot g path.line').getAttribute('d')"
    assert browser.evaluate(f"{train}.split('M').length - 1") == 2  # nothing ran before the second start
    browser.show(compared)  # of one of its runs the times are not known
    assert browser.evaluate("document.querySelector('input[value=elapsed]').disabled")


def test_runs_are_compared_and_can_be_left_out(browser: Page, compared: Path) -> None:
    browser.show(compared)
    lines = "document.querySelectorAll('figure.chart .plot')[0].querySelectorAll('g path.line').length"
    assert browser.evaluate(lines) == 6
    assert browser.evaluate("report.view.domain") == [0, 60]
    browser.evaluate("document.querySelectorAll('input[name=run]')[1].click()")
    assert browser.evaluate(lines) == 4
    legend = browser.evaluate("document.querySelector('figure.chart .legend').innerText")
    assert "first, training" in legend
    assert "second" not in legend
    differing = browser.evaluate(
        "[...document.querySelectorAll('table.compared')].find((t) => t.caption).innerText.split(/\\s+/).join(' ')"
    )
    assert differing == "Settings that differ first second third steps 40 60 40 seed not set not set 7"


def test_values_that_are_not_finite_leave_a_gap_and_a_cross(browser: Page, tmp_path: Path) -> None:
    events = [START, *(train_event(step, **({"loss": "nan"} if step in (5, 6) else {})) for step in range(1, 11))]
    run = make_run(tmp_path / "run", timed(events))
    write_report([run], run / "report.html")
    browser.show(run / "report.html")
    assert browser.errors == []
    chart = "document.querySelector('figure.chart .plot')"
    assert browser.evaluate(f"{chart}.querySelectorAll('path.cross').length") == 2
    assert browser.evaluate(f"{chart}.querySelector('g path.line').getAttribute('d').split('M').length - 1") == 2
    assert "2 logged values are not finite" in browser.evaluate("document.body.innerText")


def test_a_run_that_has_just_begun_has_a_page(browser: Page, tmp_path: Path) -> None:
    for name, events in {
        "start": [START],
        "step": [START, train_event(3)],
        "evaluation": [START, eval_event(3)],
    }.items():
        run = make_run(tmp_path / name, timed(events))
        write_report([run], run / "report.html")
        browser.show(run / "report.html")
        assert browser.errors == []
        assert "it is running, or was killed" in browser.evaluate("document.body.innerText")


def test_a_hundred_thousand_steps_are_drawn_as_few_points(browser: Page, tmp_path: Path) -> None:
    events = [START, *(train_event(step) for step in range(1, 100_001)), eval_event(100_000)]
    run = make_run(tmp_path / "run", timed(events))
    write_report([run], run / "report.html")
    browser.show(run / "report.html")
    points = browser.evaluate("[...document.querySelectorAll('path.line[data-points]')].map((p) => +p.dataset.points)")
    assert max(points) <= MAX_POINTS
    assert browser.evaluate("report.charts[0].stops().length") <= 2 * MAX_POINTS
    assert browser.evaluate("document.querySelectorAll('path.band').length") >= 3
    # Seconds on a machine of its own are a tenth of this; here others may have the cores.
    assert float(browser.evaluate("document.documentElement.dataset.ready")) < 10_000


def test_sample_images_follow_their_slider(browser: Page, tmp_path: Path) -> None:
    import tensorflow as tf

    run = make_run(tmp_path / "run")
    writer = tf.summary.create_file_writer(str(run / "tensorboard"))
    with writer.as_default():
        for step in (10, 20, 30):
            tf.summary.image("samples", tf.fill([2, 4, 6, 3], step / 30), step=step)
    writer.close()
    write_report([run], run / "report.html")
    browser.show(run / "report.html")
    sizes = "[...document.querySelectorAll('.row img')].map((i) => [i.complete, i.naturalWidth, i.naturalHeight])"
    assert browser.evaluate(sizes) == [[True, 6, 4], [True, 6, 4]]
    before = browser.evaluate("document.querySelector('.row img').src")
    browser.evaluate("document.querySelector('.images input').focus()")
    browser.press("ArrowLeft")
    assert browser.evaluate("document.querySelector('.images output').textContent") == "20"
    assert browser.evaluate("document.querySelector('.row img').src") != before
    assert browser.errors == []


def test_the_printed_page_keeps_its_charts(browser: Page, run: Path) -> None:
    browser.show(run / "report.html", dark=True)
    browser.send("Emulation.setEmulatedMedia", media="print")
    assert min(browser.evaluate(COLOUR)) > 200
    assert browser.evaluate("getComputedStyle(document.querySelector('.toolbar')).display") == "none"
    heights = browser.evaluate("report.charts.map((chart) => chart.svg.getBoundingClientRect().height)")
    assert len(heights) == 5
    assert min(heights) > 100
