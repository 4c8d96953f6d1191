"""From the name of a run, a sweep or a study to the runs that belong to it."""

from __future__ import annotations

import re

from raytrain.experiments.trials import read_sweep, trial_names
from raytrain.runs.documents import open_run, run_names, run_store
from raytrain.runs.layout import CONFIG, SWEEP
from raytrain.storage.open import open_store


def names_of(storage: str, name: str) -> list[str]:
    """The runs of a sweep, some of which may not have started, or of a study; otherwise the run itself.

    Raises UsageError if there is none.
    """
    store = run_store(storage, name)
    if store.exists(SWEEP):
        return trial_names(read_sweep(store), name)
    if not store.exists(CONFIG):
        sizes = [found for found in run_names(open_store(storage)) if re.fullmatch(rf"{re.escape(name)}-\d+", found)]
        if sizes:
            return sorted(sizes, key=lambda found: int(found.rpartition("-")[2]))
    open_run(storage, name)
    return [name]
