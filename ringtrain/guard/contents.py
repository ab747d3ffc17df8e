"""Comparison of the samples of all ranks, by digests."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ringtrain.collectives import Collective, all_gather_object, raise_on_all_ranks
from ringtrain.data.contents import Contents, block_size, digest_blocks, find_other_sums, sum_blocks
from ringtrain.errors import DataError
from ringtrain.guard.preflight import (
    OTHER_DATA,
    describe_differences,
    digest,
    find_differing,
    find_first_difference,
    summarize,
)
from ringtrain.messages.log import LOG
from ringtrain.messages.ranks import group_ranks, name_ranks


def require_same_contents(collective: Collective, contents: Contents) -> None:
    """Compare arrays byte by byte, and files by samples of their bytes. Collective.

    Rounding, as between kinds of processors, only warns. ``require_same_sources`` must have passed.
    """
    name = "preflight/contents"
    facts = raise_on_all_ranks(collective, contents.facts, name=name)
    summaries = all_gather_object(collective, summarize(facts), name=f"{name}/digests")
    differing = find_differing(summaries)
    if not differing:
        return
    nodes = all_gather_object(collective, collective.world.node, name=f"{name}/nodes")
    shown: dict[str, list[str]] = {}
    rounded: list[str] = []
    for fact in differing:
        of_ranks = [summary[fact] for summary in summaries]
        if fact not in contents.arrays:
            number, values = find_first_difference(collective, facts[fact], of_ranks, name=f"{name}/{fact}")
            shown[f"{fact} {number}"] = values
            continue
        speakers = [of_ranks.index(each) for each in of_ranks]
        found = _find_first_value(collective, contents.arrays[fact], speakers, name=f"{name}/{fact}")
        if found is None:
            _, *odd = group_ranks(speakers).values()
            rounded.append(f"{fact} of {name_ranks(sorted(itertools.chain(*odd)), nodes)}")
        else:
            place, values = found
            shown[f"{fact}, {place}"] = values
    if shown:
        raise DataError(describe_differences(OTHER_DATA, shown, nodes), reach="run")
    LOG.warning(
        f"the ranks' data are the same except for rounding ({'; '.join(rounded)}), as processors of different "
        "kinds compute them."
    )


def digest_contents(contents: Contents) -> dict[str, str]:
    return {name: digest(each) for name, each in contents.facts().items()}


def find_other_contents(former: Any, current: Mapping[str, str]) -> list[str]:
    known = former if isinstance(former, dict) else {}
    return [name for name, value in current.items() if known.get(name, value) != value]


def _find_first_value(
    collective: Collective, array: tf.Tensor, speakers: Sequence[int], *, name: str
) -> tuple[str, list[str]] | None:
    """Return position and ranks' values of the first difference beyond rounding. Collective."""
    sample = _find_first_row(collective, array, speakers, name=f"{name}/samples", may_be_rounding=True)
    if sample is None:
        return None
    shape = array.shape[1:]
    values = np.asarray(array[sample]).reshape(-1)
    number = _find_first_row(collective, values, speakers, name=f"{name}/values", may_be_rounding=False)
    mine = values[number]
    words = mine.decode(errors="replace") if isinstance(mine, bytes) else str(mine)
    said = all_gather_object(collective, words, name=f"{name}/value")
    place = [int(index) for index in np.unravel_index(number or 0, shape)]
    where = f"sample {sample} at {place}" if place else f"sample {sample}"
    return f"{where} (from 0)", [said[speaker] for speaker in speakers]


def _find_first_row(
    collective: Collective, array: Any, speakers: Sequence[int], *, name: str, may_be_rounding: bool
) -> int | None:
    """Find the first row of an array [n, ...] that differs, preferably beyond rounding. Collective.

    ``speakers``: per rank, the first rank with equal data. None if ``may_be_rounding`` and nothing differs by more.
    """
    with tf.device("CPU"):
        array = tf.convert_to_tensor(array)
    is_rounded = array.dtype.is_floating or array.dtype.is_complex
    speaks = speakers[collective.world.rank] == collective.world.rank
    first, count = 0, len(array)
    while True:
        size = block_size(count)
        part = array[first : first + count]
        mine = [digest_blocks(part, size), sum_blocks(part, size) if is_rounded else []] if speaks else []
        said = all_gather_object(collective, mine, name=name)
        one, *others = [said[speaker] for speaker in dict.fromkeys(speakers)]
        differing = sorted(
            block
            for other in others
            for block in (find_other_sums(one[1], other[1], array.dtype.name) if is_rounded else _unequal(one, other))
        )
        if not differing and may_be_rounding and is_rounded and first == 0 and count == len(array):
            return None
        place = differing[0] if differing else min(block for other in others for block in _unequal(one, other))
        first, count = first + place * size, min(size, count - place * size)
        if count == 1 or size == 1:
            return first


def _unequal(one: Sequence[Any], other: Sequence[Any]) -> list[int]:
    return [block for block, (mine, its) in enumerate(zip(one[0], other[0], strict=True)) if mine != its]
