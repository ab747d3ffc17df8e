"""What earlier versions had: each removed setting, flag, command and name, and what to use instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ringtrain.errors import UsageError


class RemovedSetting(NamedTuple):
    """A setting of a run that this version does not have.

    Attributes:
        default: the value with which a run does now what it did then.
        instead: a sentence that says what to use.
    """

    default: str
    instead: str


SETTINGS: Mapping[str, RemovedSetting] = {
    "on_bad_sample": RemovedSetting(
        "stop",
        "A sample that cannot be read ends the run, which lists the files to remove. "
        "A tf.data pipeline may skip samples by dataset.ignore_errors().",
    ),
    "cache": RemovedSetting(
        "none",
        "Give small data as arrays (ringtrain.from_arrays), or use tf.data's own dataset.cache(), or Grain.",
    ),
}

_FORECAST = "Use python -m benchmarks.forecast RUN --cluster FILE in a checkout of the repository."

COMMANDS: Mapping[str, str] = {"predict": _FORECAST}

FLAGS_OF_COMMANDS: Mapping[str, str] = {"forecast": _FORECAST}

NAMES: Mapping[str, str] = {
    "BadSample": "A sample that cannot be read ends the run.",
    "FallibleSource": "A sample that cannot be read ends the run: a source needs num_samples and gather alone.",
}


def refuse_removed(name: str, *, title: str) -> None:
    """Raise UsageError if an earlier version had this setting or flag.

    Args:
        name: of the setting, without dashes.
        title: as the user wrote it, such as ``--cache``.
    """
    instead = FLAGS_OF_COMMANDS.get(name)
    if name in SETTINGS:
        instead = SETTINGS[name].instead
    if instead is not None:
        raise UsageError(f"{title} was removed. {instead}")


def without_removed(settings: Mapping[str, Any], file: str) -> dict[str, Any]:
    """Return settings of an earlier version without those that were removed.

    Args:
        settings: as read from a file, by name.
        file: its name, for messages.

    Raises:
        UsageError: a removed setting has another value than its default.
    """
    kept = dict(settings)
    for name in settings.keys() & SETTINGS.keys():
        removed = SETTINGS[name]
        value = kept.pop(name)
        if value is not None and value != removed.default:
            raise UsageError(
                f"{file} has {name}: {value}, and that setting was removed. {removed.instead} "
                f"Then remove the line from {file}."
            )
    return kept
