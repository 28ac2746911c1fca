"""Checkpoints of sharded models (FSDP2): a folder with a file per rank, and a manifest that is written last."""
