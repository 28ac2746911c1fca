"""Checks of a node and its devices, in `doctor --nodes` or before training; those of login nodes are in cli."""
