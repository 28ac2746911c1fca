"""Benchmarks of a cluster as job definitions, for ``clusterddp bench``. Nothing imports them."""
