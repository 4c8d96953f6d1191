"""The first training images of a run, as its network sees them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from raytrain.config import ResolvedConfig, TrainConfig
from raytrain.data.dataset import Dataset
from raytrain.data.images.decode import Pixels
from raytrain.data.images.image_reader import ImageReader
from raytrain.data.local_batch import LocalBatch
from raytrain.data.plan.permutation import Int64s
from raytrain.launch.run_parts import load_transforms
from raytrain.training.augment import Augment, build_transforms
from raytrain.training.batch import Batch, mix_batch, to_batch
from raytrain.training.gallery import screen_pixels

_MAX_SIDE = 256
"""Height and width, in pixels, beyond which images are made smaller."""


@dataclass(frozen=True, eq=False)
class FirstImages:
    """Images after augmentation, and what each is to be recognised as: a class, or two with their shares if mixed."""

    pixels: Pixels  # (n, H, W, C)
    labels: tuple[str, ...]  # (n,)


def first_images(config: TrainConfig, data: Dataset, most: int) -> FirstImages:
    """At most so many images from the start of the first global batch, without those that cannot be read.

    Raises what :meth:`ImageReader.read` raises, and UsageError if a transform is unfit.
    """
    workers = config.workers if isinstance(config.workers, int) else 1
    resolved = replace(config, worker_load=None).resolve(
        name="look", num_workers=workers, device="cpu", mean=data.mean, std=data.std
    )
    plan = data.plan(resolved)
    draws = plan.batch_samples(plan.batch(0))
    if config.mixup or config.cutmix:
        draws = np.roll(draws, 1)[: most + 1]  # each is mixed with the one before it, the first one with the last
        batch = _batch(resolved, data, draws)
        mixed = mix_batch(
            batch,
            len(data.train.classes),
            config.seed,
            mixup=config.mixup,
            cutmix=config.cutmix,
            label_sets=_label_sets(data),
        )
        return _shown(resolved, mixed, data.train.classes, slice(1, batch.num_used))
    batch = _batch(resolved, data, draws[:most])
    return _shown(resolved, batch, data.train.classes, slice(batch.num_used))


def _batch(config: ResolvedConfig, data: Dataset, draws: Int64s) -> Batch:
    plan = data.plan(config)
    samples = draws % plan.num_samples
    wanted = data.train.select(samples)
    crops = data.train_format.cropping.crops(draws, epoch=0)
    images, bad = ImageReader(data.train_store, *data.train_format, isolated=True).read(wanted, crops)
    good = np.delete(np.arange(len(draws)), list(bad))
    local = LocalBatch(
        plan.batch(0), images[good], wanted.labels[good].astype(np.int64), samples[good], draws[good], (len(good),)
    )
    augment = Augment(config, build_transforms(config, load_transforms(config)))
    return to_batch(local, augment, torch.device("cpu"), training=True, label_sets=_label_sets(data))


def _label_sets(data: Dataset) -> Tensor | None:
    return None if data.train.label_sets is None else torch.from_numpy(data.train.label_sets)


def _shown(config: ResolvedConfig, batch: Batch, classes: tuple[str, ...], rows: slice) -> FirstImages:
    pixels = screen_pixels(batch.images[rows], config, _MAX_SIDE)
    return FirstImages(pixels, tuple(_described(target, classes) for target in batch.targets[rows]))


def _described(target: Tensor, classes: tuple[str, ...]) -> str:
    """The class that ``target``, (), says, or the classes, (C,), the likeliest first, with probabilities if mixed."""
    if not target.ndim:
        return classes[int(target)]
    shares = [(classes[label], float(target[label])) for label in target.argsort(descending=True).tolist()]
    return ", ".join(name if share == 1 else f"{share:.0%} {name}" for name, share in shares if share > 0)
