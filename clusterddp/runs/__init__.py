"""The commands of a user as functions: submit, resubmit, cancel, tell. Options and tables belong in ``cli/``."""
