"""A trained network that is ready to use, with its preprocessing and the names of its classes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from raytrain.config import ResolvedConfig
from raytrain.data.dataset import evaluation_format
from raytrain.data.decode import decode
from raytrain.inference.trusted_config import read_trusted_config
from raytrain.runs.checkpoint_files import require_checkpoint
from raytrain.runs.documents import open_run
from raytrain.storage.base import Store
from raytrain.training.augment import Augment
from raytrain.training.checkpoint import read_checkpoint
from raytrain.training.model import build_model


class Classifier(nn.Module):
    """The network of a run, from decoded images to logits.

    Attributes:
        classes: the names of the classes, in the order of the logits.
        shape: the shape of the images that the network takes.
        framing: what it sees of an image file.
        checkpoint: the path of the weights within the run.
    """

    def __init__(self, config: ResolvedConfig, classes: tuple[str, ...], checkpoint: str) -> None:
        super().__init__()
        self.classes = classes
        self.shape, self.framing = evaluation_format(config)
        self.checkpoint = checkpoint
        self.network = build_model(config.model, len(classes), config.channels, config.seed, config.image_size)
        self._augment = Augment(config)
        if config.precision == "float64":
            self.network.double()

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, num_classes) of ``images``, uint8 (B, H, W, C), resized and normalised as in training."""
        return self.network(self._augment.evaluate(images))

    @torch.no_grad()
    def classify(self, files: Sequence[str | Path | bytes]) -> list[tuple[str, float]]:
        """Predict the class of each image file, given as a path or as its bytes, and its probability.

        Raises BadImage if a file cannot be decoded.
        """
        contents = [file if isinstance(file, bytes) else Path(file).read_bytes() for file in files]
        images = np.stack([decode(content, self.shape, self.framing.frame) for content in contents])
        device = next(self.network.parameters()).device
        scores, labels = self(torch.from_numpy(images).to(device)).softmax(dim=1).max(dim=1)
        return [(self.classes[label], score) for label, score in zip(labels.tolist(), scores.tolist(), strict=True)]


def load(run: str, *, storage: str = "./runs", trust: bool = False) -> Classifier:
    """Load the network of ``run`` onto the CPU, with the weights of its best checkpoint.

    If no checkpoint was evaluated, it is the newest one. Raises UsageError if there is no such run, if it has no
    checkpoint, or if its network is a function of its author's own: that function runs only with ``trust``.
    """
    return load_classifier(open_run(storage, run), run, trust=trust)


def load_classifier(store: Store, run: str, *, trust: bool) -> Classifier:
    """The same as :func:`load`, from the ``store`` of the run."""
    config = read_trusted_config(store, trust=trust)
    path = require_checkpoint(store, run)
    checkpoint = read_checkpoint(store, path)
    classifier = Classifier(config, checkpoint.identity.classes, path)
    classifier.network.load_state_dict(checkpoint.weights or {})
    return classifier.eval()
