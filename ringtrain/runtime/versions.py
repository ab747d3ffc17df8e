"""Versions of installed packages."""

from __future__ import annotations

import functools
import importlib.metadata

# Distributions that install a package, if not the one of the same name.
DISTRIBUTIONS = {
    "keras": ("keras", "keras-nightly"),
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tf-nightly", "tf-nightly-cpu"),
}


@functools.cache  # each lookup parses the metadata of a distribution
def package_version(package: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    for distribution in DISTRIBUTIONS.get(package, (package,)):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
