"""Slurm's side: its commands and their output, the batch script, what a cluster offers; nothing about ranks."""
