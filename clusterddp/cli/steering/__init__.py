"""Commands for a run while it trains, answered by its supervisor; what reads or ends runs belongs in ``cli/runs/``."""
