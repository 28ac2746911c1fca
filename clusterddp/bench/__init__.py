"""Measurements of the machine that training runs on, as job definitions: ``clusterddp bench NAME``."""
