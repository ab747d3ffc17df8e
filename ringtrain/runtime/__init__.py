"""This process: who it is, what it may use, what it is doing, and how it ends. TensorFlow is not imported here."""
