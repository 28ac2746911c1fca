"""What large files cost: ``python -m benchmarks.streams``."""
