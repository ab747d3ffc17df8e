"""Runs as Slurm jobs: the batch script of a request, its submission, and what follows when its ranks have ended."""
