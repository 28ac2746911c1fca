"""Benchmarks of a cluster as job definitions, for ``clusterddp bench``. No module imports them."""
