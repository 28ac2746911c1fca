"""Public training repositories under clusterddp: ``make test-repositories REPOSITORIES=FOLDER``."""
