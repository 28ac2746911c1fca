"""The samples of each step: their order, loaders, micro-batches and seeds. Models and checkpoints belong elsewhere."""
