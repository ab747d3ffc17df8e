"""Configuration of a run: frozen dataclasses with checks.

A field's name is its flag and YAML key. The user's values override a workload's (``Workload.defaults``).
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ringtrain.errors import UsageError
from ringtrain.messages.removed import refuse_removed
from ringtrain.messages.rules import (
    above,
    at_least,
    at_most,
    check_types,
    count_or_auto,
    did_you_mean,
    merge_options,
    one_of,
    printable,
    range_of_steps,
)

DEFAULT_BATCH_SIZE = 32  # per rank
# Keras 3 class names, for checks before TensorFlow is imported. LARS is ringtrain's.
_CLASSES = "SGD Adam AdamW Adamax Adagrad Adadelta Adafactor Ftrl Lamb LARS Lion Nadam RMSprop"
OPTIMIZER_CLASSES = {name.lower(): name for name in _CLASSES.split()}
MOMENTUM_OPTIMIZERS = ("sgd", "rmsprop", "lars")
RHO_OPTIMIZERS = ("rmsprop", "adadelta")
EPSILON_OPTIMIZERS = ("rmsprop", "adadelta", "adagrad", "adam", "adamw", "adamax", "nadam", "lamb")

# Limits of steps in checkpoint names, TensorFlow's dimensions, NumPy's seeds and the kernel's timeouts.
MAX_STEPS = 999_999_999
WEIGHT_FILES = (".weights.h5", ".keras", ".safetensors")
TRACKERS = ("mlflow", "wandb", "trackio")
MAX_SIZE = 2**31 - 1
MAX_SEED = 2**32 - 1
MAX_SECONDS = 1_000_000_000

Precision = Literal["float32", "mixed_float16", "mixed_bfloat16", "float64"]


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer and its learning rate as a function of the samples seen."""

    name: str = "sgd"
    """a Keras 3 optimizer: sgd, adam, adamw, adamax, adagrad, adadelta, adafactor, ftrl, lamb, lion, nadam, rmsprop; or
    lars (You, Gitman, Ginsburg 2017)"""

    lr: float = 0.01
    """learning rate at the workload's own global batch size"""

    lr_scale: Literal["none", "linear", "sqrt"] = "none"
    """how lr grows with global_batch_size over the workload's own (Goyal et al. 2017: linear)"""

    warmup_epochs: float = 0.0
    """epochs over which the learning rate rises linearly from lr (from 0 where lr_scale is none) to its scaled value"""

    schedule: Literal["constant", "exponential", "cosine", "linear", "polynomial"] = "constant"
    """what follows the warm-up; cosine, linear and polynomial (of power 2, as in MLPerf's ResNet) end at 0 with the
    run"""

    decay_rate: float = 0.1
    """factor of each step of the exponential staircase"""

    decay_epochs: float = 350.0
    """epochs between two steps of the exponential staircase"""

    momentum: float = 0.0
    """momentum of sgd, rmsprop and lars"""

    nesterov: bool = False
    """Nesterov momentum (sgd)"""

    rho: float | None = None
    """decay of the running mean of squares (rmsprop, adadelta); by default Keras' own"""

    epsilon: float | None = None
    """what is added to the denominator (rmsprop, adam and their kin); by default Keras' own"""

    weight_decay: float = 0.0
    """decoupled weight decay (Loshchilov and Hutter 2019), and that of lars; 0 is off"""

    exclude: str | None = None
    """comma-separated words, such as bias,gamma,beta: weights with one of them in their name have no weight decay, and
    with lars no layer-wise learning rate"""

    trust_coefficient: float | None = None
    """a weight's learning rate over the ratio of its norm to its gradient's (lars); by default 0.001"""

    clip_global_norm: float = 0.0
    """largest global norm of the reduced gradients; 0 is off"""

    ema: float = 0.0
    """largest decay of a moving average of the weights, which is evaluated in their place, such as 0.9999; 0 is off"""

    def __post_init__(self) -> None:
        check_types(self, "optimizer.")
        one_of("optimizer.name", self.name, tuple(OPTIMIZER_CLASSES))
        for name in ("warmup_epochs", "momentum", "weight_decay", "clip_global_norm", "ema"):
            at_least(f"optimizer.{name}", getattr(self, name), 0)
        for name, such in (("ema", 0.9999), ("rho", 0.9), ("momentum", 0.9)):
            if (getattr(self, name) or 0) >= 1:
                raise UsageError(f"optimizer.{name} is {getattr(self, name)}; it must be below 1, such as {such}.")
        for name in ("lr", "decay_rate", "decay_epochs"):
            above(f"optimizer.{name}", getattr(self, name), 0)
        for name, takers, remedy in (
            ("momentum", MOMENTUM_OPTIMIZERS, f"leave it at 0, or choose {' or '.join(MOMENTUM_OPTIMIZERS)}"),
            ("rho", RHO_OPTIMIZERS, f"leave it out, or choose one of {', '.join(RHO_OPTIMIZERS)}"),
            ("epsilon", EPSILON_OPTIMIZERS, f"leave it out, or choose one of {', '.join(EPSILON_OPTIMIZERS)}"),
            ("trust_coefficient", ("lars",), "leave it out, or choose lars"),
        ):
            value = getattr(self, name)
            if value is not None and name != "momentum":
                above(f"optimizer.{name}", value, 0)
            if value and self.name not in takers:
                raise UsageError(f"optimizer.{name} is {value}, but {self.name} takes none; {remedy}.")
        if self.exclude is not None and not (self.weight_decay or self.name == "lars"):
            raise UsageError(
                f"optimizer.exclude is {self.exclude!r}, but there is no weight decay to exclude weights from; give "
                "optimizer.weight_decay, or leave it out."
            )
        if self.nesterov and not (self.name == "sgd" and self.momentum):
            raise UsageError(
                "optimizer.nesterov is true, but only sgd with optimizer.momentum above 0 has Nesterov momentum."
            )

    @property
    def excluded_words(self) -> list[str]:
        return [word.strip() for word in (self.exclude or "").split(",") if word.strip()]


