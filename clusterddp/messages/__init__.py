"""What the processes of a run send each other on the control channel, a class each. Standard library only."""
