"""Tests with real ranks, supervisors and commands on this machine; nothing here needs Slurm."""
