"""What the agent of the local backend is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from raytrain.backends.local.calls import CallAddress

if TYPE_CHECKING:
    from raytrain.backends.prepare import Loop
    from raytrain.backends.worker_task import WorkerTask


@dataclass(frozen=True)
class Job:
    """A run for the agent to start workers for. ``folder`` is for files of the agent and its workers."""

    task: WorkerTask
    loop: Loop | None
    num_workers: int
    calls: CallAddress
    folder: str
