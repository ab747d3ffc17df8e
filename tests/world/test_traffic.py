"""What travels between the ranks, counted by the system."""

from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from ringtrain.collectives import Collective, all_gather_object
from tests.world.group import Launch, on_ranks
from tests.world.training import NUM_CLASSES, create_step, make_batch, spec_of

# Through the loopback interface, whose bytes the system counts, instead of shared memory.
OVER_TCP = Launch(2, env={"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "tcp,self", "OMPI_MCA_btl_tcp_if_include": "lo"})
NUM_ROWS = 1_000_000
WIDTH = 16


def loopback_bytes() -> int:
    [line] = [line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:")]
    return int(line.split(":")[1].split()[0])


def embedding_of_a_million_rows() -> keras.Model:
    layers = keras.layers
    words = keras.Input((4,), dtype="int64")
    return keras.Model(words, layers.Dense(NUM_CLASSES)(layers.Flatten()(layers.Embedding(NUM_ROWS, WIDTH)(words))))


@on_ranks(OVER_TCP)
def test_an_embedding_sends_only_the_rows_that_it_touched(collective: Collective) -> None:
    generator = np.random.default_rng(collective.world.rank)
    batch = make_batch(generator.integers(0, NUM_ROWS, (8, 4)), generator.integers(0, 3, 8), step=0, global_count=16)
    step = create_step(
        collective, embedding_of_a_million_rows, lambda: keras.optimizers.SGD(0.1), spec_of(batch), precision="float32"
    )
    step.read(step(batch, 0.1))
    steps = 3
    all_gather_object(collective, None, name="before")
    before = loopback_bytes()
    for _ in range(steps):
        step.read(step(batch, 0.1))
    all_gather_object(collective, None, name="after")
    sent_per_step = (loopback_bytes() - before) / steps
    rows_bytes = 2 * 8 * 4 * (WIDTH * 4 + 8)  # both ranks' rows: values and indices
    dense_bytes = NUM_ROWS * WIDTH * 4
    assert rows_bytes < sent_per_step < dense_bytes / 500, f"{sent_per_step} bytes a step; dense: {dense_bytes}"


@on_ranks(OVER_TCP)
def test_the_count_sees_a_dense_tensor(collective: Collective) -> None:
    """Else the count above would show nothing."""
    tensor = tf.zeros([2**20])
    all_gather_object(collective, None, name="before")
    before = loopback_bytes()
    collective.all_reduce([tensor], name="dense")
    all_gather_object(collective, None, name="after")
    assert loopback_bytes() - before > 4 * 2**20
