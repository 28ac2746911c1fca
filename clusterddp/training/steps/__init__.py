"""What a run offers about single steps: where it is, when an evaluation is due, skipped batches; the loop is beside."""
