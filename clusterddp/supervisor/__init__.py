"""One attempt: starting the ranks, deciding what follows, carrying it out. Torch and the CLI belong elsewhere."""
