"""Sentences about events, and about the reasons why a run stopped. They are for people; no code parses them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from raytrain.display.console import format_optional
from raytrain.errors import format_count, format_dollars
from raytrain.monitor import events
from raytrain.monitor.events import Event
from raytrain.runs.outcome import StopReason, stop_reason_of


def event_text(event: Event) -> str:
    """Return an event as one line, by a case below or by the template of its class.

    A text in the event may contain anything: callers that print it make one printable line of it.
    """
    match event:
        # Events whose sentence has parts that depend on a field.
        case events.TrainingStarted(workers, step):
            resuming = f", resuming after step {step:,}" if step > 0 else ""
            return f"training on {format_count(workers, 'worker')}{resuming}"
        case events.Evaluated() | events.Tested():
            values = {"accuracy": event.accuracy, "loss": event.loss}
            measured = ", ".join(
                f"{name} {format_optional(value, '.4f')}" for name, value in values.items() if value is not None
            )
            if isinstance(event, events.Tested):
                return f"measured the test images, with the best checkpoint: {measured}"
            return f"evaluated after epoch {event.epoch}: {measured}"
        case events.StopRequested(reason):
            aborts = "; the step ends first, a second one aborts" if reason.kind == "signal" else ""
            return f"stop requested: {stop_text(reason)}{aborts}"
        case events.WorkerFailed(reason, rank):
            return reason if rank is None else f"worker {rank} failed: {reason}"
        case events.NodeLeaving(number):
            nodes = "a node" if number == 1 else f"{number} nodes"
            return f"{nodes} of the workers will be taken away: writing a checkpoint now"
        case events.TrackerFailed(tracker, reason, run):
            later = f"`raytrain track {run} --track {tracker}` sends what is missing once the run is over"
            return f"tracker {tracker} {reason}; the run goes on without it, and {later}"

        # All other events: the template of their class, filled with their fields.
        case _:
            return _SENTENCES[type(event)].format_map(vars(event))


_SENTENCES: dict[type[Event], str] = {
    events.CheckpointWritten: "checkpoint {path} written",
    events.CheckpointSkipped: "checkpoint after step {step:,} not written: {reason}",
    events.CheckpointDamaged: "{path} is not a whole checkpoint ({reason}); the one before it is tried",
    events.LossNotFinite: "the loss is {loss} at step {step:,}; the run stops if it stays so",
    events.ImageSkipped: "skipped {key}: {reason} (skipped.jsonl lists all of them)",
    events.RequestsRetried: "some requests for images fail at the first try; they are retried",
    events.DecodedOnCpu: "the CPU decodes some images, which the GPU cannot: {reason}; num_decoded_on_cpu counts them",
    events.StorageWaits: "the history waits for storage: {error}",
    events.StorageBack: "the history is in storage again",
    events.DocumentLost: "{document} could not be written: {error}",
    events.HistoryDamaged: "{problem}; the run continues without them",
    events.HeadSilent: "the head of the cluster does not answer: training goes on; if Ray ends it, --resume continues "
    "the run",
    events.ReadersWait: "the images wait for CPUs: a task that reads them takes {task_cpus:g}, and the cluster has "
    "{free_cpus:g} of {cluster_cpus:g} free, while the workers and other jobs use the rest; the run goes on when there "
    "is room",
    events.HeadBack: "the head of the cluster answers again",
    events.TrackerOpened: "{tracker} shows the run: {place}",
    events.ProvenanceChanged: "different from the attempt before: {changes}",
    events.Note: "{text}",
}


def stop_text(reason: StopReason) -> str:
    """Return who or what stopped the run, as a part of a sentence."""
    # A document that another version or a stranger has written may lack fields that its kind of reason has.
    detail, metric, count = reason.detail or "", reason.metric, reason.count or 0
    value = math.nan if reason.value is None else reason.value
    measured = format_optional(value, ".4f")
    epochs = format_count(count, "epoch")
    best_so_far = "a number" if reason.value is None else f"better than {measured}"  # None: all were NaN
    worse = _WORSE_THAN.get(detail, "worse than the better half of the trials")
    texts = {
        "signal": "Ctrl-C" if detail == "SIGINT" else detail or "a signal",
        "command": f"raytrain stop on {detail}",
        "page": f"the page on {detail}",
        "early_stopping": f"early stopping: validation {metric} {measured} after {epochs}, {worse}",
        "target": f"--until {detail}: {metric} is {measured}",
        "patience": f"--patience {count}: {metric} is not {best_so_far}",
        "time": f"--max-time {detail}",
        "tracker": f"a request in {detail}",
        "cost": f"--max-cost {detail}: {format_dollars(value)} are spent",
    }
    # The detail of all other kinds is a sentence or the words of a caller.
    return texts.get(reason.kind) or detail or reason.kind.replace("_", " ")


_WORSE_THAN = {
    "median": "worse than the median of the trials before (--pruner median)",
    "successive-halving": "not in the best quarter of the trials before (--pruner successive-halving)",
    "hyperband": "not in the best third of its group of trials (--pruner hyperband)",
}
"""How a trial that a pruner of Optuna stopped compares with others, by the pruner."""


def shown_summary(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``summary`` of a run with the reason why it stopped as a sentence, which is a record there."""
    reason = stop_reason_of(summary)
    return {**summary, "stop_reason": stop_text(reason)} if reason else dict(summary)
