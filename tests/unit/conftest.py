"""What the tests of several workloads share."""

from collections.abc import Iterator

import pytest


@pytest.fixture
def float64() -> Iterator[None]:
    """Keras in double precision."""
    import keras

    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
