"""The names of the documents that a run keeps in its storage."""

from __future__ import annotations

CONFIG = "config.json"
CLAIM = "claim.json"
CLASSES = "classes.json"
MANIFEST = "manifest.parquet"
TEST_MANIFEST = "test-manifest.parquet"
METRICS = "metrics.jsonl"
SKIPPED = "skipped.jsonl"
EVENTS = "events.jsonl"
EVALUATION = "evaluation.json"
STATUS = "status.json"
SUMMARY = "summary.json"
SWEEP = "sweep.json"
STOP_REQUEST = "stop-request.json"
CHECKPOINTS = "checkpoints/"
TRACE = "trace/"
