"""The audit of a script: ``hvd.callbacks.Audit`` in ``fit``, ``hvd.audit`` around another loop."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from ringtrain.errors import ReplicasDifferError, UsageError
from ringtrain.keras.auditing.causes import Cause, Facts, find_causes, find_differences, notes_of
from ringtrain.keras.auditing.recording import Recording, eagerly, recording, replaced
from ringtrain.keras.auditing.step import NotAuditedError, audit_step, why_not_audited
from ringtrain.keras.collective import is_elastic, require_init

DEFAULT_STEPS, DEFAULT_MEBIBYTES = 3, 1024
NOT_COMPARED = "graphs and XLA (the audited steps run eagerly), later steps, evaluation, saved models and speed"


class Auditor:
    """Audits the steps after the first, which shows the variables."""

    def __init__(self, steps: int, max_bytes: int) -> None:
        for name, value in (("steps", steps), ("max_mebibytes", max_bytes)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UsageError(f"{name} is {value!r}; it must be a whole number, at least 1.")
        self.steps, self.max_bytes = steps, max_bytes
        self.conclude: Callable[[], None] = functools.partial(conclude, self)
        self.results: list[Facts] = []
        self.why_not = ""
        self._known: Recording | None = None
        self._is_in_step = False

    @property
    def is_done(self) -> bool:
        return len(self.results) >= self.steps or bool(self.why_not)

    def call(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a step of the script. Collective."""
        if self._is_in_step or self.is_done:
            return step(*args, **kwargs)
        self._is_in_step = True
        try:
            with eagerly():
                if self._known is None:
                    with recording() as record:
                        returned = step(*args, **kwargs)
                    self._known, self.why_not = (record if record.variables else None), why_not_audited(record)
                    return returned
                try:
                    returned, facts = audit_step(step, (args, kwargs), self._known, max_bytes=self.max_bytes)
                except NotAuditedError as error:  # it has not run
                    self.why_not = str(error)
                    return step(*args, **kwargs)
                self.results.append(facts)
                return returned
        finally:
            self._is_in_step = False

    def find_causes(self) -> list[Cause]:
        """Return each cause once, of the step that shows it first."""
        found = {cause.name: cause for facts in reversed(self.results) for cause in find_causes(facts)}
        return list(found.values())

    @property
    def passes(self) -> bool:
        differences = [each for facts in self.results for each in find_differences(facts)]
        return all(each.passes for each in differences) and not any(cause.is_wrong for cause in self.find_causes())

    def describe(self) -> list[str]:
        """Return the lines of the verdict."""
        if not self.results:
            return [f"audit: nothing was compared: {self.why_not or 'no step that updates weights was seen'}"]
        ranks = self.results[0]
        counts = ", ".join(str(its["count"]) for its in ranks)
        lines = [f"audit: {len(self.results)} steps of {len(ranks)} ranks, with {counts} samples on each rank"]
        kinds = [find_differences(facts) for facts in self.results]
        for of_kind in zip(*kinds, strict=False):
            worst = max(of_kind, key=lambda each: each.value / each.tolerance)
            word = "equal within" if worst.passes else "DIFFERENT by"
            lines.append(f"  {worst.kind}: {word} {worst.value:.1e} (tolerance {worst.tolerance:.0e}), {worst.where}")
        lines += [f"  {'cause' if cause.is_wrong else 'note'}: {cause.words}" for cause in self.find_causes()]
        lines += [f"  {note}" for note in notes_of(ranks)]
        lines.append(f"  not compared: {NOT_COMPARED}")
        if len(self.results) < self.steps:
            lines.append(f"  ended before {self.steps} steps: {self.why_not or 'the script trains no more'}")
        verdict = "the ranks train" if self.passes else "the ranks do NOT train"
        return [*lines, f"{verdict} what one process would train on their samples together"]

    def to_json(self) -> dict[str, Any]:
        return {
            "passes": self.passes,
            "steps": len(self.results),
            "why_not": self.why_not,
            "causes": [cause._asdict() for cause in self.find_causes()],
            "differences": [
                [{**each._asdict(), "passes": each.passes} for each in find_differences(facts)]
                for facts in self.results
            ],
            "variables": [facts[0]["variables"] for facts in self.results],
        }


