"""The audit of a script: ``hvd.callbacks.Audit`` in ``fit``, ``hvd.audit`` around another loop."""

from __future__ import annotations

import contextlib
import functools
import html
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from ringtrain.collectives import all_gather_object
from ringtrain.errors import ReplicasDifferError, UsageError
from ringtrain.keras.auditing.causes import COMPARED, Cause, Facts, find_causes, find_differences
from ringtrain.keras.auditing.recording import Recording, eagerly, recording, replaced
from ringtrain.keras.auditing.step import Batch, NotAuditedError, Trial, Values, agree, compare, read_values
from ringtrain.keras.auditing.tracing import trace_audited_step, why_not_traced
from ringtrain.keras.collective import ProcessSetCollective, is_elastic, require_init
from ringtrain.keras.exchange import Exchange
from ringtrain.messages.ranks import name_ranks

DEFAULT_STEPS, DEFAULT_MEBIBYTES = 3, 1024
NOT_COMPARED = (
    "values in graphs (one step is traced, and the audited ones run eagerly), XLA, later steps, "
    "evaluation, saved models and speed"
)
COLUMNS = ("name", "gradient", "gradient_rounding", "update", "factor", "is_reduced")


class Watched:
    """A step of a script, of a function or model: its calls until gradients are reduced."""

    def __init__(self, owner: Any, trace: Callable[..., Any] | None = None) -> None:
        """``trace``: builds the step's graph, with the arguments of a call; None if it has none."""
        self.owner = owner  # kept, for its id
        self.trace = trace
        self.is_traced = False
        self.known: Recording | None = None  # of the first calls, which show the variables
        self.first_samples = ""  # of the first calls, which are not finite, in words
        self.start()

    def start(self) -> None:
        self.record, self.batches = Recording(), list[Batch]()
        self.before: Values = {}


