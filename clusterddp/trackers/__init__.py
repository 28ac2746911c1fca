"""The processes that send a run's metrics to TensorBoard, W&B and MLflow, beside the training."""
