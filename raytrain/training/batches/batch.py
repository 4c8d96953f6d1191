"""A batch as a loop gets it, whole and in microbatches, and the batches of an epoch."""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from raytrain.data.labels.part_names import Part
from raytrain.errors import UsageError
from raytrain.training.exact import images_of_tensors
from raytrain.training.exact.images_of_tensors import LocalImages

BATCH_HAS = "images, labels, targets, samples, step, epoch and num_used"  # as sentences name it
_SEVERAL_CLASSES = (
    "The loop takes images and labels from a batch as a pair, and an image may have several classes, which are in "
    "batch.targets, (m, C), and not in the labels: write `for batch in loader`, and take batch.images and "
    "batch.targets by their names."
)


@dataclass(frozen=True)
class Batch:
    """This worker's slice of a global batch, ready for the network: ``images, labels = batch``.

    A worker whose slice is empty gets one black image as a placeholder, and ``num_used`` is 0: its gradients and logged
    values do not count.

    Example::

        for batch in epoch:
            loss = cross_entropy(model(batch.images), batch.labels)
    """

    images: Tensor  # (m, C, H, W), normalised and, for training, augmented; float32 (or float64)
    labels: Tensor  # (m,), int64: the class; if an image may have several classes, the number of its set of classes
    targets: Tensor  # the labels; or for mixed images and sets of classes, the probabilities of the classes (m, C)
    samples: Tensor  # (m,), int64: indices into the manifest
    step: int  # counted from 0
    epoch: int  # counted from 0
    num_used: int  # m, or 0 for a placeholder
    microbatch_sizes: tuple[int, ...]  # number of the m images in each microbatch
    is_last: bool = True  # False for a microbatch that is followed by others
    part: Part = "train"  # of the data set, to whose manifest ``samples`` refers
    begin_microbatch: Callable[..., None] | None = field(default=None, repr=False, compare=False)  # called by the run

    def __post_init__(self) -> None:
        images_of_tensors.remember(self.images, LocalImages(len(self.images), self.num_used, self.samples, self.step))

    def __iter__(self) -> Iterator[Tensor]:
        """Yield the images and the labels, like a pair from torch's ``DataLoader``.

        A loop may copy the images before it gives them to a network, so a tensor with as many rows is then taken for
        them. Raises UsageError if the loop assigns them to another number of names than two; and, without a run, in
        training, if ``targets`` says more than the labels.
        """
        # Python's own message does not say what a batch has. Each instruction is its number and its argument.
        frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
        operation, num_names = frame.f_code.co_code[frame.f_lasti :][:2]
        if dis.opname[operation] == "UNPACK_SEQUENCE":
            if num_names != 2:
                raise UsageError(
                    f"The loop takes {num_names} things from a batch, as from a data set of its own; a batch gives "
                    f"two, images and labels, and has {BATCH_HAS}: batch.samples are the indices of the images."
                )
            self._check_labels_suffice()
        images_of_tensors.expect(self.images)
        return iter((self.images, self.labels))

    def __getitem__(self, index: int | str) -> Tensor:
        """Return the images for 0 and the labels for 1, like a pair from torch's ``DataLoader``.

        Raises UsageError for a name, by which other loaders give parts of a batch, and where unpacking the pair does.
        """
        if isinstance(index, str):
            raise UsageError(f"The loop takes batch[{index!r}]; a batch has attributes, as batch.images: {BATCH_HAS}.")
        self._check_labels_suffice()
        return tuple(self)[index]

    def _check_labels_suffice(self) -> None:
        """Raise UsageError if a loop without a run would train with labels although the batch has other targets.

        A run has its own check, of the loop's code (:mod:`raytrain.training.loop_checks.unused_options`).
        """
        if self.targets.ndim == 2 and self.part == "train" and self.begin_microbatch is None:
            raise UsageError(_SEVERAL_CLASSES)

    def to(self, *device: Any, **options: Any) -> Batch:
        """Return the batch with its tensors moved like ``Tensor.to``; trainers of other libraries call this.

        A type, such as bfloat16, and a memory format are those of the images; labels and samples stay int64.
        """
        images = self.images.to(*device, **options)
        waits = {"non_blocking": options.get("non_blocking", False)}
        labels, samples = (tensor.to(images.device, **waits) for tensor in (self.labels, self.samples))
        dtype = images.dtype if self.targets.is_floating_point() else None
        targets = self.targets.to(images.device, dtype, **waits)
        return replace(self, images=images, labels=labels, targets=targets, samples=samples)

    def microbatches(self) -> Iterator[Batch]:
        """Yield this worker's slice of each microbatch that ``--accumulate`` asks for, in order.

        Compute the mean loss of each, as of a whole batch, and call its ``backward()``: the gradients add up to the
        gradient of the mean over the global batch. Batch norm treats each microbatch as a batch. A slice may be a
        placeholder. With ``run.no_sync(not microbatch.is_last)`` around each backward, the gradients are sent between
        the workers only once, not for each microbatch.

        In a run, it is noted before each one that the loop's next losses, gradients and logged values are of it.
        """
        if len(self.microbatch_sizes) == 1:
            yield self
            return
        start = 0
        for number, size in enumerate(self.microbatch_sizes, start=1):
            rows = slice(start, start + size) if size else slice(0, 1)  # any image serves as a placeholder
            tensors = {name: getattr(self, name)[rows] for name in ("images", "labels", "targets", "samples")}
            is_last = number == len(self.microbatch_sizes)
            microbatch = replace(self, **tensors, num_used=size, microbatch_sizes=(size,), is_last=is_last)
            if self.begin_microbatch is not None:
                self.begin_microbatch(microbatch, is_whole=False)
            yield microbatch
            start += size


class Epoch:
    """The batches of one epoch, over which a loop goes once; after a resume within an epoch, those that are left.

    Example::

        for epoch in run.epochs():
            for batch in epoch:
                first_of_epoch = batch.step % len(epoch) == 0
    """

    def __init__(
        self, number: int, num_steps: int, batches: Generator[Batch, None, None], is_over: Callable[[], bool]
    ) -> None:
        self.number = number
        """Counted from 0."""
        self._num_steps = num_steps
        self._batches = batches
        self._is_over = is_over  # returns True once the run is over, so that the epoch may end early

    def __len__(self) -> int:
        """Return the number of batches in the whole epoch, including those before a resume."""
        return self._num_steps

    def __iter__(self) -> Iterator[Batch]:
        """Return the batches that are left.

        Raises UsageError if the loop has had all of them, and would get none now; not after the run is over.
        """
        if inspect.getgeneratorstate(self._batches) == inspect.GEN_CLOSED and not self._is_over():
            raise UsageError(
                f"The loop goes over epoch {self.number + 1} a second time; a run gives each sample once an epoch, so "
                "keep what the second pass needs in the first one, or read the images with a raytrain.ImageLoader."
            )
        return self._batches
