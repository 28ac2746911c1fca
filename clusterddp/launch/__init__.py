"""Entry points for jobs queued by older versions; ``clusterddp.launch()`` is in ``clusterddp/api.py``."""
