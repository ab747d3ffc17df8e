"""Preflight: compare the ranks before training.

Every ``require_...`` is a collective, and raises the same error on all ranks. The start is compared first: later
collectives depend on it; data and models before any broadcast. A fact is a text or a list of texts; to limit traffic,
only digests of lists are sent, and if they differ, blocks.
"""

from __future__ import annotations

import hashlib
import itertools
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from ringtrain.collectives import Collective, all_gather_object
from ringtrain.collectives.horovod import HOROVOD_SETTINGS
from ringtrain.config import Config, flatten_settings, to_plain
from ringtrain.data.sources import ArraySource, Feed, Source
from ringtrain.errors import DataError, RingtrainError, UsageError
from ringtrain.messages.defects import INSTALLED, is_users_own
from ringtrain.messages.ranks import group_ranks, name_ranks
from ringtrain.runtime.private import all_layers, seed_generators_of
from ringtrain.runtime.versions import package_version

if TYPE_CHECKING:
    import keras

    from ringtrain.workloads.base import Sources

Facts = Mapping[str, str | Sequence[str]]
Summary = Mapping[str, str | Mapping[str, Any]]

# Paths may differ between nodes; the data are compared instead.
SETTINGS_OF_A_NODE = {"data_dir"}
# Variables that change TensorFlow's results.
TENSORFLOW_SETTINGS = (
    "NVIDIA_TF32_OVERRIDE", "TF_CUDNN_DETERMINISTIC", "TF_DETERMINISTIC_OPS", "TF_ENABLE_ONEDNN_OPTS", "TF_XLA_FLAGS",
)  # fmt: skip
NOT_SET = "nothing"
SAME_COMMAND = "nothing was trained. Start all with the same command, in the same environment, from the same files."
OTHER_START = f"the ranks were started differently; {SAME_COMMAND}"
OTHER_CODE = f"the ranks run different code; {SAME_COMMAND}"
OTHER_DATA = "the ranks have different data; nothing was trained. All nodes must see the same files."
OTHER_MODEL = (
    "the ranks would not train the same model; nothing was trained. Look at what in the workload depends on the rank, "
    "the node or chance."
)
ENTRIES_PER_BLOCK = 1000
MAX_LINES = 20
MAX_VALUE_LENGTH = 160


def require_same_start(collective: Collective, config: Config, *, command: str, environ: Mapping[str, str]) -> None:
    """Compare the start. Must be the first collective operation."""
    facts = {"command": command, "communication": collective.description, **describe_start(config, environ)}
    require_alike(collective, facts, UsageError, OTHER_START, name="preflight/start")
    require_same_code(collective, name="preflight/code")


def require_same_code(collective: Collective, *, name: str) -> None:
    """Compare user code, on the ranks that have loaded it."""
    facts = describe_loaded_code()
    mine = {fact: digest([value] if isinstance(value, str) else value) for fact, value in facts.items()}
    whole = digest([f"{fact} {value}" for fact, value in mine.items()])
    if len(set(all_gather_object(collective, whole, name=f"{name}/digest"))) == 1:
        return
    ranks = all_gather_object(collective, mine, name=f"{name}/files")
    known = dict.fromkeys(itertools.chain.from_iterable(ranks))
    differing = [fact for fact in known if len({rank[fact] for rank in ranks if fact in rank}) > 1]
    shown = {fact: facts[fact] for fact in differing if fact in facts}
    require_alike(collective, shown, UsageError, OTHER_CODE, name=name)


def require_same_sources(collective: Collective, sources: Sources) -> None:
    """Compare number and kind of samples; see ``require_same_contents``."""
    facts = dict(itertools.chain(*(describe_source(*named).items() for named in sources._asdict().items())))
    require_alike(collective, facts, DataError, OTHER_DATA, name="preflight/sources")


def require_alike(
    collective: Collective, facts: Facts, kind: type[RingtrainError], headline: str, *, name: str
) -> None:
    world = collective.world
    ranks = all_gather_object(collective, [world.node, summarize(facts)], name=name)
    nodes, summaries = [node for node, _ in ranks], [summary for _, summary in ranks]
    differing = find_differing(summaries)
    if not differing:
        return
    shown: dict[str, list[str]] = {}
    for fact in differing:
        of_ranks = [summary.get(fact) for summary in summaries]
        if any(isinstance(value, Mapping) for value in of_ranks):
            mine = facts.get(fact, ())
            entries = [mine] if isinstance(mine, str) else mine
            number, values = find_first_difference(collective, entries, of_ranks, name=f"{name}/{fact}")
            shown[f"{fact} {number}"] = values
        else:
            shown[fact] = [NOT_SET if value is None else str(value) for value in of_ranks]
    raise kind(describe_differences(headline, shown, nodes), reach="run")


