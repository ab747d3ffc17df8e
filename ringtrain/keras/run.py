"""``callbacks.Run``: run directory, resume and watchdog for ``fit``."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import keras

from ringtrain.collectives import all_gather_object
from ringtrain.config import OPTIMIZER_CLASSES, Config, OptimizerConfig
from ringtrain.errors import DivergedError, PreemptedError, ReplicasDifferError, RingtrainError, UsageError
from ringtrain.guard.causes import explaining_lost_ranks
from ringtrain.keras.auditing.runs import AuditEnd, audited_runs
from ringtrain.keras.collective import ProcessSetCollective, is_elastic, require_init
from ringtrain.keras.fit_session import FitSession
from ringtrain.keras.rank_state import COUNTED
from ringtrain.run.directory import FIT_OF, REPORT_FILE
from ringtrain.run.held_variables import COMPILED_OPTIMIZER, find_optimizers
from ringtrain.runtime import shutdown
from ringtrain.runtime.activity import Phase, set_phase
from ringtrain.runtime.private import learning_rate_of
from ringtrain.runtime.stopping import StopRequests
from ringtrain.training.ending import early_end, report_end, report_error
from ringtrain.training.joining import leave_by, watched
from ringtrain.training.together import opened_together


class Run(keras.callbacks.Callback):
    """Keeps a ``fit`` in a run directory, as ``python -m ringtrain`` does.

        model.fit(batches, epochs=90, callbacks=[hvd.callbacks.Run("runs/mine")])

    The same script, started again, resumes with the next batch. On SIGTERM, Slurm's warning, the end of the allocation
    or a file ``stop``, the run saves after the current step and exits with code 75. A non-finite loss ends it with exit
    code 4 at the next log line, unsaved. For a complete run, ``fit`` restores its weights and returns.

    A resume is exact (bit for bit on as many ranks) if the pipeline yields the same batches. Another number of ranks
    restarts the epoch. See docs/fit.md.
    """

    current: ClassVar[FitSession | None] = None  # during a fit

    def __init__(
        self,
        out: str | os.PathLike[str],
        *,
        checkpoint_every: int = Config.checkpoint_every,
        keep: int = Config.keep,
        log_every: int = Config.log_every,
        best_metric: str = Config.best_metric,
        best_direction: Literal["min", "max"] = Config.best_direction,
        resume: Literal["auto", "never", "must"] = Config.resume,
        check_replicas_every: int = Config.check_replicas_every,
        hang_timeout: float = Config.hang_timeout,
        max_hours: float | None = Config.max_hours,
        tracker: str = Config.tracker,
    ) -> None:
        """Set the run directory. The arguments are settings of ``python -m ringtrain``.

        Args:
            out: the run directory, equal on all ranks; only rank 0 writes it.
            checkpoint_every: steps between checkpoints, in addition to each epoch's; 0: none.
            keep: newest checkpoints to keep, in addition to the best.
            log_every: steps between ``train`` events in ``metrics.jsonl``.
            best_metric, best_direction: validation value of the best checkpoint, without ``val_``.
            resume: ``"auto"``, ``"never"`` (a new directory) or ``"must"``.
            check_replicas_every: steps between comparisons of the replicas, besides those of saves; 0: none.
            hang_timeout: seconds without progress until exit with code 6; 0: no watchdog.
            max_hours: hours until the run saves and exits with code 75.
            tracker: experiment trackers, such as ``"mlflow,wandb"``.

        Raises:
            UsageError: an argument is invalid.
        """
        super().__init__()
        if not isinstance(out, str | os.PathLike):
            raise UsageError(f"out is {out!r}; it must be a path, such as 'runs/mine'.")
        self._config = Config(
            workload=FIT_OF + (Path(sys.argv[0]).name or "a script"),
            out=Path(os.path.expanduser(out)),
            checkpoint_every=checkpoint_every,
            keep=keep,
            log_every=log_every,
            best_metric=best_metric,
            best_direction=best_direction,
            resume=resume,
            check_replicas_every=check_replicas_every,
            hang_timeout=hang_timeout,
            max_hours=max_hours,
            tracker=tracker,
        )
        self._was_used = False
        self._others: list[keras.callbacks.Callback] = []
        self._listed: list[keras.callbacks.Callback] = []

    @contextlib.contextmanager
    def around(self, model: keras.Model, *, epochs: int, initial_epoch: int, is_alone: bool) -> Iterator[None]:
        """Collective.

        Raises:
            SystemExit: the run ended early, on all ranks; the reason is printed.
        """
        require_init("callbacks.Run")
        collective = ProcessSetCollective()
        try:
            self._check_use(initial_epoch, is_alone=is_alone)
            with StopRequests() as requests:
                requests.at_early_end(lambda reason, code: report_error(early_end(reason, code), collective.world))
                config = dataclasses.replace(self._config, epochs=epochs, **optimizer_settings(model))
                if (audit := audited_runs()) is not None:
                    config = audit.redirect(config, is_rank0=collective.world.is_rank0)
                with self._keeping(model, config, collective, requests):
                    yield
        except RingtrainError as error:
            report_end(error, collective.world)
            shutdown.note_exit_code(error.exit_code)
            raise SystemExit(error.exit_code) from error

    @contextlib.contextmanager
    def _keeping(
        self, model: keras.Model, config: Config, collective: ProcessSetCollective, requests: StopRequests
    ) -> Iterator[None]:
        world = collective.world
        with watched(config, world) as watchdog:
            try:
                with explaining_lost_ranks():
                    all_gather_object(collective, None, name="a fit with callbacks.Run")
                    watchdog.meet(collective)
                with opened_together(config, collective, requests, watchdog) as session:
                    Run.current = fit = FitSession(model, session)
                    watchdog.refine = fit.refine
                    set_phase(Phase.PREPARE, takes_long=True)  # Keras reads the first batch
                    try:
                        yield
                    finally:
                        Run.current = None
                        fit.close()
                if not (start := session.start).is_complete:
                    session.console.line(f"done: the run is in {start.name}, its curves in {start.name}/{REPORT_FILE}")
            except AuditEnd:  # of all ranks, after the same step
                raise
            except BaseException as error:
                if world.size > 1 or isinstance(error, RingtrainError):
                    # any other error may be of the script on one rank
                    is_agreed = isinstance(error, PreemptedError | DivergedError | ReplicasDifferError)
                    leave_by(error, collective, watchdog, is_agreed=is_agreed)
                raise

    def before_others(self, callbacks: Sequence[keras.callbacks.Callback]) -> keras.callbacks.Callback:
        """A callback before all others: it reports them to the watchdog, and compares the replicas at the end."""
        self._listed = list(callbacks)
        self._others = [callback for callback in callbacks if isinstance(callback, tuple(COUNTED))]

        def begin(*_: Any, takes_long: bool = False) -> None:
            set_phase(Phase.CALLBACKS, self._fit.step, takes_long=takes_long)

        def end(*_: Any) -> None:
            self._fit.check_replicas()
            begin(takes_long=True)

        return keras.callbacks.LambdaCallback(
            on_train_begin=functools.partial(begin, takes_long=True), on_epoch_end=begin, on_train_end=end
        )

    def _check_use(self, initial_epoch: int, *, is_alone: bool) -> None:
        if self._was_used or Run.current is not None or not is_alone:
            raise UsageError(
                "callbacks.Run was given twice. One Run keeps one fit(), and a fit() has one: make another with "
                "another directory for each fit()."
            )
        if is_elastic():
            raise UsageError(
                "callbacks.Run needs a fixed set of ranks, and horovodrun has started this one with --min-np or "
                "--host-discovery-script. Leave these out, or keep the model by elastic.KerasState."
            )
        if initial_epoch:
            raise UsageError(
                f"initial_epoch is {initial_epoch}, but callbacks.Run knows the epoch. Leave initial_epoch out."
            )
        self._was_used = True

    def on_train_begin(self, logs: Any = None) -> None:
        self._fit.begin(self._others, self._listed, steps=self.params.get("steps"))

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._fit.begin_epoch()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._fit.begin_batch()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._fit.end_batch(batch, logs or {})

    def on_test_begin(self, logs: Any = None) -> None:
        self._fit  # noqa: B018 - evaluate() alone has none

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        set_phase(Phase.EVALUATION_DATA, batch + 1)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._fit.end_epoch(epoch, logs or {})

    def on_train_end(self, logs: Any = None) -> None:
        self._fit.end()

    @property
    def _fit(self) -> FitSession:
        if Run.current is None:
            raise UsageError("callbacks.Run is a callback of fit(), after ringtrain.keras.init(). Pass it there.")
        return Run.current


def optimizer_settings(model: keras.Model) -> dict[str, Any]:
    """Return the settings of a run that describe its optimizers: a resume with other optimizers is refused."""
    facts: dict[str, Any] = {}
    settings: dict[str, Any] = {"options": facts}
    for path, optimizer in find_optimizers(model).items():
        kind, rate = _kind_and_rate(optimizer)
        if path != COMPILED_OPTIMIZER:
            facts[f"optimizer {path}"] = kind
            facts[f"learning_rate {path}"] = rate
            continue
        facts["optimizer"] = kind
        facts["learning_rate"] = rate
        names = [name for name, class_name in OPTIMIZER_CLASSES.items() if class_name == kind]
        if names and isinstance(rate, float) and rate > 0:
            settings["optimizer"] = OptimizerConfig(name=names[0], lr=rate)
    return settings


def _kind_and_rate(optimizer: Any) -> tuple[str, float | str]:
    """Return the class and the learning rate, or the class of its schedule, of the innermost optimizer."""
    inner = getattr(optimizer, "inner_optimizer", None)
    if inner is not None:
        return _kind_and_rate(inner)
    rate = learning_rate_of(optimizer)
    if isinstance(rate, keras.Variable):
        return type(optimizer).__name__, float(rate.numpy())
    return type(optimizer).__name__, type(rate).__name__
