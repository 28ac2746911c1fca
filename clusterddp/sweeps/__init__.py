"""Sweeps: many runs of one job definition, their values, names, folder and comparison; ``cli/sweeps`` submits them."""
