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
from ringtrain.keras.auditing.step import NotAuditedError, audit_step
from ringtrain.keras.collective import is_elastic, require_init

DEFAULT_STEPS, DEFAULT_MEBIBYTES = 3, 1024
NOT_COMPARED = "graphs and XLA (the audited steps run eagerly), later steps, evaluation, saved models and speed"


class Auditor:
    """Audits the calls of a step after its first one, which shows the variables."""

    def __init__(self, steps: int, max_mebibytes: int) -> None:
        for name, value in (("steps", steps), ("max_mebibytes", max_mebibytes)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UsageError(f"{name} is {value!r}; it must be a whole number, at least 1.")
        self.steps, self._max_bytes = steps, max_mebibytes * 2**20
        self.results: list[Facts] = []
        self.why_not = ""
        self._known: dict[int, tuple[Any, Recording]] = {}  # by function or model, which is kept
        self._is_in_step = False

    @property
    def is_done(self) -> bool:
        return len(self.results) >= self.steps or bool(self.why_not)

    def forget(self, owner: Any) -> None:
        self._known.pop(id(owner), None)

    def call(self, owner: Any, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a step of the script, of a function or model. Collective if its first call reduced gradients."""
        _, known = self._known.get(id(owner), (None, None))
        if self._is_in_step or self.is_done or (known is not None and not known.variables):
            return step(*args, **kwargs)
        self._is_in_step = True
        try:
            with eagerly():
                if known is None:
                    with recording() as record:
                        returned = step(*args, **kwargs)
                    record.local.clear()
                    record.applied.clear()
                    self._known[id(owner)] = owner, record
                    return returned
                try:
                    returned, facts = audit_step(step, (args, kwargs), known, max_bytes=self._max_bytes)
                except NotAuditedError as error:
                    self.why_not = str(error)
                    return step(*args, **kwargs) if error.returned is None else error.returned[0]
                if facts:
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
            return [f"audit: nothing was compared: {self.why_not or 'no repeated step that updates weights was seen'}"]
        ranks = self.results[0]
        counts = ", ".join(str(its["count"]) for its in ranks)
        lines = [f"audit: {len(self.results)} steps of {len(ranks)} ranks, with batches of {counts} samples"]
        for of_kind in zip(*map(find_differences, self.results), strict=False):
            worst = max(of_kind, key=lambda each: each.value / each.tolerance)
            word = "equal within" if worst.passes else "DIFFERENT by"
            lines.append(f"  {worst.kind}: {word} {worst.value:.1e} (tolerance {worst.tolerance:.0e}), {worst.name}")
        lines += [f"  {'cause' if cause.is_wrong else 'note'}: {cause.words}" for cause in self.find_causes()]
        lines += [f"  note: {note}" for note in notes_of(ranks)]
        lines.append(f"  not compared: {NOT_COMPARED}")
        if len(self.results) < self.steps:
            lines.append(f"  ended before {self.steps} steps: {self.why_not or 'the script stopped training'}")
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
    would run them with the samples of all ranks. Gradients, updates and the state of layers are compared; the
    training continues as if it had not been audited. Rank 0 prints the verdict.

    Raises:
        ReplicasDifferError: they differ, after the last audited step.
    """

    def __init__(self, steps: int = DEFAULT_STEPS, *, max_mebibytes: int = DEFAULT_MEBIBYTES) -> None:
        """``max_mebibytes``: limit for the samples of all ranks, which each rank gathers and computes with."""
        super().__init__()
        self.auditor, self.raises = Auditor(steps, max_mebibytes), True
        self._settings: dict[str, Any] | None = None  # of the model before

    def on_train_begin(self, logs: Any = None) -> None:
        require_ranks("Audit")
        model, auditor = self.model, self.auditor
        if auditor.is_done:
            return
        if model.steps_per_execution > 1:
            raise UsageError(
                f"steps_per_execution is {model.steps_per_execution}; an audit needs single steps. Compile the model "
                "with steps_per_execution=1."
            )
        if self.params.get("steps") is None:  # a rank whose data end would not take part
            raise UsageError(
                "the steps of an epoch are unknown; an audit needs as many on every rank. Give fit() steps_per_epoch "
                "and data that repeat, or a data set of known length."
            )
        auditor.forget(model)
        plain = model.train_step
        self._settings = {
            "train_step": vars(model).get("train_step"),
            "run_eagerly": model.run_eagerly,
            "jit_compile": model.jit_compile,
        }
        model.train_step = lambda data: auditor.call(model, plain, data)
        model.run_eagerly, model.jit_compile = True, False
        model.make_train_function(force=True)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.auditor.is_done:
            self.on_train_end()

    def on_train_end(self, logs: Any = None) -> None:
        if self.restore() and self.raises:
            conclude(self.auditor)

    def restore(self) -> bool:
        """Give the model its own settings, also after an exception; False if it has them."""
        settings, self._settings = self._settings, None
        if settings is None:
            return False
        if (own := settings.pop("train_step")) is None:
            del self.model.train_step
        else:
            self.model.train_step = own
        for name, value in settings.items():
            setattr(self.model, name, value)
        self.model.test_function = self.model.predict_function = None  # made during the audit, they would run eagerly
        self.model.make_train_function(force=True)
        return True


@contextlib.contextmanager
def audit(steps: int = DEFAULT_STEPS, *, max_mebibytes: int = DEFAULT_MEBIBYTES) -> Iterator[None]:
    """Audit steps of a custom loop in this block, as ``callbacks.Audit`` does in ``fit``.

    A step is a call of a ``tf.function`` that updates weights once; its tensors are samples.

    Raises:
        ReplicasDifferError: the ranks do not train what one process would.
    """
    require_ranks("audit")
    mine = Auditor(steps, max_mebibytes)
    with watching_functions(mine):
        yield
    conclude(mine)


@contextlib.contextmanager
def watching_functions(auditor: Auditor, *, then: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Pass calls of functions through the audit; call ``then`` when it is done."""
    function_class = type(tf.function(lambda: None))

    def call(plain: Callable[..., Any], function: Any, *args: Any, **kwargs: Any) -> Any:
        if auditor.is_done or not tf.executing_eagerly():
            return plain(function, *args, **kwargs)
        returned = auditor.call(function, functools.partial(plain, function), *args, **kwargs)
        if auditor.is_done:
            then()
        return returned

    with replaced(function_class, "__call__", call):
        yield


def require_ranks(what: str) -> None:
    require_init(what)
    if hvd.size() == 1:
        raise UsageError(f"{what} compares ranks, and this is the only one. Start the script with two or more.")
    if is_elastic():
        raise UsageError(f"{what} does not support elastic runs. Start the script without --min-np.")


def conclude(mine: Auditor) -> None:
    """Print the verdict; raise if the ranks do not train as one process."""
    if hvd.rank() == 0:
        print("\n".join(["", *mine.describe()]), flush=True)  # a progress bar ends in no new line
    if mine.results and not mine.passes:
        causes = ", ".join(cause.name for cause in mine.find_causes() if cause.is_wrong)
        raise ReplicasDifferError(
            f"the ranks do not train what one process would train ({causes}); the audit above says more.", reach="run"
        )
