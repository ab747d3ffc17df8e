"""Options before ``--``; after it ringtrain's own flags, or a user script with its arguments."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from ringtrain.errors import UsageError
from ringtrain.messages.rules import did_you_mean

Command = Callable[[Sequence[str]], int]


def run_command(arguments: Sequence[str], commands: Mapping[str, Command], overview: str, *, of: str = "") -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(overview, end="")
        return 0 if arguments else UsageError.exit_code
    require_command(arguments[0], commands, of=of)
    return commands[arguments[0]](arguments[1:])


def require_command(name: str, commands: Iterable[str], *, of: str = "") -> None:
    if name not in commands:
        meant = did_you_mean(name, commands)
        raise UsageError(f"there is no command {of}{name!r}. {meant}Commands: {', '.join(commands)}.")


def is_script(words: Sequence[str]) -> bool:
    return bool(words) and words[0].endswith(".py")


def plan_program(words: Sequence[str]) -> list[str]:
    return list(words) if is_script(words) else ["-m", "ringtrain", *words]


def require_script(words: Sequence[str]) -> None:
    if is_script(words) and not Path(words[0]).is_file():
        raise UsageError(
            f"what follows -- begins with {words[0]!r}, and there is no such file here. Name a script that is there, "
            "or give flags of ringtrain."
        )


class Parser(argparse.ArgumentParser):
    def __init__(self, prog: str, **texts: str) -> None:
        raw = argparse.RawDescriptionHelpFormatter
        super().__init__(prog, formatter_class=raw, allow_abbrev=False, **texts)  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}. See {self.prog} --help.")

    def parse(self, arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        split = [*arguments, "--"].index("--")
        options, unknown = self.parse_known_args(arguments[:split])
        if unknown:
            known = [option for action in self._actions for option in action.option_strings]
            near = difflib.get_close_matches(unknown[0].partition("=")[0], known, n=1)
            raise UsageError(
                f"{unknown[0]!r} is no option of {self.prog} (see --help). "
                f"{f'Did you mean {near[0]}? ' if near else ''}ringtrain's own flags come after --, as in: "
                f"{self.prog} ... -- {' '.join(unknown)}"
            )
        return options, list(arguments[split + 1 :])
