"""Trackers of a run's metrics: TensorBoard, MLflow, W&B, Prometheus, or your own."""