class Auditor:
    """Audits the calls of a step after the first ones."""

    def __init__(self, steps: int = DEFAULT_STEPS, max_mebibytes: int = DEFAULT_MEBIBYTES) -> None:
        for name, value in (("steps", steps), ("max_mebibytes", max_mebibytes)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UsageError(f"{name} is {value!r}; it must be a whole number, at least 1.")
        self.steps, self._max_bytes = steps, max_mebibytes * 2**20
        self.results: list[Facts] = []
        self.why_not = ""
        self.graph_causes: list[Cause] = []  # why the real run, in a graph, would fail
        self.notes: list[str] = []  # about the script, not about its steps
        self.then: Callable[[], None] = lambda: None  # when it is done
        self._watched: dict[int, Watched] = {}
        self._is_in_step = False

    @property
    def is_done(self) -> bool:
        return len(self.results) >= self.steps or bool(self.why_not)

    def watch(self, owner: Any, trace: Callable[..., Any] | None) -> None:
        """Expect steps of a function or model; ``trace``: as in ``Watched``."""
        self._watched.setdefault(id(owner), Watched(owner, trace))

    def forget(self, owner: Any) -> None:
        self._watched.pop(id(owner), None)

    def call(self, owner: Any, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a step of the script, of a function or model. Collective if its first calls reduced gradients."""
        watched = self._watched.setdefault(id(owner), Watched(owner))
        known = watched.known
        is_local = known is not None and not (known.exchanges or known.reduces)
        if self._is_in_step or self.is_done or is_local:
            return step(*args, **kwargs)
        self._is_in_step = True
        is_graph = watched.trace is not None and not tf.config.functions_run_eagerly()
        try:
            num_before = len(self.results)
            with eagerly():
                returned = self._call(watched, step, (args, kwargs))
            if is_graph and len(self.results) > num_before and not watched.is_traced:
                self._trace(watched, args, kwargs)
            return returned
        finally:
            self._is_in_step = False

    def _trace(self, watched: Watched, args: Any, kwargs: Any) -> None:
        """Trace an audited step as a graph, which the real run would run. Collective."""
        watched.is_traced = True
        assert watched.trace is not None
        with mock.patch.object(Exchange, "_fit", None):  # this graph is not the one that fit runs
            error = why_not_traced(watched.trace, args, kwargs)
        errors = all_gather_object(ProcessSetCollective(), error, name="audit/graph")
        failed = [rank for rank, reason in enumerate(errors) if reason]
        if failed:
            cause = Cause(
                "fails in a graph",
                f"The step runs eagerly, but a run without the audit traces it as a graph, which fails on "
                f"{name_ranks(failed)}: {errors[failed[0]]}",
            )
            self.graph_causes.append(cause)

    def _call(self, watched: Watched, step: Callable[..., Any], arguments: Any) -> Any:
        args, kwargs = arguments
        known, batch = watched.known, Batch(arguments)
        try:
            if known:
                agree(ProcessSetCollective(), known, batch, self._max_bytes)
                watched.before = watched.before or read_values(known.all_variables())
        except NotAuditedError as error:
            self.why_not = str(error)
            self.then()  # before the step, which may wait for a rank that has left
            return step(*args, **kwargs)
        with recording(watched.record):
            returned = step(*args, **kwargs)
        watched.batches.append(batch)
        if watched.record.is_between_passes:
            return returned
        if known:
            real = Trial(watched.record, watched.before, read_values(known.all_variables()), returned)
            try:
                facts = compare(ProcessSetCollective(), step, watched.batches, known, real, watched.first_samples)
                self.results += [facts] if facts else []
            except NotAuditedError as error:
                self.why_not = str(error)
        else:
            watched.known = watched.record
            watched.known.forget_gradients()
            nonfinite = [each.why_not_finite() for each in watched.batches]
            watched.first_samples = next(filter(None, nonfinite), "")
        watched.start()
        return returned

    def end(self) -> None:
        """End the audit before its last step. Collective, also with the steps of ranks that continue."""
        if not self.is_done and hvd.is_initialized():
            with contextlib.suppress(NotAuditedError):
                why_not = f"the script stopped training on rank {hvd.rank()}"
                agree(ProcessSetCollective(), Recording(), Batch(()), self._max_bytes, why_not)

    def find_causes(self) -> list[Cause]:
        """Return each cause once, of the step that shows it first."""
        found = {cause.name: cause for facts in reversed(self.results) for cause in find_causes(facts)}
        return [*found.values(), *self.graph_causes]

    @property
    def passes(self) -> bool:
        differences = [each for facts in self.results for each in find_differences(facts)]
        return all(each.passes for each in differences) and not any(cause.is_wrong for cause in self.find_causes())

    def describe(self) -> list[str]:
        if not self.results:
            return [f"audit: nothing was compared: {self.why_not or 'no repeated step that updates weights was seen'}"]
        ranks = self.results[0]
        counts = ", ".join(str(its["count"]) for its in ranks)
        lines = [f"audit: {len(self.results)} steps of {len(ranks)} ranks, with batches of {counts} samples"]
        found = [each for facts in self.results for each in find_differences(facts)]
        for kind in COMPARED.values():
            of_kind = [each for each in found if each.kind == kind]
            if not of_kind:
                continue
            worst = max(of_kind, key=lambda each: each.value / each.tolerance)
            word = "equal within" if worst.passes else "DIFFERENT by"
            lines.append(f"  {worst.kind}: {word} {worst.value:.1e} (tolerance {worst.tolerance:.0e}), {worst.name}")
        lines += [f"  {'cause' if cause.is_wrong else 'note'}: {cause.words}" for cause in self.find_causes()]
        lines += [f"  note: {note}" for note in self.notes]
        if drawing := ranks[0]["drawing"]:
            lines.append(f"  note: dropout and noise ({', '.join(drawing)}) are off: their draws differ by rank")
        lines.append(f"  not compared: {NOT_COMPARED}")
        if len(self.results) < self.steps:
            lines.append(f"  ended before {self.steps} steps: {self.why_not or 'the script stopped training'}")
        verdict = "the ranks train" if self.passes else "the ranks do NOT train"
        return [*lines, f"{verdict} what one process would train on their samples together"]

    def to_json(self) -> dict[str, Any]:
        differences = [find_differences(facts) for facts in self.results]
        return {
            "passes": self.passes,
            "steps": len(self.results),
            "why_not": self.why_not,
            "notes": self.notes,
            "causes": [cause._asdict() for cause in self.find_causes()],
            "differences": [[{**each._asdict(), "passes": each.passes} for each in row] for row in differences],
            "variables": [worst_rows(facts) for facts in self.results],
        }

    def to_page(self) -> str:
        """Return HTML of the verdict and of the variables in the first step, the most different first."""
        rows = sorted(worst_rows(self.results[0]), key=lambda row: -row["gradient"])
        shown = [
            [f"{row[name]:.2g}" if isinstance(row[name], float) else row[name] for name in COLUMNS] for row in rows
        ]
        table = [[name.replace("_", " ") for name in COLUMNS], *shown]
        cells = ["".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) for row in table]
        return (
            '<!doctype html><html lang="en"><meta charset="utf-8"><title>Audit</title>'
            "<style>body {font-family: sans-serif; margin: 2em} pre {white-space: pre-wrap} td {padding: 0.2em 1em}"
            f"</style><pre>{html.escape(chr(10).join(self.describe()))}</pre>"
            "<p>First audited step, on the rank that differs most: differences by Euclidean length, relative to one "
            "process with the samples of all ranks; rounding: by the reverse order of the samples; factor: ratio to "
            "one process.</p>"
            f"<table><tr>{'</tr><tr>'.join(cells)}</tr></table></html>"
        )

    def show(self) -> None:
        print("\n".join(["", *self.describe()]), flush=True)  # a progress bar ends in no new line


def worst_rows(facts: Facts) -> list[dict[str, Any]]:
    """Return for each variable the facts of the rank whose gradient differs most."""
    of_variables = zip(*(its["variables"] for its in facts), strict=True)
    return [max(of_ranks, key=lambda row: row["gradient"]) for of_ranks in of_variables]


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
        self.auditor = Auditor(steps, max_mebibytes)
        self.then: Callable[[], None] = lambda: conclude(self.auditor)
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
        if not model.run_eagerly:
            auditor.watch(model, functools.partial(trace_audited_step, plain))
        names = ("run_eagerly", "jit_compile")
        self._settings = {"train_step": vars(model).get("train_step")} | {name: getattr(model, name) for name in names}
        model.train_step = lambda data: auditor.call(model, plain, data)
        model.run_eagerly, model.jit_compile = True, False
        model.make_train_function(force=True)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.auditor.is_done:
            self.on_train_end()

    def on_train_end(self, logs: Any = None) -> None:
        if self.restore():
            self.then()

    def restore(self) -> bool:
        """Give the model its own settings, also after an exception; False if it has them."""
        settings, self._settings = self._settings, None
        if settings is None:
            return False
        del self.model.train_step
        for name, value in settings.items():
            if value is not None:
                setattr(self.model, name, value)
        self.model.test_function = self.model.predict_function = None  # made during the audit, they would run eagerly
        self.model.make_train_function(force=True)
        return True


@contextlib.contextmanager
def audit(steps: int = DEFAULT_STEPS, *, max_mebibytes: int = DEFAULT_MEBIBYTES) -> Iterator[None]:
    """Audit the steps of a script in this block: custom loops as ``callbacks.Audit`` does ``fit``, and ``fit``.

    A step of a custom loop is a call of a ``tf.function`` that updates weights once; its tensors are samples.

    Raises:
        ReplicasDifferError: the ranks do not train what one process would.
    """
    require_ranks("audit")
    mine = Auditor(steps, max_mebibytes)
    with watching(mine):
        yield
    conclude(mine)


@contextlib.contextmanager
def watching(auditor: Auditor) -> Iterator[None]:
    """Pass all steps through the audit."""

    def call(plain: Callable[..., Any], function: Any, *args: Any, **kwargs: Any) -> Any:
        if auditor.is_done or not tf.executing_eagerly():
            return plain(function, *args, **kwargs)
        auditor.watch(function, function.get_concrete_function)
        returned = auditor.call(function, functools.partial(plain, function), *args, **kwargs)
        if auditor.is_done:
            auditor.then()
        return returned

    def create(plain: Callable[..., Any], callback_list: Any, callbacks: Any = None, *args: Any, **kwargs: Any) -> None:
        mine = Audit()
        mine.auditor, mine.then = auditor, lambda: auditor.then() if auditor.is_done else None
        added.append(mine)
        others = [each for each in keras.tree.flatten(callbacks or []) if not isinstance(each, Audit)]
        plain(callback_list, [*others, mine], *args, **kwargs)

    added: list[Audit] = []
    function_class = type(tf.function(lambda: None))
    with replaced(function_class, "__call__", call), replaced(keras.callbacks.CallbackList, "__init__", create):
        try:
            yield
        finally:
            for callback in added:
                callback.restore()
    auditor.end()


def require_ranks(what: str) -> None:
    require_init(what)
    if hvd.size() == 1:
        raise UsageError(f"{what} compares ranks, and this is the only one. Start the script with two or more.")
    if is_elastic():
        raise UsageError(f"{what} does not support elastic runs. Start the script without --min-np.")


def conclude(auditor: Auditor) -> None:
    """Print the verdict; raise if the ranks do not train as one process."""
    if hvd.rank() == 0:
        auditor.show()
    if auditor.results and not auditor.passes:
        causes = [cause for cause in auditor.find_causes() if cause.is_wrong]
        names = ", ".join(cause.name for cause in causes)
        raise ReplicasDifferError(
            f"the ranks do not train what one process would train ({names}). {causes[0].words}", reach="run"
        )
