"""The workload's data, compared over the ranks, with the configured cache."""

from __future__ import annotations

import re
from typing import Any, SupportsIndex

from ringtrain.collectives import Collective, raise_on_all_ranks
from ringtrain.config import Config
from ringtrain.data.batches import BAD_REMEDY
from ringtrain.data.cache import with_cache
from ringtrain.data.contents import Contents
from ringtrain.data.sources import Feed, Source, describe_bad
from ringtrain.errors import DataError, UsageError
from ringtrain.guard.preflight import require_same_sources
from ringtrain.messages.defects import describe_defect
from ringtrain.workloads.base import Sources, Workload

# Path from data_dir=None: f"{data_dir}/train.npz" or data_dir / "train.npz".
NO_DIRECTORY = re.compile(r"\bNone/|'NoneType' and 'str'|not '?NoneType'?$")


def open_sources(
    workload: Workload, config: Config, collective: Collective, *, num_threads: int, former_size: int | None
) -> tuple[Sources, Contents]:
    """Collective.

    Checks number and kind of samples; ``require_same_contents`` checks contents later.
    """
    sources = raise_on_all_ranks(collective, lambda: read_sources(workload, config), name="sources")
    require_same_sources(collective, sources)
    size = collective.world.size
    has_order_of_ranks = isinstance(sources.train, Feed) and not sources.train.is_shared
    if has_order_of_ranks and former_size not in (None, size):
        raise UsageError(
            f"the run was begun by {former_size} ranks, each fed its own samples, and now there are {size}; what they "
            f"were fed cannot be divided again. Start {former_size} ranks, or start a new run with --resume never."
        )
    contents = Contents(sources._asdict())
    return cache_sources(sources, config, collective, num_threads=num_threads), contents


def read_sources(workload: Workload, config: Config) -> Sources:
    """Raise for samples known to be damaged, unless skipped."""
    try:
        given = workload.create_sources(config.data_dir, synthetic=config.synthetic)
    except Exception as error:
        if config.data_dir is None and NO_DIRECTORY.search(str(error)):
            raise DataError(
                f"{type(workload).__name__}.create_sources failed: {describe_defect(error).rstrip('.')}. No --data_dir "
                "was given, so that its data_dir is None. Give --data_dir DIR."
            ) from error
        raise
    sources = require_sources(workload, given)
    for source in sources if config.on_bad_sample == "stop" else ():
        if damaged := list(getattr(source, "damaged", ())):
            raise DataError(f"{describe_bad(damaged)} {BAD_REMEDY}", reach="node")
    return sources


def require_sources(workload: Workload, given: Any) -> Sources:
    name = f"{type(workload).__name__}.create_sources"
    if not isinstance(given, Sources):
        raise UsageError(
            f"{name} gave {name_kind(given)}; it must give ringtrain.Sources(train, evaluation), where evaluation "
            "may be left out."
        )
    for part, source in given._asdict().items():
        steps: Any = source.steps_per_epoch if isinstance(source, Feed) else None
        is_number = isinstance(steps, SupportsIndex) and not isinstance(steps, bool)
        if steps is not None and not (is_number and steps.__index__() >= 1):
            raise DataError(
                f"steps_per_epoch is {steps!r}; it must be a whole number, at least 1, or None for a single pass."
            )
        may_be = (isinstance(source, Feed) and part == "train") or (source is None and part == "evaluation")
        if may_be or (hasattr(source, "gather") and isinstance(getattr(source, "num_samples", None), SupportsIndex)):
            continue
        remedy = "from_arrays(x, y) makes one of arrays"
        if part == "train":
            remedy += "; from_dataset takes a tf.data.Dataset, from_grain samples by number, from_pydataset a PyDataset"
            remedy += "; from_generator and from_callable take batches from code of yours"
        raise UsageError(
            f"{name} gave {name_kind(source)} as {part}; it must be a source, with num_samples and gather"
            f"{', or None' if part == 'evaluation' else ''}: in ringtrain, {remedy}."
        )
    return given


def name_kind(value: Any) -> str:
    kind = type(value)
    if value is None:
        return "None"
    if isinstance(value, Feed):
        return "a feed of batches"
    if isinstance(value, (tuple, list)):
        return f"a {kind.__name__} of {len(value)}"
    package = "" if kind.__module__ == "builtins" else f"{kind.__module__.split('.')[0]} "
    return f"a {package}{kind.__name__}"


def cache_sources(sources: Sources, config: Config, collective: Collective, *, num_threads: int) -> Sources:
    cached: dict[str, Source | Feed | None] = {}
    for name, source in sources._asdict().items():
        reserved = sum(getattr(other, "num_bytes", 0) for other in cached.values())
        cached[name] = source
        if source is not None and not isinstance(source, Feed):
            cached[name] = with_cache(
                source, config.cache, collective, name=name, num_threads=num_threads, reserved_bytes=reserved
            )
    return Sources(**cached)  # type: ignore[arg-type]
