"""The same training under the same faults, by this project and by what people use today."""
