"""The batch script of a request: a pure function, through the templates in ``launch/templates``.

Nothing that a user typed gets into a script but through one of two filters: ``sbatch`` for the ``#SBATCH`` lines, and
``shell`` for what bash reads. The templates cannot print a text that went through neither.
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
    """A text that one of the filters has made safe."""


def render(request: JobRequest) -> str:
    """The text of the batch script."""
    template = "horovodrun" if request.mpi == HOROVODRUN else "srun"
    return _ENVIRONMENT.get_template(f"{template}.sh.j2").render(job=request, package=PACKAGE)


def quote_shell(text: str) -> Quoted:
    """One word of bash with exactly these bytes, on one line.

    Control characters, and bytes that are no UTF-8, are written as ``$'...'`` does (Bash Reference Manual, 3.1.2.4).
    """
    if text.isprintable():
        return Quoted(shlex.quote(text))

    def escape(character: str) -> str:
        if character.isprintable():
            return f"\\{character}" if character in "\\'" else character
        # Three octal digits: what follows cannot be taken for more of them.
        return "".join(f"\\{byte:03o}" for byte in character.encode("utf-8", "surrogateescape"))

    return Quoted(f"$'{''.join(map(escape, text))}'")


def quote_sbatch(text: str) -> Quoted:
    """One value of an ``#SBATCH`` line.

    sbatch reads quotes and backslashes in them as a shell does, but a backslash means the next character also within
    quotes, nothing is expanded, and # begins a comment (get_argument in Slurm's src/sbatch/opt.c).
    """
    if not text.isprintable():
        raise ValueError(f"{text!r} does not fit into a line of sbatch's")
    if PLAIN_OPTION.fullmatch(text):
        return Quoted(text)
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return Quoted(f'"{escaped}"')


def _refuse_unquoted(value: object) -> object:
    """Allow templates to print only quoted text and numbers."""
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
