"""The processes that pass a run's metrics on to TensorBoard and W&B; training only starts them."""