@dataclass(frozen=True, kw_only=True)
class Config:
    """One training run."""

    workload: str = "digits"
    """what to train: a built-in name, path/file.py, path/file.py:Class or package.module:Class"""

    options: dict[str, Any] = field(default_factory=dict)
    """the workload's own settings, each as --options.NAME VALUE"""

    data_dir: Path | None = None
    """directory of the workload's data"""

    out: Path | None = None
    """run directory; runs/<workload> by default"""

    epochs: int | None = None
    """passes over the training data"""

    steps: int | None = None
    """steps to train, instead of epochs"""

    batch_size: int | None = None
    """samples per rank and micro-batch (see accumulate)"""

    global_batch_size: int | None = None
    """samples of one step over all ranks, instead of batch_size"""

    seed: int = 0
    """seed of the first weights, the order of samples, augmentation and dropout"""

    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """the optimizer"""

    log_every: int = 100
    """steps between two lines of the log"""

    eval_every_epochs: int = 1
    """epochs between two evaluations, besides the one at the end; 0: only at the end"""

    eval_every: int = 0
    """steps between two evaluations; 0: by epochs"""

    stop_after: int = 0
    """evaluations in a row without a new best after which the run is complete; 0: only at the end"""

    best_metric: str = "loss"
    """the value by which the best checkpoint is chosen (kept as best-step-N) and that counts for stop_after"""

    best_direction: Literal["min", "max"] = "min"
    """whether a smaller or a larger value of best_metric is better"""

    checkpoint_every: int = 1000
    """steps between two checkpoints, besides the one at the end; 0: only at the end"""

    max_hours: float | None = None
    """hours after which the run saves and leaves with exit code 75; a Slurm job's own end is read from Slurm"""

    keep: int = 3
    """how many of the newest checkpoints are kept, besides the best"""

    resume: Literal["auto", "never", "must"] = "auto"
    """auto: resume from the newest whole checkpoint in the run directory; never: start a new run, elsewhere"""

    init_from: Path | None = None
    """checkpoint, run directory, .weights.h5, .keras or .safetensors whose weights a new run starts from, by name"""

    backend: Literal["auto", "native", "horovod", "solo"] = "auto"
    """library of the reductions: auto is solo without a launcher, else Horovod (MPI if it is not installed); on the
    cores of a single node ringtrain's own shared memory for short sums, or for all sums if each rank has one core;
    native is ringtrain for all sums, also between nodes, and MPI for the rest; horovod is Horovod for everything"""

    compression: Literal["none", "fp16", "bf16"] = "none"
    """type in which gradients travel; Horovod cannot sum bf16"""

    jit_compile: Literal["auto", "true", "false"] = "auto"
    """whether XLA compiles a rank's forward and backward pass; sums and update are not compiled.
    auto: on GPUs, except with --deterministic true, samples of unknown length, or layers that
    Keras does not compile"""

    shard_optimizer: bool = False
    """whether each rank updates a part of the weights, and keeps the optimizer's slots of that part alone (ZeRO 1)"""

    steps_per_call: str = "auto"
    """most steps of one TensorFlow call; auto: as many as take 100 ms, at most 100, if compiling the call saves more
    time than it takes"""

    accumulate: int = 1
    """micro-batches per step, to train a batch that does not fit into memory"""

    precision: Precision = "float32"
    """type of the computation"""

    on_nonfinite: Literal["stop", "skip"] = "stop"
    """what to do about a step whose loss or gradient is not finite; nothing is updated by it in either case"""

    check_replicas_every: int = 1000
    """steps between two comparisons of all ranks' weights, bit by bit, besides one before each save; 0: none"""

    # Longer than a failover of a network file system, and than any known step.
    hang_timeout: float = 300.0
    """seconds after which a run that does not move is ended; its start and its saves have 600 at least; 0: no watch"""

    # Enough for a tracker's last upload, cheap for an idle allocation.
    exit_timeout: float = 60.0
    """seconds that threads, child processes and atexit handlers of your code have after the run; 0: any time"""

    detached: bool = False
    """continue to train after the launcher was killed; otherwise the ranks save and exit"""

    deterministic: bool = False
    """bit-equal results of two runs of the same size, at some cost in speed"""

    copy_to: str | None = None
    """address such as s3://bucket/runs, for fsspec, that gets a copy of each checkpoint, of the log and the report"""

    tracker: str = "none"
    """experiment trackers that get the log: mlflow, wandb or trackio, several with commas between"""

    profile: str | None = None
    """START:STOP, the steps (from 1) of which TensorFlow's profile and a timeline of all ranks' sums are written"""

    synthetic: bool = False
    """synthetic data of the same shape, for measuring"""

    def __post_init__(self) -> None:
        steps: Any = self.steps_per_call
        if type(steps) is int:  # in YAML
            object.__setattr__(self, "steps_per_call", str(steps))
        check_types(self)
        count_or_auto("steps_per_call", self.steps_per_call, MAX_SIZE)
        for names, least, most in (
            (("epochs", "steps"), 1, MAX_STEPS),
            (("batch_size", "global_batch_size", "accumulate", "log_every", "keep"), 1, MAX_SIZE),
            (("eval_every_epochs", "eval_every", "stop_after"), 0, MAX_SIZE),
            (("checkpoint_every", "check_replicas_every"), 0, MAX_SIZE),
            (("seed",), 0, MAX_SEED),
        ):
            for name in names:
                if getattr(self, name) is not None:
                    at_least(name, getattr(self, name), least, most)
        for name, other in (("batch_size", "global_batch_size"), ("epochs", "steps")):
            if getattr(self, name) is not None and getattr(self, other) is not None:
                raise UsageError(
                    f"{name} is {getattr(self, name)} and {other} is {getattr(self, other)}; give one of the two."
                )
        trackers_of(self.tracker)
        if self.copy_to is not None and not re.fullmatch(r"[a-z0-9]+://[^@\s]+", self.copy_to):
            raise UsageError(
                f"copy_to is {self.copy_to!r}; it must be an address such as s3://bucket/runs, without user names, "
                "passwords and keys. Those come from the store's own environment variables."
            )
        if (self.backend, self.compression) == ("horovod", "bf16"):
            raise UsageError(
                "compression is 'bf16' and backend 'horovod', which has no bfloat16. Use --compression fp16."
            )
        for name in ("workload", "out", "data_dir", "init_from"):
            printable(name, getattr(self, name))
        if self.profile is not None:
            range_of_steps("profile", self.profile)
        if self.max_hours is not None:
            above("max_hours", self.max_hours, 0, MAX_SECONDS / 3600)
        if self.hang_timeout != 0 and not (math.isfinite(self.hang_timeout) and self.hang_timeout >= 1):
            raise UsageError(f"hang_timeout is {self.hang_timeout}; it must be at least 1 second, or 0 for no watch.")
        at_most("hang_timeout", self.hang_timeout, MAX_SECONDS)
        at_least("exit_timeout", self.exit_timeout, 0, MAX_SECONDS)
        of_weights = f"; it must be a checkpoint, a run directory, or a file {', '.join(WEIGHT_FILES)}"
        for name, endings, kinds in (("data_dir", (), ""), ("init_from", WEIGHT_FILES, of_weights)):
            value = getattr(self, name)
            path = str(value)
            is_there = os.path.isdir(path) or (path.endswith(endings) and os.path.isfile(path))  # Path.is_dir may raise
            if value is not None and not is_there:
                rule = f"is no directory that can be read{kinds}. Check the path."
                raise UsageError(f"{name} {path!r} {rule}", reach="node")


