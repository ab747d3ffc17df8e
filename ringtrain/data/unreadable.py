"""Samples that cannot be read: which ones they are, and the error that ends the run."""

from __future__ import annotations

import os
import shlex
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeGuard

from ringtrain.data.order import SampleOrder
from ringtrain.data.pipeline import explain_change
from ringtrain.data.sources import Source, UnreadableSample
from ringtrain.errors import DataError, Reach
from ringtrain.files.atomic import replacing
from ringtrain.runtime import activity
from ringtrain.runtime.world import World

LIST_FILE = "unreadable.txt"
MAX_NAMED = 5
SEARCH_THREADS = 8
SEARCH_SECONDS = 30.0  # all other ranks wait for the one that searches
SAMPLES_PER_SEARCH = 256


class CheckableSource(Protocol):
    """The part of a source that says why a sample is unreadable."""

    @property
    def num_samples(self) -> int:
        """Number of samples."""

    def why_unreadable(self, number: int) -> UnreadableSample | None:
        """Read one sample, outside of graphs; return None if it can be read."""


def is_checkable(source: Source) -> TypeGuard[CheckableSource]:
    return hasattr(source, "why_unreadable")


def find_unreadable(source: CheckableSource, numbers: Iterable[Any]) -> list[UnreadableSample]:
    """Read the samples of these numbers, and return those that cannot be read, in this order."""
    with ThreadPoolExecutor(SEARCH_THREADS) as threads:
        unreadable = []
        for sample in threads.map(source.why_unreadable, map(int, numbers)):
            activity.move()  # the watchdog must not take the search for a hang
            if sample is not None:
                unreadable.append(sample)
        return unreadable


def search_all(source: CheckableSource) -> tuple[list[UnreadableSample], int]:
    """Return the unreadable samples, and how many samples were read within ``SEARCH_SECONDS``."""
    unreadable: list[UnreadableSample] = []
    end = time.monotonic() + SEARCH_SECONDS
    num_searched = 0
    while num_searched < source.num_samples and time.monotonic() < end:
        next_first = min(num_searched + SAMPLES_PER_SEARCH, source.num_samples)
        unreadable += find_unreadable(source, range(num_searched, next_first))
        num_searched = next_first
    return unreadable, num_searched


def explain_unreadable(
    source: Source, order: SampleOrder, world: World, directory: Path | None, error: Exception, step: int
) -> Exception:
    """Return what to raise instead of an error of the input pipeline.

    If a sample of the failed batch is unreadable, all other samples are read as well, so that one
    message names all that have to be mended.

    Args:
        directory: of the run, for the list of paths; None: a temporary file.
        error: of the pipeline.
        step: of the batch, from 0.
    """
    numbers = order.local_batch(step, rank=world.rank, size=world.size).indices
    in_batch = find_unreadable(source, numbers) if is_checkable(source) else []
    if not is_checkable(source) or not in_batch:
        return explain_change(error, step)
    found, num_searched = search_all(source)
    named = {sample.number: sample for sample in [*in_batch, *found]}
    scope = ""
    if num_searched < source.num_samples:
        scope = f"Only {num_searched:,} of {source.num_samples:,} samples were looked at. "
    return unreadable_error(list(named.values()), directory, scope=scope, reach="rank")


def unreadable_error(
    samples: Sequence[UnreadableSample], directory: Path | None, *, reach: Reach, scope: str = ""
) -> DataError:
    """Write the paths of unreadable samples to a file, and return the error that names it.

    Args:
        directory: of the run, for the file; None: a temporary file.
        reach: of the error.
        scope: a sentence about what was looked at, with a space behind it.
    """
    named = [f"sample {sample.number}, {sample.location}: {sample.reason}" for sample in samples]
    if len(named) > MAX_NAMED:
        named[MAX_NAMED:] = [f"and {len(named) - MAX_NAMED:,} more"]
    noun = "sample" if len(samples) == 1 else "samples"
    remedy = "Mend or remove what is damaged."
    paths = dict.fromkeys(sample.path for sample in samples if sample.path)
    if paths:
        list_file = write_list(list(paths), directory)
        removal = f"xargs -d '\\n' rm -- < {shlex.quote(str(list_file))}"
        remedy = (
            f"Their files are listed in {str(list_file)!r}, one path a line. Mend them, or remove them all: {removal}"
        )
    return DataError(f"{len(samples):,} {noun} cannot be read: {'; '.join(named)}. {scope}{remedy}", reach=reach)


def write_list(paths: Sequence[str], directory: Path | None) -> Path:
    """Write one path a line, and return the file: in ``directory``, or where temporary files are."""
    content = b"".join(os.fsencode(path) + b"\n" for path in paths)
    if directory is not None:
        try:
            with replacing(directory / LIST_FILE) as file:
                file.write(content)
            return directory / LIST_FILE
        except OSError:  # on another node, or full
            pass
    descriptor, name = tempfile.mkstemp(prefix="ringtrain-unreadable-", suffix=".txt")
    with open(descriptor, "wb") as file:
        file.write(content)
    return Path(name)
