"""``clusterddp config``: shows and checks job definitions and profiles; what submits them belongs in ``cli/``."""
