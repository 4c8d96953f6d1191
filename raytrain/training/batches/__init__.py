"""A worker's batches: decoded or fetched ahead, augmented and mixed on the device."""
