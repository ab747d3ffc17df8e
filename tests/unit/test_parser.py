"""What a command's options make of words, flags and YAML."""

import re
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from ringtrain.cli import COMMANDS
from ringtrain.commands.help import find_options, read_texts, show_help, show_overview
from ringtrain.commands.parser import parse_arguments, parse_mapping, parse_text
from ringtrain.errors import UsageError
from ringtrain.runtime.world import read_world


@dataclass(frozen=True, kw_only=True)
class Group:
    rate: float = 0.5
    """a number
    on two lines"""


@dataclass(frozen=True)
class Options:
    place: Path
    """where"""
    more: tuple[int, ...] = ()
    """how many, of each"""
    _: KW_ONLY
    kind: Literal["one", "other"] = "one"
    """which"""
    count: int | None = None
    """how many"""
    name: str = "x"
    """how it is called"""
    is_on: bool = False
    """whether"""
    free: dict[str, Any] = field(default_factory=dict)
    """anything"""
    group: Group = field(default_factory=Group)
    """several"""
    config: Path | None = None
    """a file"""


def parse(*arguments: str) -> dict[str, Any]:
    return parse_arguments(Options, arguments, read_world({}))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["a"], {"place": Path("a")}),
        (["a", "1", "2"], {"place": Path("a"), "more": (1, 2)}),
        (["--", "-a", "--count"], UsageError),
        (["--", "-a"], {"place": Path("-a")}),
        (["--name", "-", "a"], {"place": Path("a"), "name": "-"}),
        (["--name=a=b", "a"], {"place": Path("a"), "name": "a=b"}),
        (["--name", "3", "a"], {"place": Path("a"), "name": "3"}),
        (["--count", "-3", "a"], {"place": Path("a"), "count": -3}),
        (["--count", "010", "a"], {"place": Path("a"), "count": 10}),
        (["--count", "1", "--count", "null", "a"], {"place": Path("a")}),
        (["a", "--is_on"], {"place": Path("a"), "is_on": True}),
        (["a", "--is_on", "--count", "1"], {"place": Path("a"), "is_on": True, "count": 1}),
        (["a", "--is_on", "no"], {"place": Path("a"), "is_on": False}),
        (["a", "--group.rate", "1"], {"place": Path("a"), "group": {"rate": 1.0}}),
        (["a", "--group", "{rate: 1e-3}"], {"place": Path("a"), "group": {"rate": 0.001}}),
        (["a", "--free.b", "2", "--free.c", "#fff"], {"place": Path("a"), "free": {"b": 2, "c": "#fff"}}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_words_are_positional_and_flags_go_anywhere(arguments: list[str], expected: Any) -> None:
    if expected is UsageError:
        with pytest.raises(UsageError, match="more is '--count'; it must be a whole number"):
            parse(*arguments)
    else:
        given = parse(*arguments)
        assert given == expected
        assert {name: type(value) for name, value in given.items()} == {
            name: type(value) for name, value in expected.items()
        }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "place must be given. See --help."),
        (["--place", "a"], "there is no flag --place. See --help."),
        (["a", "--kind", "two"], "kind is 'two'; it must be one of one, other."),
        (["a", "--rate", "1"], "there is no flag --rate. Did you mean --group.rate? See --help."),
        (["a", "-c"], "there is no flag -c. See --help."),
        (["a", "--count", "--is_on"], "count is given no value; put one behind --count. See --help."),
        (["a", "--group", "3"], "group is '3'; it must be a mapping of settings"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_arguments_are_named(arguments: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        parse(*arguments)


def test_of_a_flag_and_a_file_the_later_counts(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("count: 3\ngroup: {rate: 2}\nfree: {b: 1}\n")
    given = parse("a", "--name", "y", "--count", "1", "--config", str(file), "--group.rate", "4", "--free.c", "5")
    assert given == {"place": Path("a"), "name": "y", "count": 3, "group": {"rate": 4.0}, "free": {"b": 1, "c": 5}}


def test_a_mapping_is_read_as_a_file_is() -> None:
    assert parse_mapping(Options, {"count": "3", "group": {"rate": 1}}) == {"count": 3, "group": {"rate": 1.0}}
    with pytest.raises(UsageError, match=r"there is no key cuont\. Did you mean count"):
        parse_mapping(Options, {"cuont": 3})


@pytest.mark.parametrize(
    ("text", "value"),
    [("3", 3), ("1e-3", 0.001), ("-.5", -0.5), ("on", True), ("null", None), ("[1, a]", [1, "a"]), ("{a: 1}", {"a": 1}),
     ("a: 1", "a: 1"), ("#fff", "#fff"), ("2024-01-01", "2024-01-01"), ("'3'", "3"), ('"on"', "on"), ("", ""),
     ("[", "["),
     ("[*a]", "[*a]"), ("!!int 3", "!!int 3"), ("9" * 5000, "9" * 5000)],
)  # fmt: skip
def test_text_is_parsed_as_the_value_it_looks_like(text: str, value: object) -> None:
    read = parse_text(text)
    assert (read, type(read)) == (value, type(value))


def test_each_option_has_its_docstring() -> None:
    texts = read_texts(Options)
    assert set(texts) - {"group"} == set(find_options(Options))
    assert texts["group.rate"] == "a number on two lines"


def test_help_screens_are_built_from_docstrings() -> None:
    from ringtrain.commands import convert

    assert "  convert    Convert an image folder" in show_overview(COMMANDS)
    text = show_help(convert.Options)
    assert text.startswith(
        "usage: python -m ringtrain convert SOURCE DESTINATION [--NAME VALUE ...]\n\nConvert an image"
    )
    assert "--kind NAME what the source is: auto, image_folder, cifar10 (auto)" in " ".join(text.split())
