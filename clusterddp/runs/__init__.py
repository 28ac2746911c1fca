"""The commands of a user as functions: submit, resubmit, cancel, stop. Options and tables belong in ``cli/``."""
