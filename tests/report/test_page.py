"""The report in a real browser: what it draws, what it reads out, how it fits, what it asks for."""

import itertools
import json
import math
import os
import random
from pathlib import Path
from typing import Any

import pytest

from ringtrain.report import write_report
from tests.report.chromium import Page
from tests.report.made_run import START, eval_event, make_run, timed, train_event, usual_events

MAX_POINTS = 800
END = {"event": "end", "status": "completed", "exit_code": 0}
CHARTS = "[...document.querySelectorAll('figure.chart .plot')]"
# A chart's curves, without what is drawn behind and above them.
CURVES = CHARTS + ".find((c) => c.dataset.title === TITLE).data.filter((t) => t.showlegend && t.visible)"
DOMAIN = "document.querySelector('.plot').layout.xaxis.range"
COLOUR = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
SPOKEN = "document.getElementById('spoken').textContent"
FOCUS_CHART = "document.querySelector('figure.chart .plot').focus()"


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
    """The steps and the values of a curve of a chart."""
    curve = browser.evaluate(CURVES.replace("TITLE", json.dumps(title)))[index]
    return curve["x"], curve["y"]


def wait_for(browser: Page, condition: str) -> None:
    """Wait until an expression holds in the page: plotly.js answers a mouse in a later frame."""
    browser.evaluate(f"new Promise((go) => {{ const ask = () => ({condition}) ? go() : setTimeout(ask, 20); ask(); }})")


def test_the_curves_that_are_drawn_are_those_of_the_events(browser: Page, run: Path) -> None:
    browser.show(run / "report.html")
    for index, kind in enumerate(("train", "eval")):
        steps, values = drawn(browser, "Loss", index)
        events = events_of(run, kind)
        assert steps == [event["step"] for event in events]
        assert values == pytest.approx([event["loss"] for event in events], rel=1e-5)
    [_, accuracy] = drawn(browser, "Accuracy", 0)
    assert accuracy == pytest.approx([event["accuracy"] for event in events_of(run, "eval")], rel=1e-5)
    assert browser.evaluate("document.querySelectorAll('.plot .scatterlayer path.js-line').length") == 6


def test_the_page_makes_no_requests_and_logs_no_errors(browser: Page, compared: Path, run: Path) -> None:
    for path in (run / "report.html", compared):
        browser.show(path)
        assert browser.evaluate("document.documentElement.dataset.ready") is not None
        assert browser.errors == []
        assert browser.requests == [browser.address]


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


@pytest.mark.parametrize(("several", "width"), [(False, 1280), (True, 375)], ids=["one run", "three runs"])
def test_nothing_is_wider_than_the_window(browser: Page, run: Path, compared: Path, width: int, several: bool) -> None:
    browser.show(compared if several else run / "report.html", width=width)
    assert browser.evaluate(OVERFLOW) <= 0
    boxes = browser.evaluate(CHARTS + ".map((c) => c.querySelector('.main-svg').getBoundingClientRect().toJSON())")
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
        value = float(f"{trained[step - 1]['loss']:.4g}")
        wait_for(browser, f"{SPOKEN}.startsWith('Loss, step {step}, training : {value}, evaluation : ')")
        shown = browser.evaluate(CHARTS + ".map((c) => c.querySelector('.hoverlayer').textContent)")
        assert f"training : {value}" in shown[0]
        assert f"training : {trained[step - 1]['gradient_norm']:g}" in shown[3]  # all charts have the one cursor
    assert browser.evaluate(SPOKEN).endswith(f"evaluation : (10, {float(format(evaluated[0]['loss'], '.4g'))})")


def test_keyboard_navigation_reads_out_events_at_their_steps(browser: Page, run: Path) -> None:
    browser.show(run / "report.html")
    browser.evaluate(FOCUS_CHART)
    browser.press("Home")
    browser.press("PageDown")
    for _ in range(9):
        browser.press("ArrowRight")
    happened = (
        "; warning: rank 1 on node1 is slow; end: preempted, exit code 75: stopped by SIGTERM; "
        "restart: started again on 4 ranks from step 20"
    )
    wait_for(browser, f"{SPOKEN}.endsWith('{happened}')")


def test_keys_enlarge_a_part_and_show_all_again(browser: Page, run: Path) -> None:
    browser.show(run / "report.html")
    browser.evaluate(FOCUS_CHART)
    browser.press("End")
    browser.press("+")
    wait_for(browser, f"String({DOMAIN}) === '20,40'")
    browser.press("Home")
    wait_for(browser, f"{SPOKEN}.startsWith('Loss, step 20,')")
    browser.press("Escape")
    wait_for(browser, f"String({DOMAIN}) === '0,40'")


