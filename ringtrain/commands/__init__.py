"""The commands, a file for each: what it takes, its help, what it does.

``Options`` is a dataclass with a docstring under each field. Positional fields are words, the others flags; a group of
flags is a field that is a dataclass. The file's own docstring is the help: a line, more, and last examples.
``main(arguments, world)`` does it, and returns the exit code. A line in ``ringtrain/cli.py`` gives it a name.
"""
