"""A rank's process without torch: entry point, signals, control channel. Training belongs elsewhere."""
