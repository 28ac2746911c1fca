"""What user code does to its own process, tried under a preemption and a killed rank."""
