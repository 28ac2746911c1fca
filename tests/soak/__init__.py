"""Faults at random moments, and whether the runs and the booking of their time came through."""
