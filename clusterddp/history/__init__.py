"""The history of a run: its events, their sentences, and the codec of events.jsonl. Standard library only."""
