"""The page as it is written: whatever the files of a run hold stays text, and the file is whole or not there."""

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringtrain.errors import UsageError
from ringtrain.report import MARK, write_report
from ringtrain.report.page import embed_json, make_page
from ringtrain.report.reading import RunRecord, parse_events, read_run
from tests.faults.test_fuzz import NUM_EXAMPLES
from tests.report.made_run import START, eval_event, make_run, timed, train_event

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(1)>\"'&amp;</style><!--"


class Elements(HTMLParser):
    """The elements of a page, and its text."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


def parse_page(page: str) -> Elements:
    elements = Elements()
    elements.feed(page)
    return elements


def test_file_contents_are_shown_as_text(tmp_path: Path) -> None:
    hostile_events = timed([
        START | {"node": HOSTILE, "launcher": HOSTILE, "size": HOSTILE, "versions": {HOSTILE: HOSTILE},
                 "ranks": [{"node": HOSTILE}]},
        train_event(1, **{HOSTILE: 1.0}),
        eval_event(1, **{HOSTILE: 1.0}),
        {"event": "warning", "step": 1, "message": HOSTILE},
        {"event": "end", "status": HOSTILE, "exit_code": 1, "message": HOSTILE,
         "stacks": [{"ranks": [1], "text": HOSTILE}]},
    ])  # fmt: skip
    hostile = make_run(tmp_path / HOSTILE.replace("/", "\\"), hostile_events, options={HOSTILE: HOSTILE})
    plain = make_run(tmp_path / "plain", timed([START, train_event(1, plain=1.0), eval_event(1, plain=1.0)]))
    for runs in ([hostile], [hostile, plain]):
        elements = parse_page(make_page([read_run(run) for run in runs]))
        assert (elements.names.count("script"), elements.names.count("style")) == (3, 1)
        assert "img" not in elements.names
        assert not [name for name, _ in elements.attributes if name.startswith("on")]
        assert HOSTILE in elements.text


@pytest.mark.parametrize("text", ["</script>", "<!--", "]]>", "&lt;", "\u2028", "\ud800", HOSTILE])
def test_data_in_the_page_cannot_end_their_element(text: str) -> None:
    embedded = embed_json({text: [text]})
    assert not set("<>&\u2028\ud800") & set(embedded)
    assert json.loads(embedded) == {text: [text]}


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["nan", "-inf"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
FIELDS = ["step", "loss", "accuracy", "time", "seconds", "first_step", "size", "message", "status", "exit_code"]
FIELDS += ["sec_per_step", "input_sec", "examples_per_sec", "total_steps", "versions", "data_loss", "lr", "samples"]
FIELDS += ["ranks", "stacks"]
EVENTS = st.dictionaries(st.sampled_from(FIELDS), ANY, max_size=8).flatmap(
    lambda values: st.sampled_from(["start", "train", "eval", "checkpoint", "warning", "end", "other"]).map(
        lambda kind: values | {"event": kind}
    )
)


@settings(max_examples=NUM_EXAMPLES // 2, deadline=None)
@given(events=st.lists(EVENTS, min_size=1, max_size=12), options=st.dictionaries(st.text(max_size=5), ANY, max_size=3))
def test_whatever_the_events_hold_there_is_a_page(events: list[dict[str, Any]], options: dict[str, Any]) -> None:
    content = "".join(json.dumps(event) + "\n" for event in events).encode()
    parsed, _ = parse_events(content.splitlines(keepends=True))
    if parsed:
        parse_page(make_page([RunRecord(path=Path("run"), settings=options, events=parsed)] * 2))


# --- The file ---


def test_a_report_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    target = run / "report.html"
    former = "<!doctype html>" + MARK.decode() + "the former"
    target.write_text(former)

    def refuse() -> None:
        raise UsageError("taken over")

    with pytest.raises(UsageError, match="taken over"):
        write_report([run], target, may_write=refuse)
    assert target.read_text() == former
    write_report([run], target)
    assert target.read_text().endswith("</html>")
    assert not list(run.glob(".writing*"))


def test_lone_surrogates_do_not_prevent_a_report(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [START, {"event": "warning", "message": "half a pair: \ud800."}])
    write_report([run], run / "report.html")
    assert "half a pair: ?." in (run / "report.html").read_text()


def test_an_event_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    damaged = tmp_path / "run/tensorboard/events.out.tfevents.1.v2"
    damaged.mkdir(parents=True)
    with pytest.raises(UsageError, match=r"cannot be read: .* is no regular file") as caught:
        write_report([tmp_path / "run"], tmp_path / "report.html")
    assert str(damaged) in str(caught.value)
    assert not (tmp_path / "report.html").exists()
