"""Slurm's side: its commands and their output, the batch script, and what a cluster offers. Ranks belong elsewhere."""
