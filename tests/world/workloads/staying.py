"""Workloads that leave something behind which outlives the training."""

import atexit
import os
import sys
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


class LastingForker(Lasting):
    """It forks processes that come back: one leaves as Python does, one raises, one goes on as if it were the run."""

    def create_model(self) -> keras.Model:
        model = super().create_model()  # before the fork, which takes no threads along
        for come_back in (sys.exit, self.fail, lambda: None):
            if os.fork() == 0:
                come_back()
                break
            os.wait()
        return model

    def fail(self) -> None:
        raise ValueError("of the forked process")