class Audit(keras.callbacks.Callback):
    """Audit steps of ``fit``: does each train what one process would train on the samples of all ranks?

    After the first step, ``steps`` steps run eagerly, and several times: unchanged, and on every rank as one process
    would run them with the samples of all ranks. Gradients, updates, the state of layers and losses are compared; the
    training continues as if it had not been audited. Rank 0 prints the verdict.

    Raises:
        ReplicasDifferError: they differ, after the last audited step.
    """

    def __init__(self, steps: int = DEFAULT_STEPS, *, max_mebibytes: int = DEFAULT_MEBIBYTES) -> None:
        """``max_mebibytes``: limit for the samples of all ranks, which each rank gathers."""
        super().__init__()
        self.audit = Auditor(steps, max_mebibytes * 2**20)
        self._before: tuple[bool, bool] | None = None  # settings of the model, which runs eagerly

    @classmethod
    def of(cls, audit: Auditor) -> Audit:
        callback = cls()
        callback.audit = audit
        return callback

    def on_train_begin(self, logs: Any = None) -> None:
        require_ranks("Audit")
        if self.audit.is_done:
            return
        model, audit = self.model, self.audit
        if model.steps_per_execution > 1:
            raise UsageError(
                f"steps_per_execution is {model.steps_per_execution}; an audit needs single steps. Compile the model "
                "with steps_per_execution=1."
            )
        plain, self._before = model.train_step, (model.run_eagerly, model.jit_compile)
        model.train_step = lambda data: audit.call(plain, data)
        model.run_eagerly, model.jit_compile = True, False
        model.make_train_function(force=True)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.audit.is_done:
            self._end()

    def on_train_end(self, logs: Any = None) -> None:
        self._end()

    def _end(self) -> None:
        if self._before is None:
            return
        del self.model.train_step
        (self.model.run_eagerly, self.model.jit_compile), self._before = self._before, None
        self.model.make_train_function(force=True)
        self.audit.conclude()


@contextlib.contextmanager
def audit(steps: int = DEFAULT_STEPS, *, max_mebibytes: int = DEFAULT_MEBIBYTES) -> Iterator[None]:
    """Audit steps of a loop in this block, as ``callbacks.Audit`` does in ``fit``.

    A step is a call of a ``tf.function`` that updates weights once; its tensors are samples.
    """
    require_ranks("audit")
    mine = Auditor(steps, max_mebibytes * 2**20)
    with watching_functions(mine):
        yield
    mine.conclude()


@contextlib.contextmanager
def watching_functions(mine: Auditor, *, ends_early: bool = False) -> Iterator[None]:
    """Pass calls of functions that train through the audit. ``ends_early``: conclude after the last audited step."""
    function_class = type(tf.function(lambda: None))

    def call(plain: Callable[..., Any], function: Any, *args: Any, **kwargs: Any) -> Any:
        if not tf.executing_eagerly():
            return plain(function, *args, **kwargs)
        returned = mine.call(lambda *a, **k: plain(function, *a, **k), *args, **kwargs)
        if mine.is_done and ends_early:
            mine.conclude()
        return returned

    with replaced(function_class, "__call__", call):
        yield


def require_ranks(what: str) -> None:
    require_init(what)
    if hvd.size() == 1:
        raise UsageError(f"{what} compares ranks, and this is the only one. Start the script with two or more.")
    if is_elastic():
        raise UsageError(f"{what} needs ranks that remain, and this run is elastic. Start it without --min-np.")


def conclude(mine: Auditor) -> None:
    """Print the verdict; raise if the ranks do not train as one process."""
    if hvd.rank() == 0:
        print("\n".join(["", *mine.describe()]), flush=True)  # a progress bar ends in no new line
    if mine.results and not mine.passes:
        causes = ", ".join(cause.name for cause in mine.find_causes() if cause.is_wrong)
        raise ReplicasDifferError(
            f"the ranks do not train what one process would train ({causes}); the audit above says more.", reach="run"
        )
