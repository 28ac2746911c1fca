"""Other people's training loops, stopped together, saved by their own means, and requeued. See docs/integrations.md."""
