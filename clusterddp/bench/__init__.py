"""Benchmarks of a cluster as job definitions, for ``clusterddp bench``; nothing imports them."""
