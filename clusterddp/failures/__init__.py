"""Failures: how ranks ended, hangs, stacks, nodes to exclude. This package starts and ends no processes."""
