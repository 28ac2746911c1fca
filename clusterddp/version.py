"""The version of clusterddp."""

__version__ = "0.1.0"
