"""Datasets over large files, the shards, in which each sample has a known place; the order of samples is elsewhere."""
