"""Starting runs: ``python -m launch local`` on this machine, ``python -m launch slurm`` on a cluster."""
