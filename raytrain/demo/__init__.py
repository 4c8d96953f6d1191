"""Everything on one machine: drawn images, an S3 server, and a run."""
