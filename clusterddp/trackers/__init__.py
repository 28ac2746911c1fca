"""The processes that send a run's metrics to trackers. ``training/`` only starts them."""
