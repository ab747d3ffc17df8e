"""Collective communication: what any backend can do (``Collective``), and ``connect``, which finds one.

``gradients.py`` holds the reduction of gradients; the training step and ``ringtrain.keras`` both use it.
"""

from ringtrain.collectives.base import Collective, Totals
from ringtrain.collectives.connect import connect
from ringtrain.collectives.objects import agree, gather_objects, on_first

__all__ = ["Collective", "Totals", "agree", "connect", "gather_objects", "on_first"]
