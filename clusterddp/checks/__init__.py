"""Checks of login nodes, of nodes in a job, and of devices before training. Printing them belongs in ``cli/``."""
