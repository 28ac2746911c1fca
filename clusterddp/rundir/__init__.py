"""The run directory: its paths, its files and records, and their permissions. Decisions and Slurm belong elsewhere."""
