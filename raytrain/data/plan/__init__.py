"""Sample order: which samples each batch and each worker has."""
