"""The orders in which a run takes the samples of a dataset, each a pure function of its position; no loading."""
