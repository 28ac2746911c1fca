"""The samples of each step: their order, loaders, micro-batches and seeds; no model and no checkpoints."""
