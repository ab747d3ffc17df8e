"""Starting runs: ``python -m launch local`` on this machine, ``python -m launch slurm`` on a cluster.

A wheel holds this package as ``ringtrain.launch``, since other packages are called ``launch``, too. What is started,
printed or written here goes by the name under which it runs.
"""

PACKAGE = __name__
PROGRAM = f"python -m {PACKAGE.replace('.', ' ')}"  # of a wheel: by ringtrain's own command of that name
