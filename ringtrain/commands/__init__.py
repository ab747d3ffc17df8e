"""Commands, one file each.

``Options`` is a dataclass with a docstring under each field. Positional fields are words, others flags; a dataclass
field is a group of flags. The module docstring is the help: a line, details, and last examples. ``main`` returns the
exit code. ``ringtrain/cli.py`` registers commands.
"""
