"""Mixup and CutMix over the global batch: each image is mixed with the one before it in the plan, on any worker."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from raytrain.data.plan.permutation import mix
from raytrain.errors import UsageError
from raytrain.training.batches.batch import Batch

_KEY = 3  # keeps these random numbers apart from those of augmentation


def mix_batch(
    batch: Batch,
    num_classes: int,
    seed: int,
    *,
    mixup: float = 0.0,
    cutmix: float = 0.0,
    label_sets: Tensor | None = None,
) -> Batch:
    """Mix each image, and its target, with the one before it in the plan's global batch, which any worker may have.

    Every worker calls this, because workers send each other the last images of their slices. The first image is mixed
    with the last. Images that cannot be read are left out. The random numbers depend on ``seed`` and the step alone. An
    image's own share is at least half, so that ``labels`` stay the likelier classes.

    Example::

        batch = mix_batch(batch, run.num_classes, run.config.seed, mixup=0.2)

    Args:
        batch: this worker's slice of a global batch of training images.
        num_classes: C, the width of the new ``targets``, (m, C), which are probabilities.
        seed: the same on all workers; ``run.config.seed`` in a loop.
        mixup: the weight of an image is drawn from Beta(mixup, mixup) (Zhang et al. 2018); 0: no mixup.
        cutmix: a box of the other image is pasted, whose area is drawn from Beta(cutmix, cutmix) (Yun et al. 2019); 0:
            no CutMix. With both above 0, each step draws one of the two.
        label_sets: see :func:`~raytrain.training.batches.device_batches.to_batch`.

    Raises UsageError if both are 0, or one is below 0.
    """
    if not (mixup >= 0 and cutmix >= 0 and mixup + cutmix > 0):
        raise UsageError(
            f"mix_batch got mixup {mixup} and cutmix {cutmix}; give at least one that is above 0, and none below."
        )
    random = np.random.default_rng(mix(seed, batch.step, _KEY))
    cuts = cutmix > 0 and (mixup <= 0 or random.random() < 0.5)
    alpha = cutmix if cuts else mixup
    drawn_share = random.beta(alpha, alpha)
    share = max(drawn_share, 1 - drawn_share)  # of an image in its mixture
    images_before, labels_before = _images_before(batch)
    classes_of = torch.eye(num_classes, device=batch.labels.device) if label_sets is None else label_sets
    targets, targets_before = (classes_of[labels].to(batch.images.dtype) for labels in (batch.labels, labels_before))
    if cuts:
        images, share = _paste(batch.images, images_before, share, random)
    else:
        images = images_before.lerp(batch.images, share)
    return replace(batch, images=images, targets=targets_before.lerp(targets, share))


def _paste(images: Tensor, pasted: Tensor, share: float, random: np.random.Generator) -> tuple[Tensor, float]:
    """Paste a box of ``pasted``, about 1 - ``share`` of its area, and return the images and the share that is left.

    The box has the shape of the images and a random centre, and is cut off at their edges.
    """
    height, width = images.shape[2:]
    box: list[slice] = []
    for side in (height, width):
        centre, reach = random.random() * side, (1 - share) ** 0.5 * side / 2
        box.append(slice(max(round(centre - reach), 0), min(round(centre + reach), side)))
    rows, columns = box
    mixed = images.clone()
    mixed[:, :, rows, columns] = pasted[:, :, rows, columns]
    area = (rows.stop - rows.start) * (columns.stop - columns.start)
    return mixed, 1 - area / (height * width)


def _images_before(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the image before each image of this worker's slices, (m, C, H, W), and its label, (m,).

    The order is that of the global batch, whose first image comes after its last one. The global batch consists of P
    microbatches, and each of them of one slice for each of the N workers. All workers call this.
    """
    # Within a slice, the image before is the next row up.
    images, labels = batch.images.roll(1, 0), batch.labels.roll(1, 0)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return images, labels

    # Only the first image of a slice has its predecessor on another worker, so each sends the last one of each slice.
    num_microbatches, world_size = len(batch.microbatch_sizes), dist.get_world_size()
    sizes = torch.tensor(batch.microbatch_sizes).to(batch.labels.device, non_blocking=True)
    last_rows = (sizes.cumsum(0) - 1).clamp(min=0)  # (P,), the last row of each slice
    last_images = _gathered(batch.images[last_rows].contiguous())  # (N, P, C, H, W)
    last_labels, all_sizes = _gathered(torch.stack([batch.labels[last_rows], sizes], dim=1)).unbind(
        dim=2
    )  # (N, P) each

    # Empty slices have no last image. The predecessor is in the last slice before it that has images, or, at the start
    # of the global batch, in the last slice with images of the whole batch.
    # For each slice, find the last one up to it that has images: -1 if there is none.
    order = torch.arange(num_microbatches * world_size, device=all_sizes.device)  # of slices: by microbatch, then rank
    with_images = torch.where(all_sizes.T.flatten() > 0, order, -1).cummax(dim=0).values
    with_images = torch.where(with_images < 0, with_images[-1].clamp(min=0), with_images)
    slices_before = with_images.roll(1)[dist.get_rank() :: world_size]  # (P,), for this worker's slices
    ranks, microbatches = slices_before % world_size, slices_before // world_size
    images_before, labels_before = last_images[ranks, microbatches], last_labels[ranks, microbatches]

    # Put them before the first image of each slice.
    start = 0
    for number, size in enumerate(batch.microbatch_sizes):
        if size:
            images[start], labels[start] = images_before[number], labels_before[number]
        start += size
    return images, labels


def _gathered(rows: Tensor) -> Tensor:
    """Return the ``rows`` of all workers, (n, ...) on each, as (N, n, ...)."""
    together = rows.new_empty(dist.get_world_size() * len(rows), *rows.shape[1:])
    dist.all_gather_into_tensor(together, rows)
    return together.unflatten(0, (-1, len(rows)))
