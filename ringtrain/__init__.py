"""Data-parallel training of TensorFlow/Keras models: one process per GPU, exactly what one process would train."""

__version__ = "0.1.0"
