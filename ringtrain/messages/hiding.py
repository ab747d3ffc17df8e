"""A user's file that hides another module, such as a ``random.py`` in the working directory.

This file imports few modules, since any of them may be hidden.
"""

import contextlib
import importlib.machinery
import os
import sys
from collections.abc import Iterator

RENAME = ": rename it"
STANDARD = os.path.dirname(os.__file__)
OWN = ("ringtrain", "launch", "benchmarks", "tests")  # of a checkout, in which packages may have such names, too


def describe_hiding(error: BaseException) -> str:
    """Name the file that hides a module and so made an import fail; empty if there is none."""
    path = list(map(os.path.abspath, sys.path))
    for file in _list_files(error):
        folder, name = os.path.split(os.path.abspath(file).removesuffix(f"{os.sep}__init__.py"))
        module = name.removesuffix(".py")
        if not file or folder not in path or file.startswith(STANDARD) or module in OWN:
            continue
        if module in sys.stdlib_module_names:
            return f"{os.path.join(folder, name)} hides Python's own module {module!r}{RENAME}"
        if folder != path[0]:
            continue  # other than in the directory of the script, a newer version may be meant to hide it
        found = importlib.machinery.PathFinder.find_spec(module, [each for each in path if each != folder])
        if found is not None and found.origin:
            return f"{os.path.join(folder, name)} hides the installed package {module!r}{RENAME}"
    return ""


def _list_files(error: BaseException | None) -> Iterator[str]:
    """Yield the files of modules in the traceback, the innermost first, and of modules that the message names."""
    message = str(error)
    while error is not None:
        if isinstance(error, SyntaxError):
            yield error.filename or ""
        frames, trace = [], error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_globals.get("__name__") != "__main__":  # a script hides no module
                frames.append(trace.tb_frame.f_code.co_filename)
            trace = trace.tb_next
        yield from reversed(frames)
        error = error.__cause__ or error.__context__
    for name, module in list(sys.modules.items()):
        if f"'{name}'" in message or f"'{name}." in message:
            yield getattr(module, "__file__", None) or ""


@contextlib.contextmanager
def refusing_hidden() -> Iterator[None]:
    """End the program with one line if an import fails because a file hides a module."""
    try:
        yield
    except Exception as error:
        hiding = describe_hiding(error)
        if not hiding:
            raise
        sys.stderr.write(f"ringtrain: error: {ascii(hiding)[1:-1]}.\n")
        raise SystemExit(2) from None
