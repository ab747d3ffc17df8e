"""Data as they lie in files: CIFAR-10, image folders, TFRecord files with their index, and their conversion."""
