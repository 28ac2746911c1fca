"""The page of ``clusterddp report`` in a real browser: ``make test-browser``."""
