"""What the training scripts of the peers share: arguments, pinning, batches, a step, timing, the file of results."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import peer_models


def parse_arguments(description: str | None, words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", choices=peer_models.MODELS, required=True)
    parser.add_argument("--size", type=int, required=True, help="processes that share a global batch")
    parser.add_argument("--rank", type=int, default=0, help="which of them this one is, where no launcher says so")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--log_every", type=int, required=True)
    parser.add_argument("--order", type=Path, required=True, help="file of the samples of each step [steps, samples]")
    parser.add_argument("--output", type=Path, required=True, help="directory for the results")
    parser.add_argument("--cores", action="append", default=[], help="a rank's cores, such as 0,1; once for each rank")
    parser.add_argument("--intra_op_threads", type=int, default=0, help="0: TensorFlow's own number")
    parser.add_argument("--inter_op_threads", type=int, default=0, help="0: TensorFlow's own number")
    parser.add_argument("--steps_per_call", type=int, default=1, help="steps of one call; divides --log_every")
    parser.add_argument("--meets", action="store_true", help="wait for all processes before each step")
    parser.add_argument("--fused", action="store_true", help="an update by one operation for each variable")
    return parser.parse_args(words)


def pin(arguments: argparse.Namespace, rank: int) -> None:
    """Call before TensorFlow is imported."""
    if arguments.cores:
        os.sched_setaffinity(0, {int(core) for core in arguments.cores[rank].split(",")})


def set_threads(arguments: argparse.Namespace) -> None:
    """Call before TensorFlow computes anything."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(arguments.intra_op_threads)
    tf.config.threading.set_inter_op_parallelism_threads(arguments.inter_op_threads)


def make_batches(arguments: argparse.Namespace, rank: int, *, num_parts: int | None = None) -> Any:
    """Return a tf.data.Dataset of (x, y): this rank's part of each global batch."""
    import tensorflow as tf

    order = np.load(arguments.order, allow_pickle=False)
    local_size = order.shape[1] // (num_parts or arguments.size)
    with tf.device("CPU"):
        x, y = (tf.constant(values) for values in peer_models.make_samples(peer_models.MODELS[arguments.model]))
    numbers = tf.data.Dataset.from_tensor_slices(order[:, rank * local_size : (rank + 1) * local_size])
    return numbers.map(lambda n: (tf.gather(x, n), tf.gather(y, n))).prefetch(2)


def meeting(batches: Any, arguments: argparse.Namespace) -> Iterator[Any]:
    """Yield the batches, each once all processes have come to it: a barrier in shared memory."""
    file = arguments.output / "steps"
    file.touch()
    if os.path.getsize(file) == 0:  # all write the same zeros
        os.truncate(file, 8 * arguments.size)
    steps = np.memmap(file, np.int64, "r+", shape=(arguments.size,))
    for step, batch in enumerate(batches, start=1):
        steps[arguments.rank] = step
        while steps.min() < step:
            os.sched_yield()
        yield batch


def create_step(name: str, *, fused: bool = False) -> tuple[Any, Callable[[Any, Any], Any]]:
    """Return a model, and its compiled step (x, y) -> loss, without communication.

    ``fused``: update by TensorFlow's operation, which passes over memory once, not Keras'.
    """
    import tensorflow as tf

    spec = peer_models.MODELS[name]
    model = spec.create()
    variables = [variable.value for variable in model.trainable_variables]
    update = create_fused_update(spec, variables) if fused else create_update(spec, model)

    @tf.function(jit_compile=False)
    def train_step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))
        update(tape.gradient(loss, variables))
        return loss

    return model, train_step


def create_update(spec: peer_models.Model, model: Any) -> Callable[[Any], None]:
    """Return Keras' update."""
    import tensorflow as tf

    optimizer = peer_models.create_optimizer(spec)
    optimizer.build(model.trainable_variables)
    # Dense: Keras' Adam squares a sparse gradient row by row, wrongly if a row is repeated.
    return lambda gradients: optimizer.apply([tf.convert_to_tensor(g) for g in gradients], model.trainable_variables)


