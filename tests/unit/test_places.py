"""Where a pipeline was: which places are kept, and what is never asked for its state."""

import math
from collections.abc import Iterator

import tensorflow as tf

from ringtrain.data import tf_data
from ringtrain.data.sources import Feed
from ringtrain.data.tf_data import EVERY_STEPS, NO_STATE, IteratorState, IteratorStates, buffered_bytes

LONG_PASS = 10 * EVERY_STEPS


def places_of(
    states: Iterator[bytes],
    steps_per_pass: int = LONG_PASS,
    *,
    begin: IteratorState = NO_STATE,
    rank: int = 1,
    is_shared: bool = False,
) -> IteratorStates:
    feed = Feed(lambda of, skip: iter(()), None, read_state=lambda: next(states), is_shared=is_shared)
    return IteratorStates(feed, steps_per_pass, begin, rank=rank, size=2)


def test_only_the_newest_states_before_a_step_are_kept() -> None:
    places = places_of(bytes([number]) for number in range(1, 9))
    for step in range(4 * EVERY_STEPS + 1):
        places.note(step)
    assert places.before(4 * EVERY_STEPS - 1) == (3 * EVERY_STEPS, b"\x04")
    assert places.before(4 * EVERY_STEPS) == (4 * EVERY_STEPS, b"\x05")
    assert places.before((5 - tf_data.NUM_KEPT) * EVERY_STEPS - 1) == NO_STATE


def test_a_pass_has_a_state_at_its_start() -> None:
    places = places_of(iter([b"a", b"b"]), steps_per_pass=3)
    for step in range(4):
        places.note(step)
    assert places.before(5) == (3, b"b")


def test_the_first_pass_has_no_state_near_its_end() -> None:
    """There a shuffle may have read everything; its state then lacks the seeds of the next passes."""
    places = places_of((bytes([number]) for number in range(1, 9)), steps_per_pass=EVERY_STEPS + 1)
    for step in range(3 * EVERY_STEPS):
        places.note(step)
        if step == EVERY_STEPS:
            assert places.before(step) == (0, b"\x01")
    assert places.before(2 * EVERY_STEPS) == (2 * EVERY_STEPS, b"\x03")


def test_a_state_that_is_too_long_is_dropped_and_not_retried() -> None:
    places = places_of(iter([b"short", bytes(tf_data.MAX_STATE_BYTES // 2 + 1)]))
    for step in range(3 * EVERY_STEPS):
        places.note(step)
    assert places.before(3 * EVERY_STEPS) == NO_STATE


def test_only_rank_0_keeps_the_states_of_a_shared_pipeline() -> None:
    for rank, expected in ((0, (0, bytes(tf_data.MAX_STATE_BYTES))), (1, NO_STATE)):
        begin = (0, b"of the checkpoint") if rank else NO_STATE
        places = places_of(iter([bytes(tf_data.MAX_STATE_BYTES)]), begin=begin, rank=rank, is_shared=True)
        places.note(0)
        assert places.are_kept, "alike on all ranks, which say theirs at one place"
        assert places.before(1) == expected


def test_a_known_state_is_kept_until_the_next_one() -> None:
    places = places_of(iter([b"", b"later"]), begin=(7, b"known"))
    places.note(EVERY_STEPS)
    assert places.before(EVERY_STEPS) == (7, b"known")
    places.note(2 * EVERY_STEPS)
    assert places.before(2 * EVERY_STEPS) == (2 * EVERY_STEPS, b"later")


def test_the_buffered_bytes_of_a_pipeline_are_known_in_advance() -> None:
    samples = tf.data.Dataset.from_tensor_slices((tf.zeros([50, 4]), tf.zeros([50], tf.int64)))
    assert buffered_bytes(samples) == 0
    assert buffered_bytes(samples.shuffle(10)) == 10 * (4 * 4 + 8)
    assert buffered_bytes(tf.data.Dataset.zip((samples.shuffle(3), samples))) == 3 * 24
    texts = tf.data.Dataset.from_tensor_slices(["one", "three"])
    assert buffered_bytes(texts) == 0
    assert buffered_bytes(texts.shuffle(3)) == len("onethree"), "the names of files, all in memory"
    assert buffered_bytes(texts.map(lambda text: text).shuffle(3)) == math.inf, "nobody knows how long they are"
    assert buffered_bytes(tf.data.TFRecordDataset(["file"], buffer_size=100)) == 0, "which are read ahead, not kept"
    assert buffered_bytes(samples.batch(5).prefetch(2)) == 2 * 5 * 24
    some = samples.filter(lambda x, y: y >= 0)
    assert buffered_bytes(some.shuffle(some.cardinality())) == math.inf, "all there are, and nobody knows how many"
    vectors = samples.map(lambda x, y: tf.boolean_mask(x, x >= 0))
    assert buffered_bytes(vectors.shuffle(2)) == math.inf, "nobody knows how long one is"
    assert buffered_bytes(vectors.padded_batch(2).prefetch(tf.data.AUTOTUNE)) == 0, "a few, and their state says it"
    assert buffered_bytes(tf.data.Dataset.range(3).interleave(tf.data.Dataset.range)) == 0
    mixed = tf.data.Dataset.range(3).interleave(lambda n: tf.data.Dataset.range(n).shuffle(100))
    assert buffered_bytes(mixed) == math.inf, "of each file"
    assert buffered_bytes(samples.map(lambda x, y: (x > 0, y)).shuffle(3)) == 3 * (4 + 8)
    ragged = tf.data.Dataset.from_tensor_slices((tf.ragged.constant([[1.0], [2.0, 3.0]]), [1, 2]))
    assert buffered_bytes(ragged.shuffle(2)) == math.inf
    assert buffered_bytes(samples.cache()) == math.inf, "its state would hold all of them"
    assert buffered_bytes(samples.cache("a file")) == 0
    assert buffered_bytes(tf.data.Dataset.from_tensors("text").shuffle(2)) == 4


def test_the_elements_read_ahead_of_a_pipeline_are_counted() -> None:
    options = tf.data.Options()
    options.autotune.enabled = False
    samples = tf.data.Dataset.range(9).shuffle(5).map(lambda x: x, num_parallel_calls=2).prefetch(3)
    assert tf_data.count_ahead(samples.with_options(options)) == 5
    assert tf_data.count_ahead(samples) == 5 + tf_data.MOST_READ_AHEAD
    assert tf_data.count_ahead(samples.prefetch(-1).with_options(options)) == 5 + tf_data.MOST_READ_AHEAD
