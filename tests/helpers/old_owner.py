"""An owner of a run, as a process of its own: ``python -m tests.helpers.old_owner STORAGE``.

It writes the documents of a run, step by step, until somebody has taken the run over, and then prints the sentence.
"""

from __future__ import annotations

import itertools
import sys

import torch

from raytrain.errors import OwnerChanged, StorageError
from raytrain.monitor.document_writer import DocumentWriter
from raytrain.runs import ownership
from raytrain.runs.documents import CONFIG, STOP_REQUEST, run_store
from raytrain.runs.metric_row import MetricRow
from raytrain.runs.metrics_history import History
from raytrain.runs.outcome import Progress
from raytrain.runs.ownership import RunClaim, claim_run
from raytrain.runs.stored_checkpoints import Identity
from raytrain.training.checkpoint import Checkpoints

LEASE_S = 1.0


def shorten_lease() -> None:
    ownership.LEASE_S = LEASE_S
    ownership.RENEW_EVERY_S = 0.2
    ownership.POLL_EVERY_S = 0.05


def write(owner: RunClaim, steps: range, keep: int = 1) -> None:
    """Write what a run does in these steps, with a checkpoint after each, of which the last ones are kept."""
    store = owner.owned_store
    history = History(store)
    checkpoints = Checkpoints(store, Identity("net", ("a",), "", 1, 0), keep=keep)
    documents = DocumentWriter(store, num_steps=100, first_step=steps.start)
    history.rewind(steps.start - 1)
    for step in steps:
        history.record(MetricRow(kind="step", step=step, epoch=1, metrics={"owner": owner.claim.fence, "loss": 1.0}))
        history.flush()
        checkpoints.save({"model": {"weight": torch.full((3,), owner.claim.fence)}}, Progress(step=step))
        checkpoints.close()
        documents.write_status("running")
        store.delete(STOP_REQUEST)
    history.close()


def main(storage: str) -> None:
    shorten_lease()
    store = run_store(storage, "run")
    with claim_run(store, "run") as owner:
        store.put(CONFIG, b"{}")
        for step in itertools.count(1):
            try:
                write(owner, range(step, step + 1))
            except OwnerChanged as error:
                print(error, flush=True)
                return
            except StorageError as error:
                print("failed:", error, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
