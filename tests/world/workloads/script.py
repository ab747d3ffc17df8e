"""A script of a user's own, as a launcher starts it: it trains, and continues with what came of it."""

import sys
from typing import Any

import ringtrain
from tests.world.workloads.endings import Line

FAULTS: dict[str, dict[str, Any]] = {
    "none": {},
    "setting": {"epoch": 3},
    "value": {"epochs": 0},
    "nested": {"optimizer": {"learning_rate": 0.1}},
    "type": {"epochs": 1.5},
    "option": {"options": {"nonsense": 1}},
}

if __name__ == "__main__":
    fault, out = sys.argv[1:]
    if fault == "late":
        import tensorflow as tf

        tf.zeros(1).numpy()
    result = ringtrain.train(Line, {"epochs": 3, "out": out, **FAULTS.get(fault, {})})
    print(f"<{result.ending.value if result else None}>")