def create_fused_update(spec: peer_models.Model, variables: Sequence[Any]) -> Callable[[Any], None]:
    """Use one operation per variable."""
    import tensorflow as tf

    step = tf.Variable(0.0)
    slots = [[tf.Variable(tf.zeros_like(v)) for _ in range(2)] for v in variables] if spec.optimizer == "Adam" else []
    rate, beta_1, beta_2 = spec.learning_rate, 0.9, 0.999

    def update(gradients: Any) -> None:
        dense = [tf.convert_to_tensor(gradient) for gradient in gradients]
        if spec.optimizer == "SGD":
            for v, gradient in zip(variables, dense, strict=True):
                tf.raw_ops.ResourceApplyGradientDescent(var=v.handle, alpha=rate, delta=gradient)
            return
        step.assign_add(1.0)
        powers = {"beta1_power": beta_1**step, "beta2_power": beta_2**step}
        for v, (m, n), gradient in zip(variables, slots, dense, strict=True):
            tf.raw_ops.ResourceApplyAdam(
                var=v.handle, m=m.handle, v=n.handle, lr=rate, beta1=beta_1, beta2=beta_2, epsilon=1e-7, grad=gradient,
                **powers,
            )  # fmt: skip

    return update


def time_steps(
    train_step: Callable[[Any, Any], Any], batches: Any, arguments: argparse.Namespace, *, is_rank0: bool
) -> tuple[list[float], Any]:
    """Return mean seconds per step of each ``log_every`` steps, and the last step's result."""
    sec_per_step = []
    loss = None
    start = time.perf_counter()
    for step, loss in train_calls(train_step, batches, arguments.steps_per_call):
        if step % arguments.log_every == 0:
            value = float(loss)
            now = time.perf_counter()
            sec_per_step.append((now - start) / arguments.log_every)
            start = now
            if is_rank0:
                print(f"step {step}, loss = {value:.4g} ({sec_per_step[-1]:.3f} sec/batch)", flush=True)
    return sec_per_step, loss


def train_calls(train_step: Callable[[Any, Any], Any], batches: Any, steps_per_call: int) -> Iterator[tuple[int, Any]]:
    """Yield the number of steps and the loss after each call."""
    import tensorflow as tf

    if steps_per_call == 1:
        for step, (x, y) in enumerate(batches, start=1):
            yield step, train_step(x, y)
        return

    @tf.function(jit_compile=False)
    def train(iterator: Any) -> Any:
        def train_one(number: Any, loss: Any) -> tuple[Any, Any]:
            return number + 1, train_step(*next(iterator))

        loop = tf.while_loop(lambda number, _: number < steps_per_call, train_one, (0, 0.0), parallel_iterations=1)
        return loop[1]

    iterator = iter(batches)
    for step in range(steps_per_call, len(batches) + 1, steps_per_call):
        yield step, train(iterator)


def make_timer(arguments: argparse.Namespace, callback: type, *, is_rank0: bool) -> Any:
    """Return a callback with seconds per step of each ``log_every`` steps, and the last batch's loss.

    ``callback``: base class, Keras 3's or Keras 2's.
    """

    class Timer(callback):
        def on_train_begin(self, logs: Any = None) -> None:
            self.sec_per_step: list[float] = []
            self.start = time.perf_counter()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            step = min(batch + 1, arguments.steps)  # Keras counts a last call of few steps as if it had all
            if step == arguments.steps:
                self.last_loss = float(logs["loss"])
            if step % arguments.log_every == 0:
                value = float(logs["loss"])  # waits for the step
                now = time.perf_counter()
                self.sec_per_step.append((now - self.start) / arguments.log_every)
                self.start = now
                if is_rank0:
                    print(f"step {step}, loss = {value:.4g} ({self.sec_per_step[-1]:.3f} sec/batch)", flush=True)
            if step == arguments.steps - 1:  # only the last step's loss
                self.model.reset_metrics()

    return Timer()


def write_results(
    arguments: argparse.Namespace, sec_per_step: list[float], loss: float, model: Any, *, name: str = "result"
) -> None:
    write_weights(arguments, model, name=name)
    values = {"sec_per_step": sec_per_step, "loss": loss}
    (arguments.output / f"{name}.json").write_text(json.dumps(values))


def write_weights(arguments: argparse.Namespace, model: Any, *, name: str) -> None:
    """In the model's order."""
    arguments.output.mkdir(parents=True, exist_ok=True)
    np.savez(arguments.output / f"{name}.npz", *[np.asarray(variable) for variable in model.trainable_variables])
