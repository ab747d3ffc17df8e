"""Launchers: ``python -m launch local`` on this machine, ``python -m launch slurm`` on a cluster.

In a wheel this package is ``ringtrain.launch``.
"""

PACKAGE = __name__
PROGRAM = f"python -m {PACKAGE.replace('.', ' ')}"
