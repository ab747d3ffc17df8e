"""The doctor among the nodes of a cluster."""

import importlib.metadata
import shutil
import sys
from pathlib import Path

import pytest

from ringtrain import __version__
from tests.slurm.cluster import Cluster
from tests.slurm.test_cluster import SRUN, write_script
from tests.world.environments import SITE_PACKAGES, make_environment


@pytest.mark.slow
def test_a_node_with_another_keras_is_named(cluster: Cluster, tmp_path: Path) -> None:
    keras = importlib.metadata.version("keras")
    python, packages = make_environment(tmp_path / "env", without="keras")
    shutil.copytree(SITE_PACKAGES / "keras", packages / "keras")
    version = packages / "keras/src/version.py"
    version.write_text(version.read_text().replace(keras, "3.10.99"))
    chosen = f"[ $(hostname) = n2 ] && python={python} || python={sys.executable}"
    start = write_script(tmp_path / "start", chosen, "exec $python -m ringtrain doctor")
    finished = cluster.run([*SRUN, "--nodes=2", "--ntasks-per-node=1", "bash", str(start)], timeout=120)
    shown = " ".join(finished.stdout.split())
    assert shown.count(f"ringtrain {__version__} doctor on n1: 2 ranks, started by srun") == 1, shown + finished.stderr
    assert f"versions broken rank 1 on n2: Keras 3.10.99 (rank 0: Keras {keras})" in shown
    assert "srun (--mpi=pmix" in shown
    assert "plan ok n1: rank 0: core" in shown
    assert "plan ok n2: rank 1: core" in shown
    assert "among 2 ranks by Horovod over MPI in" in shown
    assert shown.endswith("Broken: versions.")
    assert finished.rc == 2
    assert "Traceback" not in shown + finished.stderr
