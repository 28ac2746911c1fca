"""Memory for the data of checkpoints, shared or in huge pages; what lies in it is not decided here."""
