"""Tests on stand-in CUDA devices: what runs with ``device=cuda``, on machines without a GPU."""
