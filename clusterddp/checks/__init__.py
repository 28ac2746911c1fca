"""Checks of login nodes, of nodes in a job, and of devices before training; what prints them belongs in ``cli/``."""
