"""The command line: a module for each command, and what they share. Nodes of a job do not need this package."""
