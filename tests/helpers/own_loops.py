"""Loops of one's own in runs that take milliseconds: trained in this process, as a worker trains them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from raytrain.config import ResolvedConfig
from raytrain.monitor.events import Note
from raytrain.runs.metric_row import MetricRow
from raytrain.runs.outcome import Outcome
from raytrain.training.assembly import train_run
from raytrain.training.batches.batch import Batch
from raytrain.training.run import Run
from tests.helpers.memory_runs import Recorder, config, images, make_run, make_spec

OPTIONS = config(batch_size=7, epochs=2, log_every=1)  # 6 steps per epoch
NUM_IMAGES = 36  # the last batch of an epoch is a single image: of several workers, one has it and the others none
WIDTH = 3 * 8 * 8  # numbers in an image

Loop = Callable[[Run], object]
LossOf = Callable[[nn.Module, Batch], Tensor]


@dataclass(frozen=True)
class Trained:
    """A run that has ended, as one worker knows it."""

    run: Run
    recorder: Recorder
    outcome: Outcome

    @property
    def weights(self) -> list[Tensor]:
        """The weights and buffers of all networks that the loop has prepared."""
        return [value.clone() for model in self.run.models.trained for value in model.state_dict().values()]

    @property
    def notes(self) -> list[str]:
        """The notes of the run; only worker 0 has any."""
        return [event.text for event in self.recorder.events if isinstance(event, Note)]

    def rows(self, kind: str) -> list[MetricRow]:
        """The rows of one kind in the metrics history; only worker 0 has any."""
        return [row for row in self.recorder.rows if row.kind == kind]


def new_run(folder: str | Path, options: ResolvedConfig = OPTIONS, recorder: Recorder | None = None) -> Run:
    """Return this worker's part of a run, restored from the newest checkpoint in ``folder``."""
    return make_run(options, images(NUM_IMAGES), str(folder), recorder or Recorder())


def train_loop(
    loop: Loop, folder: str | Path, options: ResolvedConfig = OPTIONS, recorder: Recorder | None = None
) -> Trained:
    """Train with ``loop`` from the newest checkpoint in ``folder`` to the end of the run, or to a stop."""
    recorder = recorder or Recorder()
    run = new_run(folder, options, recorder)
    spec = dataclasses.replace(make_spec(options, images(NUM_IMAGES), str(folder)), loop=loop)
    return Trained(run, recorder, train_run(spec, run))


def train_all(loops: list[Loop], folder: str, stop_after: int | None = None) -> dict[str, dict[str, Any]]:
    """Train with each loop, and return what can be sent to another process: weights, rows and outcome by its name."""
    results: dict[str, dict[str, Any]] = {}
    for loop in loops:
        name = getattr(loop, "__name__", "")
        trained = train_loop(loop, f"{folder}/{name}", recorder=Recorder(stop_after))
        results[name] = {"weights": trained.weights, "rows": trained.recorder.rows, "outcome": trained.outcome}
    return results


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    """The mean cross entropy of the images of a batch."""
    return F.cross_entropy(model(batch.images), batch.labels)


def linear(run: Run) -> nn.Sequential:
    """A network without batch norm, that is not prepared."""
    return nn.Sequential(nn.Flatten(), nn.Linear(WIDTH, run.num_classes))


def fit(
    run: Run,
    model: nn.Module,
    optimizer: Any,
    loss_of: LossOf = cross_entropy,
    *,
    evaluate: Callable[[], dict[str, float]] | None = None,
) -> None:
    """Train a prepared ``model`` to the end of the run, or to a stop."""
    for epoch in run.epochs(evaluate):
        for batch in epoch:
            learn(model, optimizer, batch, loss_of)


def learn(model: nn.Module, optimizer: Any, batch: Batch, loss_of: LossOf = cross_entropy) -> None:
    """Train ``model`` on one batch."""
    optimizer.zero_grad()
    loss_of(model, batch).backward()
    optimizer.step()


def prepared(run: Run) -> tuple[nn.Module, Any]:
    """The network and the optimizer that the options name."""
    model = run.prepare(run.build_model())
    return model, run.prepare(run.build_optimizer(model))


def to_the_end(run: Run) -> None:
    """Train the network that the options name to the end of the run, or to a stop."""
    fit(run, *prepared(run))


class TwoPaths(nn.Module):
    """A network with a method of its own, a layer that is never used, and one that every second step leaves out."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(WIDTH, 16), nn.Tanh())
        self.extra = nn.Linear(16, 16)
        self.unused = nn.Linear(7, 7)
        self.head = nn.Linear(16, num_classes)
        self.step = 0

    def encode(self, images: Tensor) -> Tensor:
        """The features of the images, (m, 16)."""
        self.step += 1
        features = self.body(images)
        return features + self.extra(features) if self.step % 2 else features

    def forward(self, images: Tensor) -> dict[str, Any]:
        """The logits, (m, C), and how often the network was called."""
        return {"logits": self.head(self.encode(images)), "step": self.step}


def assert_same_weights(name: str, ours: list[Tensor], theirs: list[Tensor], tolerance: float) -> None:
    """Check that no number of one list differs from that in the other by more than ``tolerance``."""
    for one, other in zip(ours, theirs, strict=True):
        assert (one.double() - other.double()).abs().max().item() <= tolerance, name
