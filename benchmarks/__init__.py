"""What the project claims, measured: each program here leaves a table and its raw figures in benchmarks/results/."""
