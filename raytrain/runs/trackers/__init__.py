"""Where the metrics of a run are sent besides its own documents: TensorBoard, MLflow, W&B, Prometheus, or your own."""
