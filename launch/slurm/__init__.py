"""Runs as Slurm jobs: batch script, submission, and restarts."""
