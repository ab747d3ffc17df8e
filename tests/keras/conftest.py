"""The groups of ranks that run the test bodies of this directory."""

from tests.world.conftest import world

__all__ = ["world"]
