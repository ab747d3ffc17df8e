"""The groups of ranks that run the test bodies of this directory."""

from tests.world.conftest import pytest_runtest_teardown, world

__all__ = ["pytest_runtest_teardown", "world"]
