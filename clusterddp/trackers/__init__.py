"""The processes that pass a run's metrics on to TensorBoard, W&B and MLflow. ``training/`` only starts them."""
