"""Prints this rank's place, and the GPUs that it is shown: all of its node's, of which gpus_per_rank are its own."""

import os

names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES")
print(" ".join(os.environ.get(name, "none") for name in names), flush=True)
