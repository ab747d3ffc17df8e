"""Versions of installed packages, whichever distribution they are from."""

import importlib.metadata

import pytest

from ringtrain.runtime.versions import package_version


def test_a_version_is_that_of_the_distribution_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"numpy": "2.1", "keras-nightly": "3.16.0.dev7", "tensorflow-cpu": "2.21.0"}

    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    names = ("numpy", "keras", "tensorflow", "horovod")
    assert [package_version.__wrapped__(name) for name in names] == ["2.1", "3.16.0.dev7", "2.21.0", None]
