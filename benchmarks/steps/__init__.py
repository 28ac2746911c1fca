"""What a step costs: the parts of clusterddp in each step, with and without them; nothing of starts and saves."""
