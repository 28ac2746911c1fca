"""The run directory: its paths, its files and records, and their permissions; no decisions and no Slurm."""
