"""A ``fit`` with a run directory."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import numpy.typing as npt

from ringtrain.collectives import all_gather_object, run_on_rank0
from ringtrain.errors import DivergedError, UsageError
from ringtrain.guard.replicas import ReplicaGuard, require_finite_values
from ringtrain.keras.batches import GENERATORS, Batches, Position
from ringtrain.keras.distributed import find_distributed
from ringtrain.keras.exchange import Exchange
from ringtrain.keras.fit_log import FitLog
from ringtrain.keras.fit_state import (
    build_other_optimizers,
    built_optimizers,
    call_after_eager_step,
    create_metrics,
    name_state,
)
from ringtrain.keras.guards import BATCHES_REMEDY, STOP_REMEDY, TrainingGuard
from ringtrain.keras.merged_metrics import watch_metrics
from ringtrain.keras.rank_state import (
    RANKS,
    Arrays,
    HeldState,
    add_metrics,
    best_weights_of,
    counts_of,
    gather_arrays,
    has_all_metrics,
    is_extra,
    own_of,
    scatter_arrays,
    set_counts,
    set_metrics,
    set_own,
)
from ringtrain.keras.step_sums import Votes
from ringtrain.messages.ranks import name_ranks
from ringtrain.run.checkpoint import Checkpoint
from ringtrain.run.variables import broadcast_variables
from ringtrain.runtime.activity import Note, Phase, set_phase
from ringtrain.runtime.private import begin_fit_at_epoch, build_symbolically, metrics_result_or_logs
from ringtrain.runtime.world import read_world
from ringtrain.training.creation import warn_of_best
from ringtrain.training.saving import set_values
from ringtrain.training.session import RunSession

REMEDY = "Lower the learning rate, clip the gradients (clipnorm=1.0), or look at the data"


class FitSession:
    """A ``fit`` with a run directory. Its decisions are equal on all ranks."""

    def __init__(self, model: keras.Model, session: RunSession) -> None:
        self.model, self._others = model, list[keras.callbacks.Callback]()
        self._session, self._config, self._collective = session, session.config, session.collective
        self.batches = Batches()
        self._start, self._is_complete = session.start, session.start.is_complete
        self._progress, self.step = session.progress, session.start.step
        self._votes = Votes()
        self._log = FitLog(model, session)
        self._variables: dict[str, keras.Variable] = {}
        self._equal: dict[str, keras.Variable] = {}  # of these, equal on all ranks
        self._batch_spec: Any = None
        self._steps_of_epoch: int | None = None
        self._epoch_began_at = session.start.step
        self._build_error: Exception | None = None
        self._resumed: Arrays = {}  # this rank's own state, until the first epoch begins
        self._metrics_so_far: Arrays = {}  # of the epoch, until the first step after a resume
        self._last_logs: Mapping[str, Any] = {}
        self._saved_logs: dict[str, Any] = {}  # of the resumed epoch, until its first step
        self._is_first_batch, self._is_stopped = True, False
        self._rates: list[tuple[keras.Variable, Any]] = []  # from the checkpoint
        self._looked_at = session.start.step

    def build_model(self, batch_spec: Any) -> None:
        """Create weights and metrics before a restore.

        Args:
            batch_spec: ``tf.TensorSpec`` of (x,), (x, y) or (x, y, sample_weight).
        """
        self._batch_spec = batch_spec
        is_resumed_within_epoch = bool(self._progress.batches_done)
        if self.model.built and not is_resumed_within_epoch:
            return
        try:
            build_symbolically(self.model, batch_spec)
        except Exception as error:  # from user code: ``begin`` reports it if weights are missing
            self._build_error = error

    def begin(
        self,
        others: list[keras.callbacks.Callback],
        listed: Sequence[keras.callbacks.Callback],
        *,
        steps: int | None,
    ) -> None:
        """Restore on rank 0 and broadcast. Collective.

        Args:
            others: callbacks with saved counters.
            listed: all callbacks of the fit.
            steps: per epoch; None: unknown.
        """
        self._others = others
        self._steps_of_epoch = steps
        model = self.model
        self._require_shared_weights()
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        watch_metrics(model)
        build_other_optimizers(model, self._batch_spec)
        optimizers = built_optimizers(model)
        self._variables = name_state(model, optimizers)
        self._held = HeldState(model, listed)
        set_phase(Phase.RESTORE, takes_long=True)
        checkpoint = self._session.checkpoint
        named = {} if checkpoint is None else dict(checkpoint.variables)
        shared = {name: value for name, value in named.items() if name in self._variables or not is_extra(name)}
        run_on_rank0(
            self._collective, lambda: set_values(self._variables, shared) if shared else None, name="fit/first"
        )
        broadcast_variables(list(self._variables.values()), self._collective)
        self._rates = [(v, v.numpy()) for name, v in self._variables.items() if name.endswith("learning_rate")]
        if self.step:
            self._resume(named)
        # Saved sums must be there before the first step adds to them: another order rounds otherwise.
        if self._progress.batches_done and not has_all_metrics(model, self._resumed):
            create_metrics(model, self._batch_spec)
        self._describe(checkpoint)
        self._votes.is_summed = False
        Exchange.votes = self._votes
        model.make_train_function(force=True)  # a function traced by an earlier fit has no votes
        self._equal = self._find_equal(optimizers)
        self._replicas = ReplicaGuard(self._equal, self._collective)
        if not self._is_complete:
            self._session.begin()
        set_phase(Phase.DATA, self.step + 1, takes_long=True)

    def _find_equal(self, optimizers: Mapping[str, keras.optimizers.Optimizer]) -> dict[str, keras.Variable]:
        """Return what all ranks train together: weights, and the state of all optimizers."""
        trained = {id(variable) for variable in self.model.trainable_variables}
        for optimizer in optimizers.values():
            trained |= {id(variable) for variable in optimizer.variables}
        equal = {}
        for name, variable in self._variables.items():
            # The TrainingGuard compares learning rates, and shows another remedy.
            if id(variable) in trained and not name.endswith("learning_rate"):
                equal[name] = variable
        return equal

    def _resume(self, named: Mapping[str, npt.NDArray[Any]]) -> None:
        """Each rank's own state is restored only by as many ranks."""
        progress, size = self._progress, self._collective.world.size
        if self._is_complete:
            begin_fit_at_epoch(self.model, self._config.epochs)
            return
        self._resumed = scatter_arrays(self._collective, named, former_size=self._start.size or 0)
        place = Position(progress.epochs_done, progress.batches_done, self.step)
        if self._start.size != size:
            if progress.batches_done:
                self._session.console.line(
                    f"the checkpoint was written by {self._start.size} ranks, and now there are {size}: epoch "
                    f"{progress.epochs_done + 1} starts again with its weights"
                )
            progress.batches_done, place = 0, Position(progress.epochs_done)
        begin_fit_at_epoch(self.model, progress.epochs_done)
        TrainingGuard.batches_before = progress.batches_done
        self.batches.begin_at(place, self._resumed)
        of_data = ("data", GENERATORS)
        self._resumed = {name: value for name, value in self._resumed.items() if not name.startswith(of_data)}

    def begin_epoch(self) -> None:
        """Restore counts, after Keras and other callbacks have reset theirs."""
        resumed, self._resumed = self._resumed, {}
        self._epoch_began_at = self.step - self._progress.batches_done
        self.batches.wait()
        set_own(self.model, resumed)
        self._held.set(resumed, self._variables)
        set_counts(self._others, resumed)
        self._log.set_own(resumed)
        if self._progress.batches_done:
            if not set_metrics(self.model, resumed):  # Keras creates their variables in the first step
                self._metrics_so_far = resumed
                if self.model.run_eagerly:
                    call_after_eager_step(self.model, self._add_saved_metrics)
            self._saved_logs = read_logs(resumed)
            for rate, value in self._rates:  # a scheduler has multiplied it again when the epoch began
                rate.assign(value)
        self._log.leave_out_time()

    def refine(self, note: Note) -> Note:
        """Report the phase without gradients: Keras reads the data within the step."""
        if note.doing == Phase.STEP and self._votes.is_summed and not self._votes.is_reducing():
            return note._replace(doing=Phase.GRADIENTS)
        return note

    def begin_batch(self) -> None:
        set_phase(Phase.STEP, self.step + 1, takes_long=self._is_first_batch and not self.model.run_eagerly)
        self._is_first_batch = False

    def end_batch(self, batch: int, logs: Mapping[str, Any]) -> None:
        batch = max(batch, self.batches.last)  # with steps_per_execution
        if self._steps_of_epoch:  # which may count past it
            batch = min(batch, self._steps_of_epoch - 1)
        self.step = self._epoch_began_at + batch + 1
        self._progress.batches_done = batch + 1
        self._log.count_time()
        self._add_saved_metrics()
        self._saved_logs = {}
        self._last_logs = logs
        if self._session.requests.is_pending:
            self._votes.vote()
        if not self._is_between:  # accumulated gradients would be lost.
            return
        former, self._looked_at = self._looked_at, self.step
        self._is_stopped = self._find_stopped(batch)
        if self._passes(former, self._config.log_every):
            self._write_log(logs)
        if self._passes(former, self._config.check_replicas_every):
            self.check_replicas()
        if self._steps_of_epoch and batch + 1 == self._steps_of_epoch:  # what is due follows the validation
            self._log.carry_over()
        elif self._is_stopped:
            self._leave()
        elif self._passes(former, self._config.checkpoint_every):
            self._save()
        set_phase(Phase.DATA, self.step + 1)
        self._log.leave_out_time()

    def _add_saved_metrics(self) -> None:
        """Add the sums of the epoch before the resume, if they are not added yet."""
        if self._metrics_so_far:
            add_metrics(self.model, self._metrics_so_far)
            self._metrics_so_far = {}

    def take_logs(self) -> dict[str, Any]:
        """Return the saved logs of an epoch of which a resume finds no batch left, and set its metrics."""
        self._add_saved_metrics()  # MetricAverageCallback reads them
        saved_logs = self._saved_logs
        self._saved_logs = {}
        return saved_logs

    def _passes(self, former: int, every: int) -> bool:
        return every > 0 and self.step // every > former // every

    @property
    def _is_between(self) -> bool:
        """True if no gradients are accumulated, which would be lost."""
        distributed = find_distributed(self.model.optimizer)
        accumulation = distributed._agg_helper if distributed else None
        return accumulation is None or bool(accumulation.is_complete())

    def _find_stopped(self, batch: int) -> bool:
        size = self._collective.world.size
        if size == 1:
            return self._session.requests.is_pending
        if not self._votes.is_summed:
            raise UsageError(
                "callbacks.Run has to know of all ranks after each step, and this fit() reduces no gradients among all "
                "of them. Wrap the optimizer by hvd.DistributedOptimizer, or the tape of your train_step by "
                "hvd.DistributedGradientTape, for all ranks and with op=hvd.Average or hvd.Sum."
            )
        votes, ranks = self._votes.count()
        if 0 < ranks < size:
            raise UsageError(
                f"{size - ranks} of {size} ranks have ended their epoch before batch {batch + 1}, which this one has "
                f"trained. {BATCHES_REMEDY}",
                reach="rank",
            )
        return votes > 0

    def end_epoch(self, epoch: int, logs: Mapping[str, Any]) -> None:
        self._progress.epochs_done, self._progress.batches_done = epoch + 1, 0
        ends = all_gather_object(self._collective, bool(self.model.stop_training), name="fit/stop_training")
        if len(set(ends)) > 1:
            who = name_ranks([rank for rank, is_end in enumerate(ends) if is_end])
            raise UsageError(f"{who} stopped after epoch {epoch + 1}, and the others continue. {STOP_REMEDY}")
        is_best = self._note_validation(logs)
        self._log.end_epoch(self.step)
        is_last = epoch + 1 == self._config.epochs or ends[0]
        if self._is_stopped and not is_last and self._is_between:
            if is_best:
                self._save(as_step=False, as_best=True)
            self._leave()
        if is_best or not is_last:  # the last is saved at the end
            self._save(as_step=not is_last and self._is_between, as_best=is_best)
        set_phase(Phase.DATA, self.step + 1, takes_long=True)

    def end(self) -> None:
        """Save the last step; return only when all ranks know."""
        if self._is_complete:
            return
        is_early = self._progress.epochs_done < (self._config.epochs or 0)
        self._progress.finished = "stopped early" if is_early else "completed"
        # Checked before the other callbacks. EarlyStopping may have restored each rank's own best weights since.
        broadcast_variables(list(self._equal.values()), self._collective)
        self._finish()

    def close(self) -> None:
        Exchange.votes = None
        begin_fit_at_epoch(self.model, None)
        self._session.requests.end_training()  # before a lost rank is waited for

    def _leave(self) -> None:
        self._session.leave(f"step {self.step}", self._finish())

    def _finish(self) -> str:
        """Return the directory of the checkpoint."""
        return self._session.finish(self.step, self._variables, self._gather_state(), {})

    def _save(self, *, as_step: bool = True, as_best: bool = False) -> None:
        state = self._gather_state()
        self._session.save(self.step, self._variables, state, as_step=as_step, as_best=as_best)

    def check_replicas(self) -> None:
        """Collective; callbacks may have changed variables since the last check at this step."""
        if self._config.check_replicas_every and not self._is_complete:
            set_phase(Phase.CHECK, self.step)
            self._replicas.check(self.step, again=True)

    def _gather_state(self) -> Arrays:
        """Check the shared variables; return the rest of a checkpoint, on rank 0. Collective."""
        self.check_replicas()
        set_phase(Phase.SAVE, self.step, takes_long=True)
        self._require_finite()
        own = own_of(self.model) | self._held.changed(self._variables) | counts_of(self._others)
        if self._progress.batches_done and self._steps_of_epoch is None:  # a resume may find no batch left
            logs = metrics_result_or_logs(self.model, self._last_logs)
            arrays = {f"logs/{name}": np.asarray(value) for name, value in logs.items()}
            own |= {name: array for name, array in arrays.items() if array.dtype.kind in "biuf"}
        own |= self._log.own()
        own |= self.batches.read_state(self._progress.batches_done)
        parts = gather_arrays(self._collective, own)
        if not self._collective.world.is_rank0:
            return {}
        return {f"{RANKS}{rank}": part for rank, part in enumerate(parts)} | best_weights_of(self._others)

    def _require_shared_weights(self) -> None:
        if not self.model.built:
            error = self._build_error
            cause = f": {type(error).__name__}: {error}" if error else "."
            raise UsageError(
                f"the weights of the model {self.model.name!r} cannot be created from the shapes of a batch, so that "
                f"those of a checkpoint cannot be set{cause} Begin the model with keras.Input(shape), or call it on a "
                "batch before fit()."
            ) from error
        distributed = find_distributed(self.model.optimizer)
        settings = distributed and distributed.exchange.settings
        if settings and (settings.process_set != hvd.global_process_set or settings.op == hvd.Adasum):
            raise UsageError(
                "callbacks.Run keeps what all ranks train together, but the optimizer has "
                f"{'op=hvd.Adasum' if settings.op == hvd.Adasum else 'a process_set'}. Leave it out, or keep the model "
                "yourself."
            )
        local = [v.path for v in self.model.trainable_variables if Exchange.is_local_somewhere(v)]
        if local:
            raise UsageError(
                f"callbacks.Run keeps the weights of rank 0, and {local[0]} is each rank's own. Train without local "
                "layers, or keep the model yourself."
            )

    def _describe(self, checkpoint: Checkpoint | None) -> None:
        path, progress, line = self._start.name, self._progress, self._session.console.line
        if self._is_complete:
            line(
                f"the run in {path} is complete: {self.step} steps, whose weights the model has now. "
                "Run(..., resume='never') starts a new run."
            )
            return
        warn_of_best(self._config)
        where = f", at epoch {progress.epochs_done + 1}, batch {progress.batches_done + 1}"
        line(
            f"the run is kept in {path}"
            + (f"; it resumes from the checkpoint of step {self._start.step}{where}" if checkpoint else "")
        )
        self._session.write_start(self.model, launcher=read_world(os.environ).launcher)

    def _write_log(self, logs: Mapping[str, Any]) -> None:
        """Log means; raise DivergedError for a non-finite loss. Collective."""
        set_phase(Phase.LOG, self.step)
        means = self._log.take_means(self.step, logs)
        progress, steps = self._progress, self._steps_of_epoch
        progress.samples_seen += means.samples
        if not np.isfinite(means.values.get("loss", 0.0)):
            self._diverge(means.steps)
        self._require_finite()
        epoch = progress.epochs_done + (progress.batches_done / steps if steps else 0)
        self._log.write(means, self.step, epoch=epoch, samples_seen=progress.samples_seen)

    def _require_finite(self) -> None:
        """The loss may hide gradients, and moving statistics differ between ranks. Collective."""
        require_finite_values(self._variables, self._collective, step=self.step, though="", remedy=REMEDY)

    def _diverge(self, num_steps: int) -> None:
        """Name the ranks with the first non-finite gradients."""
        mine = self._votes.find_nonfinite()
        firsts, numbers = zip(*all_gather_object(self._collective, mine, name="fit/diverged"), strict=True)
        first = min((number for number in firsts if number), default=0)
        ranks = [rank for rank, number in enumerate(firsts) if number == first]
        who = name_ranks(ranks) if first else "the ranks"
        stands = run_on_rank0(self._collective, lambda: self._session.last_saved_step, name="fit/last")
        saved = f"The latest checkpoint is that of step {stands}." if stands else "Nothing is saved."
        within = f"within the {num_steps} steps up to step {self.step}"
        if first:  # a step may have several reductions, and a reduction several steps
            steps = first * (self.step - self._start.step) / max(numbers)
            within = f"in step {self._start.step + math.ceil(steps)}"
        raise DivergedError(f"the loss of {who} is not finite, {within}. {saved} {REMEDY}.")

    def _note_validation(self, logs: Mapping[str, Any]) -> bool:
        """Return True for the best so far. Collective."""
        means = self._log.read_validation(logs)
        if not means.values:
            return False
        metric = self._config.best_metric
        if metric not in means.values:
            raise UsageError(
                f"best_metric is {metric!r}, and the validation gives {', '.join(means.values)}. Name one of these."
            )
        epoch, samples = self._progress.epochs_done, means.samples
        self._session.log("eval", means.values, step=self.step, epoch=epoch, samples=samples)
        return self._progress.note_evaluation(self.step, means.values[metric], self._config.best_direction)


def read_logs(arrays: Arrays) -> dict[str, Any]:
    """Return the saved logs of an epoch, as Keras has them."""
    logs: dict[str, Any] = {}
    for name, value in arrays.items():
        if name.startswith("logs/"):
            logs[name.removeprefix("logs/")] = value if value.ndim else float(value)
    return logs
