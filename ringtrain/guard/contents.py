"""Do all ranks hold the same samples? They compare digests of all of them, and look for the first that differs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ringtrain.collectives import Collective, all_gather_object, raise_on_all_ranks
from ringtrain.data.contents import Contents, block_size, find_other_values
from ringtrain.errors import DataError
from ringtrain.guard.preflight import (
    OTHER_DATA,
    describe_differences,
    digest,
    find_differing,
    find_first_difference,
    summarize,
)
from ringtrain.messages.ranks import group_ranks, name_ranks


def require_same_contents(collective: Collective, contents: Contents, print_line: Callable[[str], None]) -> None:
    """See that all ranks hold the same samples: arrays byte by byte, files by samples of them. Every rank must call it.

    Floating-point values that were rounded otherwise, as on a processor of another kind, are a warning. The
    ``contents`` are of sources that ``require_same_sources`` found alike.
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
        found = _find_first_value(collective, contents.arrays[fact], facts[fact], speakers, name=f"{name}/{fact}")
        if found is None:
            _, *odd = group_ranks(speakers).values()
            rounded.append(f"{fact} of {name_ranks(sorted(itertools.chain(*odd)), nodes)}")
        else:
            place, values = found
            shown[f"{fact}, {place}"] = values
    if shown:
        raise DataError(describe_differences(OTHER_DATA, shown, nodes), reach="run")
    print_line(
        f"warning: the ranks' data are the same but for rounding ({'; '.join(rounded)}), as processors of different "
        "kinds compute them."
    )


def digest_contents(contents: Contents) -> dict[str, str]:
    """What a run notes of the data that it trains on, by the names of its arrays and files."""
    return {name: digest(each) for name, each in contents.facts().items()}


def find_other_contents(former: Any, current: Mapping[str, str]) -> list[str]:
    """The names of the arrays and files that are not what a run noted of them; nothing is known of other names.

    Args:
        former: what it noted, as it was read from its ``metrics.jsonl``.
    """
    known = former if isinstance(former, dict) else {}
    return [name for name, value in current.items() if known.get(name, value) != value]


def _find_first_value(
    collective: Collective, array: tf.Tensor, digests: Sequence[str], speakers: Sequence[int], *, name: str
) -> tuple[str, list[str]] | None:
    """Where the first value lies that differs by more than rounding, and what each rank has there; None: nowhere.

    The blocks whose digests differ travel, one after the other, until one holds such a value. ``speakers`` are, for
    each rank, the first that holds the same as it.
    """
    size, of_ranks = block_size(len(array)), sorted(set(speakers))
    is_speaker = collective.world.rank in of_ranks
    said = all_gather_object(collective, digests if is_speaker else [], name=f"{name}/digests")
    for number, of_block in enumerate(zip(*(said[rank] for rank in of_ranks), strict=True)):
        if len(set(of_block)) == 1:
            continue
        block = np.asarray(array[number * size : (number + 1) * size])
        texts = all_gather_object(collective, _as_text(block) if is_speaker else None, name=f"{name}/{number}")
        blocks = {rank: _from_text(texts[rank], block) for rank in of_ranks}
        differing = [np.argwhere(find_other_values(blocks[of_ranks[0]], blocks[rank])) for rank in of_ranks[1:]]
        places = [tuple(map(int, found[0])) for found in differing if len(found)]
        if places:
            sample, *place = first = min(places)
            where = f"sample {number * size + sample}{f' at {place}' if place else ''} (from 0)"
            return where, [_in_words(blocks[speaker][first]) for speaker in speakers]
    return None


def _as_text(block: np.ndarray) -> str | list[str]:
    """An array in a form that travels: its bytes, or those of each of its texts."""
    return [value.hex() for value in block.flat] if block.dtype == object else block.tobytes().hex()


def _from_text(text: Any, like: np.ndarray) -> np.ndarray:
    if like.dtype == object:
        return np.array([bytes.fromhex(value) for value in text], object).reshape(like.shape)
    return np.frombuffer(bytes.fromhex(text), like.dtype).reshape(like.shape)


def _in_words(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
