"""Checkpoints: file format, snapshot, writer process, restore and export; not when one is due."""
