"""The processes that send a run's metrics to TensorBoard, W&B and MLflow. ``training/`` only starts them."""
