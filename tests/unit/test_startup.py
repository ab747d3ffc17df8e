"""The start of TensorFlow."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import gc
from ringtrain.terminal.startup import skipping_garbage_collection

for _ in range(2):
    with skipping_garbage_collection():
        import tensorflow
        print(gc.isenabled(), end=" ")
    print(gc.isenabled(), gc.get_freeze_count() > 1000)
    gc.unfreeze()
"""


def test_the_garbage_collector_skips_objects_of_tensorflow(tmp_path: Path) -> None:
    (tmp_path / "tensorflow.py").write_text("objects = [[] for _ in range(1000)]\n")
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{SCRIPT}"]
    finished = subprocess.run(command, capture_output=True, text=True, check=True)
    first, second = finished.stdout.splitlines()
    assert first == "False True True"
    assert second == "True True False", "it has no effect where TensorFlow is imported already"
