"""Runs as ``--json`` prints them."""

from __future__ import annotations

import dataclasses
from typing import Any

from raytrain.runs.records import RunInfo, RunRecord


def run_info_json(run: RunInfo) -> dict[str, Any]:
    """One run of the list."""
    status = dataclasses.asdict(run.status)
    return {
        "name": run.name,
        "recipe": run.recipe,
        **status,
        "test_accuracy": run.test_accuracy,
        "tags": run.tags,
        "note": run.config and run.config.note,
        "problems": run.problems,
    }


def run_record_json(record: RunRecord) -> dict[str, Any]:
    """Everything about one run."""
    return {
        "name": record.name,
        "config": record.config and dataclasses.asdict(record.config),
        "status": dataclasses.asdict(record.status),
        "summary": record.summary,
        "metrics": [row.to_json() for row in record.metrics],
        "checkpoints": [
            {"path": stored.path, "size_bytes": stored.size_bytes, "modified": stored.modified}
            for stored in record.checkpoints
        ],
        "skipped": [dataclasses.asdict(image) for image in record.skipped],
        "problems": record.problems,
    }