def test_everything_is_reached_by_tab_with_a_focus_that_is_seen(browser: Page, compared: Path) -> None:
    browser.show(compared)
    reached: list[str] = []
    for _ in range(120):
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
    assert [name for name in dict.fromkeys(reached) if name in charts] == charts
    assert reached[0] == "Skip to the curves"
    assert reached.count("run") == 3
    assert {"axis", "Summary of the runs", "Events"} <= set(reached)


def test_a_mouse_shows_values_and_zooms_into_a_dragged_range(browser: Page, run: Path) -> None:
    browser.show(run / "report.html")
    first, last, y = browser.evaluate(
        "(() => { const area = document.querySelector('.plot .nsewdrag').getBoundingClientRect(); "
        "return [10, 30].map((step) => area.left + area.width * step / 40).concat(area.top + 100); })()"
    )
    browser.mouse("mouseMoved", first, y)
    for chart in (0, 1):  # the cursor is in all charts
        wait_for(browser, CHARTS + f"[{chart}].querySelector('.hoverlayer').textContent.includes('evaluation : 0.')")
    browser.mouse("mousePressed", first, y)
    browser.mouse("mouseMoved", last, y)
    browser.mouse("mouseReleased", last, y)
    wait_for(browser, CHARTS + ".every((c) => c.layout.xaxis.range[0] > 5)")
    for domain in browser.evaluate(CHARTS + ".map((c) => c.layout.xaxis.range)"):
        assert domain == pytest.approx([10, 30], abs=0.5)
    _, high = browser.evaluate("document.querySelector('.plot').layout.yaxis.range")
    assert high < max(event["loss"] for event in events_of(run, "train")) / 2  # the values that are seen fill it
    browser.evaluate("document.querySelector('.plot [data-title=\\'Reset axes\\']').click()")
    wait_for(browser, CHARTS + ".every((c) => String(c.layout.xaxis.range) === '0,40')")


def test_a_finger_that_drags_across_a_chart_scrolls_the_page(browser: Page, run: Path) -> None:
    dragmode = "document.querySelector('.plot').layout.dragmode"
    browser.send("Emulation.setTouchEmulationEnabled", enabled=True)
    browser.show(run / "report.html", width=375)
    assert browser.evaluate(dragmode) is False
    browser.send("Emulation.setTouchEmulationEnabled", enabled=False)
    browser.show(run / "report.html")
    assert browser.evaluate(dragmode) == "zoom"


def test_time_instead_of_steps_along_the_axis(browser: Page, run: Path, compared: Path) -> None:
    browser.show(run / "report.html")
    browser.evaluate("document.querySelector('input[value=elapsed]').click()")
    browser.evaluate(FOCUS_CHART)
    browser.press("End")
    first = events_of(run, "start")[0]["time"]
    [trained, evaluated] = browser.evaluate(CURVES.replace("TITLE", "'Loss'"))
    second = events_of(run, "start")[1]
    restart, pause = second["first_step"], second["time"] - events_of(run, "end")[0]["time"]
    times = [event["time"] - first - pause * (event["step"] > restart) for event in events_of(run, "train")]
    assert [at and round(at, 2) for at in trained["x"]] == [*times[:restart], None, *times[restart:]]  # a pause
    wait_for(browser, f"{SPOKEN}.startsWith('Loss, {evaluated['x'][-1]:.4g} s, ')")
    assert "running time (s)" in browser.evaluate("document.querySelector('.plot').textContent")
    browser.show(compared)  # of one of its runs the times are not known
    assert browser.evaluate("document.querySelector('input[value=elapsed]').disabled")


def test_runs_are_compared_and_can_be_left_out(browser: Page, compared: Path) -> None:
    browser.show(compared)
    lines = "document.querySelector('.plot').querySelectorAll('.scatterlayer path.js-line').length"
    assert browser.evaluate(lines) == 6
    assert browser.evaluate(DOMAIN) == [0, 60]
    browser.evaluate("document.querySelectorAll('input[name=run]')[1].click()")
    assert browser.evaluate(lines) == 4
    legend = browser.evaluate("document.querySelector('.plot .legend').textContent")
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
    crosses = browser.evaluate("document.querySelector('.plot').data.find((t) => t.yaxis === 'y2').x")
    assert crosses == [5, 6]
    assert browser.evaluate(CURVES.replace("TITLE", "'Loss'"))[0]["y"][4:6] == [None, None]
    assert "2 logged values are not finite" in browser.evaluate("document.body.innerText")


