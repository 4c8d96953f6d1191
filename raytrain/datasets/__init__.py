"""Bring a data set to where it is read: download, upload, pack."""
