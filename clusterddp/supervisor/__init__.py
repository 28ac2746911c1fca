"""One attempt: starting the ranks, deciding what follows, carrying it out; no torch, no command line."""
