"""`doctor`: what a login node sees of a cluster, and the job that checks nodes; what ranks check is in ``checks/``."""
