"""Tests on the real Slurm that tests.cluster starts; what needs only processes is in tests.ranks."""
