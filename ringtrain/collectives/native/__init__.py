"""The native backend: sums of the ranks of a node in C++, which TensorFlow calls itself."""
