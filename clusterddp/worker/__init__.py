"""A rank's process without torch: entry point, signals, control channel to the supervisor; no training."""
