"""The helper that ends what outlives a rank."""

import subprocess
import sys

from ringtrain.runtime.processes import start_aside


def test_a_rank_that_has_exited_before_the_helper_starts_is_not_awaited() -> None:
    """mpirun would wait for the helper, which holds the rank's output."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    helper = start_aside("ringtrain.runtime.orphans", "rank 1", "60", str(gone.pid), str(gone.pid))
    try:
        assert helper.wait(20) == 0
    finally:
        helper.kill()
