"""Checkpoints: file format, snapshot, writer process, restore and export. ``training/`` decides when to save."""
