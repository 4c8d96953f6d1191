"""Has Ray's autoscaler (version 1) start on-demand machines if there are no spot ones. Runs on the head.

Ray notes for half an hour that it got no machine of a type, and by default goes on to ask for the same type.
"""

from __future__ import annotations

from typing import Any

from ray.autoscaler._private.resource_demand_scheduler import _default_utilization_scorer


def score(
    node_resources: dict[str, float],
    resources: list[dict[str, float]],
    node_type: str,
    *,
    node_availability_summary: Any,
) -> tuple[Any, ...] | None:
    """Ray's own score of a node type for what is asked for, with those first of which Ray did get machines lately.

    What is first of all in Ray's score stays there: no machine with GPUs for what needs none. None if nothing fits.
    """
    options = {"node_availability_summary": node_availability_summary}
    scored = _default_utilization_scorer(node_resources, resources, node_type, **options)
    if scored is None:
        return None
    record = node_availability_summary.node_availabilities.get(node_type)
    return scored[0], record is None or record.is_available, *scored[1:]