def test_names_and_messages_are_text_in_the_drawing(browser: Page, tmp_path: Path) -> None:
    """plotly.js takes elements such as links from the texts of a figure: none comes from a run's files."""
    forged = "<a href='http://127.0.0.1:9'>link</a><b>bold"
    events = [START, train_event(1, **{forged: 1.0}), train_event(2), {"event": "warning", "message": forged}]
    for name in (forged.replace("/", "-"), "other"):
        make_run(tmp_path / name, timed(events))
    write_report(sorted(tmp_path.iterdir()), tmp_path / "report.html")
    browser.show(tmp_path / "report.html")
    browser.evaluate(FOCUS_CHART)
    browser.press("End")
    wait_for(browser, f"{SPOKEN}.includes('<b>bold')")
    drawn_elements = "document.querySelectorAll('.plot svg a, .plot svg [style*=bold]').length"
    assert browser.evaluate(drawn_elements) == 0
    assert browser.errors == []


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
    drawn_points = CHARTS + ".flatMap((c) => c.data.filter((t) => t.showlegend).map((t) => t.x.length))"
    assert max(browser.evaluate(drawn_points)) <= MAX_POINTS
    assert browser.evaluate("document.querySelectorAll('.plot path.js-fill').length") >= 3
    page = (run / "report.html").read_text()
    assert len(page) < 6_000_000
    assert "Curves of up to 100,000 values are thinned to at most 800 points" in page
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


def test_the_printed_page_keeps_its_charts(browser: Page, run: Path, tmp_path: Path) -> None:
    browser.show(run / "report.html", dark=True)
    widths = CHARTS + ".map((c) => c.querySelector('.main-svg').getBoundingClientRect().width)"
    before = browser.evaluate(widths)
    browser.evaluate(f"void window.addEventListener('beforeprint', () => {{ window.printed = {widths}; }})")
    browser.print_pdf(tmp_path / "report.pdf")
    assert max(browser.evaluate("window.printed")) < 350, "two beside each other"
    assert browser.evaluate(widths) == before
    browser.send("Emulation.setEmulatedMedia", media="print")
    assert min(browser.evaluate(COLOUR)) > 200
    assert browser.evaluate("getComputedStyle(document.querySelector('.toolbar')).display") == "none"
    heights = browser.evaluate(CHARTS + ".map((c) => c.querySelector('.main-svg').getBoundingClientRect().height)")
    assert len(heights) == 5
    assert min(heights) > 100


def test_many_runs_are_ranked_with_their_settings(browser: Page, tmp_path: Path) -> None:
    """With RINGTRAIN_PICTURE=docs/sweep.png the test writes the picture of the docs."""
    runs, draw = [], random.Random(1)
    for lr, seed, name in itertools.product((0.1, 0.03, 0.01, 0.001), (1, 2, 3), ("adam", "sgd")):
        accuracy = 1 / (1.05 + abs(math.log10(lr / 0.02)) + (name == "sgd") / 5 + draw.random() / 20)
        events = timed([START, *map(train_event, range(1, 11)), eval_event(10, accuracy=round(accuracy, 4)), END])
        settings = {"seed": seed, "optimizer": {"name": name, "lr": lr}}
        runs.append(make_run(tmp_path / f"lr={lr},seed={seed},name={name}", events, **settings))
    write_report(runs, tmp_path / "report.html")
    browser.show(tmp_path / "report.html", width=1000, height=760)
    browser.screenshot(Path(os.environ.get("RINGTRAIN_PICTURE", tmp_path / "sweep.png")), beyond_viewport=False)
    assert browser.evaluate("document.querySelectorAll('.coordinates polyline').length") == 24
    first = "[...document.querySelectorAll('table.compared')][0].querySelectorAll('tbody tr')[0].innerText.split('\\t')"
    assert [cell.strip() for cell in browser.evaluate(first)[1:]] == ["0.8125", "adam", "0.03", "2", "completed"]
    colours = "['.coordinates polyline.run-0', '.swatch.run-0'].map((s) => getComputedStyle(document.querySelector(s)))"
    assert browser.evaluate(f"{colours}.map((s, i) => i ? s.backgroundColor : s.stroke)") == ["rgb(31, 131, 201)"] * 2
    assert browser.evaluate("document.querySelectorAll('.toolbar input[name=run]').length") == 6
    assert browser.evaluate(OVERFLOW) == 0
