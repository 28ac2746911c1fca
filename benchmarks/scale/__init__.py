"""What grows with the number of ranks: simulated ranks against a real supervisor, counts, and a real Slurm."""
