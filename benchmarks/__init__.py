"""What the project claims, measured: each program here leaves a table and the raw figures in docs/measurements/."""
