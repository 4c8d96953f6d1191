"""What may be changed of runs that are stored: their tags and notes, and whether they are there."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from raytrain.config import TrainConfig
from raytrain.runs.claim import claim_run
from raytrain.runs.documents import open_run, read_config, write_config
from raytrain.runs.layout import CLAIM, CONFIG


def tag_run(
    storage: str, name: str, add: Sequence[str] = (), remove: Sequence[str] = (), note: str | None = None
) -> TrainConfig:
    """Change the tags of a run, and its note if one is given; returns its options. Raises UsageError without a run."""
    store = open_run(storage, name)
    config = read_config(store)
    tags = tuple(tag for tag in dict.fromkeys([*config.tag, *add]) if tag not in remove)
    changed = dataclasses.replace(config, tag=tags, note=config.note if note is None else note or None)
    if changed != config:
        write_config(store, changed)
    return changed


def delete_run(storage: str, name: str) -> int:
    """Delete a run with its checkpoints; returns how many files it had.

    Takes up to half a minute if its last owner may be alive. Raises UsageError if there is no such run, or it trains.
    """
    with claim_run(open_run(storage, name), name) as claim:  # its end deletes the claim of a run without options
        store = claim.owned_store
        paths = [found.path for found in store.list() if found.path not in (CLAIM, CONFIG)]
        for path in [*paths, CONFIG]:  # the options last: until then the run is listed, and can be deleted again
            store.delete(path)
    return len(paths) + 1
