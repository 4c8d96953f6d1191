"""A trained network with its preprocessing and class names."""

from __future__ import annotations

from collections.abc import Sequence, Set
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from raytrain.config import ResolvedConfig
from raytrain.config.evaluation import TestView
from raytrain.data.dataset import evaluation_format
from raytrain.data.images.decode import decode
from raytrain.inference.trained_run import read_trusted_config
from raytrain.runs.checkpoint_files import require_checkpoint, stored_thresholds
from raytrain.runs.documents import open_run
from raytrain.storage.store import Store
from raytrain.training.augment import Augment
from raytrain.training.checkpoint import read_checkpoint
from raytrain.training.evaluation import with_views
from raytrain.training.evaluation_metrics import DEFAULT_THRESHOLD
from raytrain.training.model import build_model


class Classifier(nn.Module):
    """The network of a run, from decoded images to logits.

    Attributes:
        classes: the names of the classes, in the order of the logits.
        shape: the shape of the images that the network takes.
        cropping: what it sees of an image file.
        checkpoint: the path of the weights within the run.
        test_views: copies of an image over which the logits are averaged: flip (mirrored), shift (by a pixel).
        thresholds: the probability of each class from which on an image has it; None if an image has one class.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        classes: tuple[str, ...],
        checkpoint: str,
        thresholds: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        self.classes = classes
        self.thresholds = (thresholds or [DEFAULT_THRESHOLD] * len(classes)) if config.multi_label else None
        self.shape, self.cropping = evaluation_format(config)
        self.checkpoint = checkpoint
        self.test_views: Set[TestView] = frozenset(config.test_views)
        self.network = build_model(config.model, len(classes), config.channels, config.seed, config.full_image_size)
        self._augment = Augment(config)
        if config.precision == "float64":
            self.network.double()

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, num_classes) of ``images``, uint8 (B, H, W, C), resized and normalised as in training."""
        network = with_views(self.network, self.test_views)
        return network(self._augment.evaluate(images))

    @torch.no_grad()
    def probabilities(self, images: Tensor) -> Tensor:
        """The probability of each class, float64 (B, num_classes), for ``images`` as in :meth:`forward`."""
        logits = self(images).double()
        return logits.softmax(dim=1) if self.thresholds is None else logits.sigmoid()

    def classify(self, files: Sequence[str | Path | bytes]) -> list[tuple[str, float]]:
        """Predict the class of each image file, given as a path or as its bytes, and its probability.

        It is the likeliest class, also if an image may have several. Raises BadImage if a file cannot be decoded.
        """
        scores, labels = self._file_probabilities(files).max(dim=1)
        return [(self.classes[label], score) for label, score in zip(labels.tolist(), scores.tolist(), strict=True)]

    def classify_all(self, files: Sequence[str | Path | bytes]) -> list[dict[str, float]]:
        """The classes that each image file has by their thresholds, with their probabilities.

        It is for a run whose images may have several classes. Raises BadImage if a file cannot be decoded.
        """
        assert self.thresholds is not None
        rows = [
            zip(self.classes, row, self.thresholds, strict=True) for row in self._file_probabilities(files).tolist()
        ]
        return [{name: score for name, score, threshold in row if score >= threshold} for row in rows]

    def _file_probabilities(self, files: Sequence[str | Path | bytes]) -> Tensor:
        contents = [file if isinstance(file, bytes) else Path(file).read_bytes() for file in files]
        images = np.stack([decode(content, self.shape, self.cropping.crop) for content in contents])
        device = next(self.network.parameters()).device
        return self.probabilities(torch.from_numpy(images).to(device))


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
    classes = checkpoint.identity.classes
    classifier = Classifier(config, classes, path, stored_thresholds(store, path, len(classes)))
    classifier.network.load_state_dict(checkpoint.weights or {})
    return classifier.eval()
