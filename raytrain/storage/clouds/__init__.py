"""Amazon S3, Azure Blob Storage and Google Cloud Storage: what differs between them"""
