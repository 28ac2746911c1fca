"""Commands for sweeps: what is submitted or run, and what not again; what a sweep is belongs in ``sweeps/``."""
