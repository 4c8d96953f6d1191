"""Train while others take the CPUs that were left for reading, until the run says so; print the summary as JSON.

``python -m tests.helpers.busy_cluster IMAGES STORAGE``
"""

from __future__ import annotations

import json
import sys
from typing import Any

import raytrain
from raytrain.display.event_text import event_text
from raytrain.monitor.events import ReadersWait
from raytrain.monitor.snapshot import Snapshot
from tests.helpers.small_runs import config


def main(images: str, storage: str) -> None:
    taken: list[Any] = []
    events: list[str] = []

    def view(snapshot: Snapshot) -> None:
        import ray

        # Data tasks start once the workers train, after this view has seen it.
        if snapshot.status == "running" and not taken:
            taken.append(ray.util.placement_group([{"CPU": ray.available_resources()["CPU"]}]))
            assert taken[0].wait(60)
        waits = [event.event for event in snapshot.events if isinstance(event.event, ReadersWait)]
        if waits and not events:
            events.extend(map(event_text, waits))
            ray.util.remove_placement_group(taken[0])

    result = raytrain.train(config(images, storage, address="local", cache="memory"), view=view)
    print(json.dumps({**result.summary(), "waits": events}))


if __name__ == "__main__":
    main(*sys.argv[1:])
