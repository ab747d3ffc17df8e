"""An error that another rank's end brings about is told as what it is."""

import threading

import pytest
import tensorflow as tf

from ringtrain.errors import LOST_RANK_SIGN, DataError
from ringtrain.guard import causes
from ringtrain.guard.causes import LostRanksError, explaining_lost_ranks, note_lost

OF_GLOO = "[third_party/compatible17_gloo/gloo/transport/tcp/pair.cc:598] Connection closed by peer [127.0.0.1]:8111"


@pytest.mark.parametrize("sign", ["Horovod has been shut down", OF_GLOO, f"{LOST_RANK_SIGN}: rank 1"])
def test_a_reduction_failed_by_a_lost_rank_reports_the_loss(sign: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the error has passed through a compiled step, in which it loses its type."""
    monkeypatch.setattr(causes, "NAMED_SECONDS", 0.05)

    def fail(values: object) -> object:
        raise RuntimeError(sign)

    step = tf.function(lambda: tf.numpy_function(fail, [tf.zeros([1])], tf.float32), autograph=False)
    with pytest.raises(LostRanksError, match="one of them has ended"), explaining_lost_ranks():
        step()


@pytest.mark.parametrize("error", [RuntimeError("the ranks are at different places"), DataError(LOST_RANK_SIGN)])
def test_other_errors_pass_unchanged(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, explaining_lost_ranks():
        raise error
    assert caught.value is error


def test_the_first_rank_whose_connection_has_ended_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(causes, "_first_lost", "")
    monkeypatch.setattr(causes, "_is_known", threading.Event())
    for who in ("rank 1 on node7", "rank 2 on node8"):  # the second ends in the wake of the first
        note_lost(who)
    with (
        pytest.raises(LostRanksError, match=r"^lost rank 1 on node7 while .* left by sys\.exit"),
        explaining_lost_ranks(),
    ):
        raise RuntimeError(LOST_RANK_SIGN)
