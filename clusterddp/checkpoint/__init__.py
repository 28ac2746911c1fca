"""Checkpoints: file format, snapshot, writer process, restore and export; not when a checkpoint is due."""
