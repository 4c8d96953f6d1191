"""Every kind of event has a sentence, and is read back from storage as it was."""

from __future__ import annotations

import json
from typing import get_args

import pytest

from raytrain.display.event_text import event_text, shown_summary, stop_text
from raytrain.monitor import events
from raytrain.monitor.events import Event, TimedEvent, parse_event
from raytrain.runs.outcome import StopKind, StopReason

EXAMPLES = [
    (events.TrainingStarted(1), "training on 1 worker"),
    (events.TrainingStarted(2, 1200), "training on 2 workers, resuming after step 1,200"),
    (events.Evaluated(3, accuracy=0.625), "evaluated after epoch 3: accuracy 0.6250"),
    (events.CheckpointWritten("a.pt", 20), "checkpoint a.pt written"),
    (events.Tested(0.5, 1.25), "measured the test images, with the best checkpoint: accuracy 0.5000, loss 1.2500"),
    (
        events.CheckpointSkipped(1000, "the weight fc.bias is not finite"),
        "checkpoint after step 1,000 not written: the weight fc.bias is not finite",
    ),
    (events.CheckpointDamaged("a.pt", "{x}"), "a.pt is not a whole checkpoint ({x}); the one before it is tried"),
    (events.LossNotFinite("nan", 7), "the loss is nan at step 7; the run stops if it stays so"),
    (events.ImageSkipped("a.jpg", "empty"), "skipped a.jpg: empty (skipped.jsonl lists all of them)"),
    (events.RequestsRetried(), "some requests for images fail at the first try; they are retried"),
    (
        events.DecodedOnCpu("PNG"),
        "the CPU decodes some images, which the GPU cannot: PNG; num_decoded_on_cpu counts them",
    ),
    (events.StorageWaits("no"), "the history waits for storage: no"),
    (events.StorageBack(), "the history is in storage again"),
    (events.DocumentLost("a.json", "no"), "a.json could not be written: no"),
    (events.HistoryDamaged("2 of 5 lines"), "2 of 5 lines; the run continues without them"),
    (
        events.StopRequested(StopReason("signal", "SIGINT")),
        "stop requested: Ctrl-C; the step ends first, a second one aborts",
    ),
    (events.NodeLeaving(), "a node of the workers will be taken away: writing a checkpoint now"),
    (events.HeadSilent(), "the head of the cluster does not answer: training goes on"),
    (events.HeadBack(), "the head of the cluster answers again"),
    (
        events.ReadersWait(0.25, 0.0, 8.0),
        "the images wait for CPUs: a task that reads them takes 0.25, and the cluster has 0 of 8 free, while",
    ),
    (events.WorkerFailed("boom", 1), "worker 1 failed: boom"),
    (events.WorkerFailed("worker 0 was killed by SIGKILL"), "worker 0 was killed by SIGKILL"),
    (events.TrackerOpened("mlflow", "http://here"), "mlflow shows the run: http://here"),
    (
        events.TrackerFailed("mlflow", "failed", "run"),
        "tracker mlflow failed; the run goes on without it",
    ),
    (
        events.ProvenanceChanged("torch 2.12.0 instead of 2.11.0"),
        "different from the attempt before: torch 2.12.0 instead of 2.11.0",
    ),
    (events.Note("careful"), "careful"),
]


@pytest.mark.parametrize(("event", "text"), EXAMPLES, ids=lambda value: getattr(value, "kind", ""))
def test_an_event_is_stored_with_kind_and_fields_and_shown_as_a_sentence(event: Event, text: str) -> None:
    line = json.loads(json.dumps(TimedEvent(4, 1.5, event).to_json()))
    assert line["kind"] == event.kind
    assert parse_event(line) == (1.5, event)
    assert event_text(event).startswith(text)


def test_there_is_an_example_of_each_kind() -> None:
    assert {type(event) for event, _ in EXAMPLES} == set(Event.__subclasses__())


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        (StopReason("signal", "SIGTERM"), "SIGTERM"),
        (StopReason("command", "here"), "raytrain stop on here"),
        (StopReason("page", "here"), "the page on here"),
        (StopReason("caller", "seen enough"), "seen enough"),
        (StopReason("time", "2h"), "--max-time 2h"),
        (
            StopReason("target", "accuracy=0.9", metric="accuracy", value=0.95),
            "--until accuracy=0.9: accuracy is 0.9500",
        ),
        (StopReason("patience", metric="loss", value=0.5, count=2), "--patience 2: loss is not better than 0.5000"),
        (
            StopReason("early_stopping", metric="accuracy", value=0.1, count=1),
            "early stopping: validation accuracy 0.1000 after 1 epoch, worse than the better half of the trials",
        ),
        (
            StopReason("early_stopping", "successive-halving", metric="accuracy", value=0.1, count=4),
            "early stopping: validation accuracy 0.1000 after 4 epochs, not in the best quarter of the trials before "
            "(--pruner successive-halving)",
        ),
        (StopReason("diverged", "the loss is nan"), "the loss is nan"),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_a_reason_to_stop_is_shown_as_text_also_from_a_summary(reason: StopReason, text: str) -> None:
    assert stop_text(reason) == text
    stored = json.loads(json.dumps({"steps": 7, "stop_reason": reason.to_json()}))
    assert shown_summary(stored) == {"steps": 7, "stop_reason": text}


@pytest.mark.parametrize("kind", get_args(StopKind))
def test_a_reason_without_its_fields_has_a_text_too(kind: StopKind) -> None:
    assert stop_text(StopReason(kind))


@pytest.mark.parametrize("damaged", [None, 7, "Ctrl-C", {}, {"kind": "odd"}, {"kind": "page", "detail": 7}, {"x": 1}])
def test_a_summary_with_another_reason_is_shown_as_it_is(damaged: object) -> None:
    assert shown_summary({"stop_reason": damaged}) == {"stop_reason": damaged}