def describe_differences(headline: str, shown: Mapping[str, Sequence[str]], nodes: Sequence[str]) -> str:
    lines = [describe_difference(label, values, nodes) for label, values in shown.items()]
    more = [f"and {len(lines) - MAX_LINES} more differences"] if len(lines) > MAX_LINES else []
    return "\n  ".join([headline, *lines[:MAX_LINES], *more])


def summarize(facts: Facts) -> dict[str, Any]:
    return {
        name: value if isinstance(value, str) else {"entries": len(value), "digest": digest(value)}
        for name, value in facts.items()
    }


def find_differing(summaries: Sequence[Summary]) -> list[str]:
    names = dict.fromkeys(itertools.chain.from_iterable(summaries))
    return [name for name in names if any(s.get(name) != summaries[0].get(name) for s in summaries)]


def describe_difference(label: str, values: Sequence[str], nodes: Sequence[str]) -> str:
    usual, *odd = group_ranks(values).items()
    said = []
    for value, ranks in [*odd, usual]:
        text = value.strip() or "''"
        short = text if len(text) <= MAX_VALUE_LENGTH else f"{text[:MAX_VALUE_LENGTH]}..."
        are_many = len(ranks) > 1
        who = name_ranks(ranks, None if are_many and value == usual[0] else nodes)
        said.append(f"{who} {'have' if are_many else 'has'} {short}")
    return f"{label}: {', '.join(said)}"


def describe_start(config: Config, environ: Mapping[str, str]) -> dict[str, str | list[str]]:
    import keras

    settings = flatten_settings(to_plain(asdict(config)))
    return {
        **{name: str(value) for name, value in settings.items() if name not in SETTINGS_OF_A_NODE},
        **describe_package(),
        **{name: version or NOT_SET for name, version in package_versions().items()},
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "device": describe_device_kind(),
        **{name: environ.get(name, NOT_SET) for name in (*HOROVOD_SETTINGS, *TENSORFLOW_SETTINGS)},
        "Keras' image_data_format": keras.config.image_data_format(),
        "Keras' epsilon": str(keras.config.epsilon()),
    }


def describe_package() -> dict[str, list[str]]:
    package = Path(__file__).resolve().parents[1]
    files = sorted(package.rglob("*.py"))
    own = [f"{file.relative_to(package)} {digest([file.read_text(encoding='utf-8')])[:12]}" for file in files]
    return {"ringtrain file": own}


def package_versions() -> dict[str, str | None]:
    return {package: package_version(package) for package in PACKAGES}


def describe_device_kind() -> str:
    """Compute capability determines the bits of an update; GPU names include the memory size."""
    import tensorflow as tf

    gpus = tf.config.get_visible_devices("GPU")
    if not gpus:
        return "cores"
    capability = tf.config.experimental.get_device_details(gpus[0]).get("compute_capability", ())
    return f"a GPU of compute capability {'.'.join(map(str, capability)) or 'unknown'}"


def describe_source(name: str, source: Source | Feed | None) -> dict[str, str | list[str]]:
    if source is None:
        return {name: NOT_SET}
    if isinstance(source, Feed):
        kind = "a dataset for all ranks" if source.is_shared else "a feed of each rank"
        return {name: f"{kind}, of {source.steps_per_epoch or 'unknown'} steps an epoch"}
    fingerprint = getattr(source, "fingerprint", "")
    printed = f", fingerprint {str(fingerprint)[:12]}" if fingerprint else ""
    facts: dict[str, str | list[str]] = {name: f"{source.num_samples:,} samples ({type(source).__name__}{printed})"}
    if isinstance(source, ArraySource):
        arrays = source.arrays().items()
        facts[f"{name} array"] = [f"{place} {array.dtype.name} {list(array.shape[1:])}" for place, array in arrays]
    return facts


def digest(texts: Sequence[str]) -> str:
    hashed = hashlib.sha256()
    for text in texts:
        hashed.update(text.encode(errors="surrogateescape") + b"\0")
    return hashed.hexdigest()[:32]


def find_first_difference(
    collective: Collective, entries: Sequence[str], summaries: Sequence[Any], *, name: str
) -> tuple[int, list[str]]:
    """Return the number (from 1) of the first different entry, and each rank's value. Collective.

    The first of equal ranks sends. Different lists precede a missing one (summary None).
    """
    speakers = [summaries.index(summary) for summary in summaries]
    compared = [speaker for speaker in speakers if summaries[speaker] is not None]
    compared = compared if len(set(compared)) > 1 else speakers
    mine = entries if speakers[collective.world.rank] == collective.world.rank else ()
    starts = range(0, len(mine), ENTRIES_PER_BLOCK)
    blocks = [digest(mine[start : start + ENTRIES_PER_BLOCK]) for start in starts]
    start = ENTRIES_PER_BLOCK * _first_place(all_gather_object(collective, blocks, name=f"{name}/blocks"), compared)
    said = all_gather_object(collective, list(mine[start : start + ENTRIES_PER_BLOCK]), name=f"{name}/entries")
    place = _first_place(said, compared)
    values = [said[speaker][place] if place < len(said[speaker]) else NOT_SET for speaker in speakers]
    return start + place + 1, values


