"""What other files of this directory hold under two ranks over MPI, over Gloo and under three ranks."""

import functools

import keras
import pytest
import tensorflow as tf

import ringtrain.keras as hvd
from ringtrain.collectives import Collective
from ringtrain.errors import UsageError
from tests.keras import test_arguments, test_callbacks, test_guards, test_normalization, test_optimizers
from tests.world.group import GLOO, Launch, on_ranks

THREE = Launch(3, env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})


@pytest.mark.slow
@on_ranks(GLOO, timeout=120)
def test_two_ranks_equal_one_over_gloo(collective: Collective) -> None:
    test_arguments.test_gradients_are_reduced.body(collective, "nothing")
    adam = functools.partial(test_optimizers.make_optimizer, "Adam")
    test_optimizers.check_ways(collective, adam, ("fit", "eager fit"))
    test_normalization.check_ways(collective, ("fit",))


@pytest.mark.slow
@on_ranks(GLOO, timeout=120)
def test_metrics_are_means_over_all_samples_over_gloo(collective: Collective) -> None:
    test_callbacks.test_metrics_are_means_over_all_samples.body(collective)


@on_ranks(GLOO, timeout=120)
def test_no_rank_waits_for_ever_over_gloo(collective: Collective) -> None:
    test_guards.test_different_numbers_of_batches_are_named_before_training.body(collective)
    test_guards.test_unequal_unknown_batch_counts_are_named_after_the_epoch.body(collective)
    test_guards.test_an_overflow_on_one_rank_is_skipped_by_all.body(collective)


@on_ranks(GLOO, timeout=120)
def test_adasum_is_refused_over_gloo(collective: Collective) -> None:
    with pytest.raises(UsageError, match=r"over MPI; this run has 2 ranks over Gloo. Use op=hvd.Average"):
        hvd.DistributedOptimizer(keras.optimizers.SGD(), op=hvd.Adasum)


@on_ranks(THREE, timeout=120)
def test_a_process_set_trains_by_itself(collective: Collective) -> None:
    pair = hvd.add_process_set([0, 2])
    variable = keras.Variable(0.0)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), process_set=pair)
    optimizer.apply_gradients([(tf.constant(collective.world.rank + 1.0), variable)])
    assert -variable.numpy() == (2.0 if pair.included() else collective.world.rank + 1.0)  # the mean of 1 and 3


@on_ranks(THREE, timeout=120)
def test_the_training_step_is_exact_under_three_ranks(collective: Collective) -> None:
    test_normalization.test_the_training_step_is_exact_with_ranks_without_samples.body(collective)
