"""The loss that the options ask for, with class weights, label smoothing and focal loss; checks of logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from raytrain.config import TrainConfig
from raytrain.errors import UsageError, flag, format_count


class Loss:
    """Mean over images of the loss that the options ask for: cross entropy, or binary cross entropy of each class.

    The sum is divided by the number of images, also with class weights, so that the loss does not depend on how a batch
    is divided over workers. If an image may have several classes, its loss is the mean of their binary cross entropies.

    Example::

        loss = Loss(config, num_classes=10, class_weights=None, device=device)
        loss(model(images), labels).backward()

    Args:
        num_classes: C.
        class_weights: the weight of each class, (C,); None for equal weights. If an image may have several classes, a
            class's weight applies to the images that have the class.
        observe: called with the logits and the targets of each call, before the loss is computed.
    """

    def __init__(
        self,
        config: TrainConfig,
        num_classes: int,
        class_weights: Sequence[float] | None,
        device: torch.device,
        observe: Callable[[Tensor, Tensor], object] = lambda logits, targets: None,
    ) -> None:
        self._observe = observe
        self._config, self._num_classes = config, num_classes
        self._weights = None if class_weights is None else torch.tensor(class_weights, device=device)
        self._made_by = ""  # torch's name of the operation that made the last logits
        self._got_labels = False  # True once a loss to learn from was computed of labels, not of probabilities

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss, (), of ``logits`` (m, C) with ``targets``: labels (m,), or probabilities (m, C).

        Raises UsageError if the logits have another shape, or for labels if an image may have several classes.
        """
        config = self._config
        check_logits("run.loss", logits, targets, self._num_classes)
        if config.multi_label and targets.ndim == 1:
            raise UsageError(
                "run.loss got batch.labels, which number sets of classes here, because an image may have several; give "
                "it batch.targets, one number per image and class."
            )
        self._made_by = "" if logits.grad_fn is None else logits.grad_fn.name()
        self._got_labels |= targets.ndim == 1 and logits.requires_grad
        self._observe(logits, targets)

        # Always the mean over the images: torch's own mean would divide by the class weights of the images that happen
        # to be in this worker's batch.
        weights = None if self._weights is None else self._weights.to(logits.dtype)
        if config.multi_label:
            losses = F.binary_cross_entropy_with_logits(
                logits, targets.to(logits.dtype), pos_weight=weights, reduction="none"
            )
            return losses.mean()
        losses = F.cross_entropy(logits, targets, weights, reduction="none", label_smoothing=config.label_smoothing)
        # Focal loss (Lin et al. 2017): images that the network already recognises count less.
        if config.focal_gamma:
            # Cross entropy is minus the logarithm of the probability of the right class.
            probabilities = (-F.cross_entropy(logits, targets, reduction="none")).exp()
            losses = losses * (1 - probabilities) ** config.focal_gamma
        return losses.mean()

    def notes(self) -> Iterator[str]:
        """Yield a sentence on each mistake that the calls so far show.

        The mistakes are: labels in place of targets, although images are mixed; and probabilities in place of logits.
        """
        mixing = [flag(name) for name in ("mixup", "cutmix") if getattr(self._config, name) > 0]
        if mixing and self._got_labels:
            yield (
                f"{' and '.join(mixing)}: run.loss gets the labels that the images had before they were mixed; give it "
                "batch.targets in place of batch.labels"
            )
        if self._made_by.startswith(("Softmax", "Sigmoid")):
            function = self._made_by.partition("Backward")[0].lower()
            yield (
                f"the network ends with a {function}, but run.loss takes logits: leave that layer out, so that the "
                "network learns faster"
            )


def check_logits(taker: str, logits: object, labels: Tensor, num_classes: int) -> None:
    """Raise UsageError unless ``logits`` are a tensor (m, C) for the ``labels``, (m, ...), of m images.

    ``taker`` is the call that got the logits, as the loop writes it, such as ``run.loss``.
    """
    if not isinstance(logits, Tensor):
        raise UsageError(
            f"{taker} got a {type(logits).__name__} from the network; give it the logits, a tensor with one row per "
            "image and one number per class: the network returns that, or your own loop takes it out."
        )
    if logits.shape != (len(labels), num_classes):
        raise UsageError(
            f"{taker} got logits of the shape {tuple(logits.shape)} for {format_count(len(labels), 'image')} and "
            f"{format_count(num_classes, 'class')}; give one row per image, with one number "
            "per class, as a network with that many outputs returns them."
        )


def check_answers(logits: Any, labels: Tensor, num_classes: int) -> None:
    """Raise UsageError, for ``run.accuracy``, unless ``logits`` are (m, C) for m ``labels``.

    C may be more than the number of classes, because the largest logit is the answer all the same.
    """
    if isinstance(logits, Tensor) and logits.ndim == 2 and len(logits) == len(labels):
        num_classes = max(num_classes, logits.shape[1])
    check_logits("run.accuracy", logits, labels, num_classes)
