"""Workloads that leave something behind which outlives the training."""

from __future__ import annotations

import atexit
import threading
import time

import keras

from tests.world.workloads.lasting import Lasting


class LastingThread(Lasting):
    """A thread of its own outlives the training."""

    def create_model(self) -> keras.Model:
        threading.Thread(target=time.sleep, args=(3600,), name="monitor").start()
        return super().create_model()


class LastingTalker(Lasting):
    """It prints by itself as well, when it starts and when Python ends."""

    def create_model(self) -> keras.Model:
        atexit.register(print, "the end")
        for number in range(3000):  # more than a pipe or a buffer holds
            print(f"a line of the user's own, number {number}")
        return super().create_model()
