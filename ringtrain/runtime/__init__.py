"""State and resources of this process. TensorFlow is not imported here."""
