"""The start of TensorFlow."""

import subprocess
import sys
from pathlib import Path

from ringtrain.terminal.startup import place_ranks, without_harmless

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


def test_many_ranks_are_listed_by_node() -> None:
    rows = [[f"n{rank // 8}", 100 + rank, f"GPU:{rank % 8}", 2, False] for rank in range(17)]
    assert list(place_ranks(rows)) == [
        "  ranks 0-7 on n0 (pid 100 of the first): GPU:0, 2 threads",
        "  ranks 8-15 on n1 (pid 108 of the first): GPU:0, 2 threads",
        "  rank 16 on n2 (pid 116): GPU:0, 2 threads",
    ]
    assert list(place_ranks([["n0", 7, "core 0", 1, False]] * 16))[15] == "  rank 15 on n0 (pid 7): core 0, 1 thread"


CUDA_FAILURE = [
    b"E0000 00:00:17.2 28216 cuda_platform.cc:57] failed call to cuInit: UNKNOWN ERROR (303)\n",
    b"=== Source Location Trace: === \n",
    b"external/xla/xla/stream_executor/cuda/cuda_status.cc:50\n",
    b"\n",
]
OTHER_FAILURE = [
    b"E0000 00:00:17.3 28216 other.cc:7] the failure of something\n",
    *CUDA_FAILURE[1:],
    b"a line of the user's\n",
]


def test_a_harmless_message_is_left_out_with_its_trace() -> None:
    kept = without_harmless([*CUDA_FAILURE, *OTHER_FAILURE], has_gpu=False, log_level="1")
    assert list(kept) == OTHER_FAILURE


def test_messages_about_a_gpu_are_kept_where_there_is_one() -> None:
    lines = [*CUDA_FAILURE, *OTHER_FAILURE]
    assert list(without_harmless(lines, has_gpu=True, log_level="1")) == lines
    assert list(without_harmless(lines, has_gpu=True, log_level="3")) == [OTHER_FAILURE[-1]]


def test_a_harmless_message_without_a_trace_hides_nothing_behind_it() -> None:
    lines = [CUDA_FAILURE[0], b"a line of the user's\n", CUDA_FAILURE[1], b"another\n"]
    assert list(without_harmless(lines, has_gpu=False, log_level="")) == lines[1:]