def _first_place(said: Sequence[Sequence[str]], speakers: Sequence[int]) -> int:
    places = itertools.zip_longest(*(said[speaker] for speaker in dict.fromkeys(speakers)))
    return next(number for number, values in enumerate(places) if len(set(values)) > 1)


PACKAGES = ("ringtrain", "tensorflow", "keras", "horovod", "mpi4py", "numpy")


def describe_loaded_code() -> dict[str, str | list[str]]:
    """Lines of user modules, and versions of their packages, by import name: paths may differ."""
    facts: dict[str, str | list[str]] = {}
    versions: dict[str, str] = {}
    seen = set()  # multiprocessing can give the program several names
    for name, module in sorted(sys.modules.items()):
        file = _file_of(module)
        if file is None or file in seen or not is_users_own(file):
            continue
        seen.add(file)
        lines = _read_lines(name, module, file)
        if lines is not None:
            depth = name.count(".") + 1 + (Path(file).stem == "__init__")
            label = "/".join(Path(file).parts[-depth:])  # nets/blocks.py for nets.blocks
            if f"{label} line" in facts:
                label = f"{Path(file).parent.name}/{label}"
            facts[f"{label} line"] = lines
        versions |= dict(_packages_in(module))
    return facts | dict(sorted(versions.items()))


def _file_of(module: object) -> str | None:
    """Avoid ``getattr``, which would load lazy modules."""
    return vars(module).get("__file__") if isinstance(module, ModuleType) else None


def _read_lines(name: str, module: ModuleType, file: str) -> list[str] | None:
    path = Path(file)
    if path.suffix == ".py" and path.is_file():
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    spec = getattr(module, "__spec__", None)
    loader: Any = getattr(spec, "loader", None) or getattr(module, "__loader__", None)
    try:
        source = loader.get_source(spec.name if spec else name)
    except (AttributeError, ImportError, OSError, SyntaxError, UnicodeDecodeError):
        return None
    return None if source is None else str(source).splitlines()


def _packages_in(module: ModuleType) -> Iterator[tuple[str, str]]:
    for value in list(vars(module).values()):
        if isinstance(value, ModuleType):
            origin = vars(value).get("__name__")
        else:
            origin = value.__module__ if isinstance(value, (type, FunctionType)) else None
        name = str(origin).partition(".")[0]
        file = _file_of(sys.modules.get(name))
        if name in PACKAGES or file is None or is_users_own(file) or not any(folder in file for folder in INSTALLED):
            continue
        version = package_version(name) or vars(sys.modules[name]).get("__version__")  # yaml is in PyYAML
        if isinstance(version, str):
            yield name, version


# These may differ: rank 0's weights are broadcast, and Keras draws missing seeds.
OF_A_RANK = ("initializer", "seed", "build_config")


def describe_layers(model: keras.Model, is_own: Callable[[keras.Layer], bool] = lambda layer: False) -> list[str]:
    """Settings that must be equal on all ranks, without layers that a rank trains alone."""
    import keras

    containers = (keras.Sequential, keras.Model, keras.layers.InputLayer)  # their layers are listed separately
    layers = [layer for layer in all_layers(model) if not isinstance(layer, containers)]
    return [
        f"{type(layer).__name__} (layer {number}): {setting}"
        for number, layer in enumerate(layers, 1)
        if not is_own(layer)
        for setting in _flatten(_config_of(layer))
    ]


def draws(layer: keras.Layer) -> bool:
    """True if a layer draws random numbers; Keras' then have seed generators."""
    rates = [getattr(layer, name) for name in ("dropout", "recurrent_dropout") if hasattr(layer, name)]
    return bool(seed_generators_of(layer)) and (not rates or any(rates))


def _config_of(layer: keras.Layer) -> Mapping[str, Any]:
    try:
        config = layer.get_config()
    except Exception:  # from user code; Keras raises for layers with unknown arguments
        return {}
    return config if isinstance(config, Mapping) else {}


def _flatten(config: Mapping[str, Any]) -> Iterator[str]:
    settings = {str(path): value for path, value in flatten_settings(config).items()}
    for path, value in settings.items():
        parent, _, name = path.rpartition(".")
        is_of_a_layer = not parent or f"{parent}.trainable" in settings  # a layer's name; Keras numbers it by creation
        if not (name == "name" and is_of_a_layer) and not any(part.endswith(OF_A_RANK) for part in path.split(".")):
            yield f"{path}={plain(value)}"


def plain(value: Any) -> str:
    """Text that is equal on all ranks: of other objects, the type."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return str(value)
    if isinstance(value, (list, tuple)):
        return str([plain(item) for item in value])
    return type(value).__name__
