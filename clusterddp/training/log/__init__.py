"""What a script logs: its values as they are at the call, reduced over the ranks, passed on to trackers; no files."""
