"""Batch scripts, from the templates in ``launch/templates``.

User input passes one of two filters: ``sbatch`` for ``#SBATCH`` lines, ``shell`` for bash. Templates cannot print other
text.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import jinja2

from ringtrain.runtime.srun import HOROVODRUN

from .. import PACKAGE
from .job import JobRequest

TEMPLATES = Path(__file__).resolve().parents[1] / "templates"
PLAIN_OPTION = re.compile(r"[A-Za-z0-9_.,:%@+=/&|*()\[\]-]+")


class Quoted(str):
    """Text that passed a filter."""


def render(request: JobRequest) -> str:
    template = "horovodrun" if request.mpi == HOROVODRUN else "srun"
    return _ENVIRONMENT.get_template(f"{template}.sh.j2").render(job=request, package=PACKAGE)


def quote_shell(text: str) -> Quoted:
    """One word on one line; control characters and invalid UTF-8 become ``$'...'`` (Bash Reference Manual, 3.1.2.4)."""
    if text.isprintable():
        return Quoted(shlex.quote(text))

    def escape(character: str) -> str:
        if character.isprintable():
            return f"\\{character}" if character in "\\'" else character
        # Three digits: following digits are no part of the escape.
        return "".join(f"\\{byte:03o}" for byte in character.encode("utf-8", "surrogateescape"))

    return Quoted(f"$'{''.join(map(escape, text))}'")


def quote_sbatch(text: str) -> Quoted:
    """Quote one value of an ``#SBATCH`` line.

    Unlike a shell, sbatch reads a backslash as an escape also within quotes, expands nothing, and begins a comment at #
    (get_argument in Slurm's src/sbatch/opt.c).
    """
    if not text.isprintable():
        raise ValueError(f"{text!r} does not fit into a line of sbatch's")
    if PLAIN_OPTION.fullmatch(text):
        return Quoted(text)
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return Quoted(f'"{escaped}"')


def _refuse_unquoted(value: object) -> object:
    if isinstance(value, str) and not isinstance(value, Quoted):
        raise TypeError(f"the template prints {value!r}, which no filter has quoted")
    return value


_ENVIRONMENT = jinja2.Environment(
    loader=jinja2.FileSystemLoader(TEMPLATES),
    undefined=jinja2.StrictUndefined,
    finalize=_refuse_unquoted,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    autoescape=False,
)
_ENVIRONMENT.filters |= {"shell": quote_shell, "sbatch": quote_sbatch}
