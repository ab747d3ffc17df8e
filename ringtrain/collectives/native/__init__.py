"""Native backend: sums in C++, as TensorFlow operations."""