def trackers_of(names: str) -> list[str]:
    """Return trackers, also the names of their packages; none for "none". Raises UsageError."""
    chosen = [] if names == "none" else [name.strip() for name in names.split(",")]
    for name in chosen:
        if name not in TRACKERS:
            meant = did_you_mean(name, TRACKERS)
            raise UsageError(f"tracker is {name!r}; it must be {' or '.join(TRACKERS)}. {meant}".strip())
    return list(dict.fromkeys(chosen))


def make_config(
    explicit: Mapping[str, Any],
    workload_defaults: Mapping[str, Any],
    workload_options: Mapping[str, Any] | None = None,
) -> Config:
    """Merge the user's settings, by field, with ``workload_defaults``. ``workload_options`` None: not known yet."""
    defaults = dict(workload_defaults)
    _refuse_unknown(defaults)
    # A user's setting removes the default that it excludes.
    for name, other in (("batch_size", "global_batch_size"), ("epochs", "steps")):
        if explicit.get(name) is not None:
            defaults.pop(other, None)
        if explicit.get(other) is not None:
            defaults.pop(name, None)
    optimizer = {**defaults.pop("optimizer", {}), **explicit.get("optimizer", {})}
    options = explicit.get("options", {})
    if workload_options is not None:
        options = merge_options(options, workload_options)
    values = {**defaults, **explicit, "optimizer": OptimizerConfig(**optimizer), "options": options}
    for name in ("data_dir", "out", "init_from"):  # unexpanded in files, and by bash in --out=~/run
        if values.get(name) and isinstance(values[name], str | Path):  # a string is a workload's default
            values[name] = Path(os.path.expanduser(values[name]))
    return Config(**values)


def _refuse_unknown(defaults: Mapping[str, Any]) -> None:
    optimizer = defaults.get("optimizer", {})
    if not isinstance(optimizer, Mapping):
        raise UsageError(f"the workload's defaults have optimizer {optimizer!r}; it must be a mapping.")
    for given, prefix, known in ((defaults, "", Config), (optimizer, "optimizer.", OptimizerConfig)):
        for name in given:
            if name not in known.__dataclass_fields__:
                given_name = f"{prefix}{name}"
                refuse_removed(given_name, title=f"the setting {given_name} in the workload's defaults")
                meant = did_you_mean(str(name), known.__dataclass_fields__, prefix=prefix)
                text = f"the workload's defaults have {given_name!r}, but there is no such setting. {meant}"
                raise UsageError(text.strip())


def to_plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    return str(value) if isinstance(value, Path) else value


def flatten_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Name nested settings such as ``optimizer.lr``."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}.{inner}": item for inner, item in flatten_settings(value).items()}
        else:
            flat[name] = value
    return flat
