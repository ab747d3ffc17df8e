"""User files that shadow modules, such as ``random.py`` in the working directory.

Imports little, since any module may be shadowed.
"""

import contextlib
import importlib.machinery
import os
import sys
from collections.abc import Iterator

RENAME = ": rename it"
STANDARD = os.path.dirname(os.__file__)
OWN = ("ringtrain", "launch", "benchmarks", "tests")  # checkout directories, also names of packages


def describe_hiding(error: BaseException) -> str:
    path = list(map(os.path.abspath, sys.path))
    for file in _list_files(error):
        folder, name = os.path.split(os.path.abspath(file).removesuffix(f"{os.sep}__init__.py"))
        module = name.removesuffix(".py")
        if not file or folder not in path or file.startswith(STANDARD) or module in OWN:
            continue
        if module in sys.stdlib_module_names:
            return f"{os.path.join(folder, name)} hides Python's own module {module!r}{RENAME}"
        if folder != path[0]:
            continue  # elsewhere a newer version may shadow it on purpose
        found = importlib.machinery.PathFinder.find_spec(module, [each for each in path if each != folder])
        if found is not None and found.origin:
            return f"{os.path.join(folder, name)} hides the installed package {module!r}{RENAME}"
    return ""


def _list_files(error: BaseException | None) -> Iterator[str]:
    """Yield files of the traceback, innermost first, then of modules named in the message."""
    message = str(error)
    while error is not None:
        if isinstance(error, SyntaxError):
            yield error.filename or ""
        frames, trace = [], error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_globals.get("__name__") != "__main__":  # scripts shadow nothing
                frames.append(trace.tb_frame.f_code.co_filename)
            trace = trace.tb_next
        yield from reversed(frames)
        error = error.__cause__ or error.__context__
    for name, module in list(sys.modules.items()):
        if f"'{name}'" in message or f"'{name}." in message:
            yield getattr(module, "__file__", None) or ""


@contextlib.contextmanager
def refusing_hidden() -> Iterator[None]:
    """Exit with one line if an import fails because of shadowing."""
    try:
        yield
    except Exception as error:
        hiding = describe_hiding(error)
        if not hiding:
            raise
        sys.stderr.write(f"ringtrain: error: {ascii(hiding)[1:-1]}.\n")
        raise SystemExit(2) from None
