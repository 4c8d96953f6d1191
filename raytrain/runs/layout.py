"""The names of the documents that a run keeps below its place in storage."""

from __future__ import annotations

CONFIG = "config.json"
CLASSES = "classes.json"
MANIFEST = "manifest.parquet"
TEST_MANIFEST = "test-manifest.parquet"
STATUS = "status.json"
SUMMARY = "summary.json"
SWEEP = "sweep.json"
STOP_REQUEST = "stop-request.json"
CHECKPOINTS = "checkpoints/"
TRACE = "trace/"
