"""The state of a run: its parts, and what a checkpoint contains of them; when one is saved is not decided here."""
