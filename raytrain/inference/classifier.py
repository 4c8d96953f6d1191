"""A trained network, ready to use: with its classes and everything that must happen to an image before it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from raytrain.config import TrainConfig
from raytrain.data.dataset import decoded_shape
from raytrain.data.decode import decode
from raytrain.errors import UsageError
from raytrain.runs import records
from raytrain.storage.base import Store
from raytrain.training.augment import Augment
from raytrain.training.checkpoint import identity_of, read_checkpoint
from raytrain.training.model import build_model


class Classifier(nn.Module):
    """The network of a run in eval mode: decoded images in, logits out.

    ``classes`` are the names that the logits stand for, ``shape`` the shape of the images that it takes, ``checkpoint`` the
    path of the weights within the run.
    """

    def __init__(self, config: TrainConfig, classes: tuple[str, ...], checkpoint: str) -> None:
        super().__init__()
        assert config.mean is not None and config.std is not None, "a run keeps its statistics"
        self.classes = classes
        self.shape = decoded_shape(config)
        self.checkpoint = checkpoint
        self.network = build_model(config.model, len(classes), config.channels, config.seed)
        self._augment = Augment(config, config.mean, config.std)
        if config.precision == "float64":
            self.network.double()

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, num_classes) of ``images``, uint8 (B, H, W, C), resized and normalised as in training."""
        return self.network(self._augment.evaluate(images))

    @torch.no_grad()
    def classify(self, files: Sequence[str | Path | bytes]) -> list[tuple[str, float]]:
        """Class and probability of each image file, given as a path or as its bytes; raises BadImage for one that is none."""
        contents = [file if isinstance(file, bytes) else Path(file).read_bytes() for file in files]
        pixels = np.stack([decode(content, self.shape) for content in contents])
        device = next(self.network.parameters()).device
        scores, places = self(torch.from_numpy(pixels).to(device)).softmax(dim=1).max(dim=1)
        return [(self.classes[place], score) for place, score in zip(places.tolist(), scores.tolist(), strict=True)]


def load(run: str, *, storage: str = "./runs") -> Classifier:
    """The network of ``run`` with the weights of its best checkpoint (the newest where it was never evaluated), on the CPU.

    Raises UsageError where there is no such run or it has no checkpoint.
    """
    return load_from(records.open_run(storage, run), run)


def load_from(store: Store, run: str) -> Classifier:
    """See :func:`load`; ``store`` is the run's place in storage."""
    path = records.best_checkpoint(store)
    if path is None:
        raise UsageError(f"Run {run!r} has no checkpoint yet; it writes one after its first epoch, and when it is stopped.")
    content = read_checkpoint(store, path)
    classifier = Classifier(records.read_config(store), identity_of(content).classes, path)
    classifier.network.load_state_dict(content["state"]["model"])
    return classifier.eval()
