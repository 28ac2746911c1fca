"""Commands for runs that exist: list, show, wait for, end and clean up; what starts a run belongs in ``cli/``."""
