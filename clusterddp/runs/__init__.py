"""What a user does with runs, as functions: submit, resubmit, cancel, tell; options and tables belong in ``cli/``."""
