"""A run in one process, without Ray."""

from __future__ import annotations

ALONE = {
    "TORCHELASTIC_RUN_ID": "alone",
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
}
"""The environment of a process that torchrun starts alone."""
