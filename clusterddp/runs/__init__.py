"""What a user does with runs, as functions: submit, watch, cancel, tell; options and tables belong in ``cli/``."""
