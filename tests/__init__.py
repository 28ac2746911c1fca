#: The folders here whose tests may use the test cluster: a process that runs only such tests imports no others.
WITH_CLUSTER = {"slurm", "cluster", "soak", "chaos"}
