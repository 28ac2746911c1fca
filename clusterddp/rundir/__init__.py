"""The run directory: its paths, the files in it, who may have written them; no decisions and no Slurm."""
