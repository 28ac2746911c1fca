"""Memory that processes share for the data of checkpoints; what lies in it is not decided here."""
