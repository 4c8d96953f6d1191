"""Training and predicting on this machine without Ray. For training, torch's elastic agent starts the workers."""
