"""Rehearsals: a script is started a bounded number of times, disturbed on purpose, and compared with itself."""
