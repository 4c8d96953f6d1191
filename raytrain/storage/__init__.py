"""Storage by name, in a folder or in a bucket of any cloud."""
