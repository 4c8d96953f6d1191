"""Decoded images that stay on the Ray of ``raytrain up``, so that the next run on the same ones reads none of them.

Blocks in the object store end with the process that owns them. There, that is an actor, which outlives the runs.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.actor import ActorProxy

from raytrain.data.block_order import CacheOrder
from raytrain.data.blocks import smallest_label
from raytrain.data.decode import ImageFormat
from raytrain.data.manifest import Manifest

_NAME, _NAMESPACE = "images", "raytrain"


@dataclass
class KeptImages:
    """A data set in the object store: the order of its samples, and its blocks so far."""

    order: CacheOrder
    blocks: list[Any] = field(default_factory=list)  # list[ObjectRef[pa.Table]]
    readable: bool = True
    """Whether none of the images so far is unreadable. Each run tells its user of those, so it has to read them."""

    @property
    def whole(self) -> bool:
        """Whether another run can use it."""
        return self.readable and len(self.blocks) == len(self.order)


class ImageKeeper:
    """Owns the blocks of the run that uses the cluster, one at a time, and keeps those of whole data sets after it."""

    def __init__(self) -> None:
        self._sets: dict[str, KeptImages] = {}

    def begin(self, wanted: dict[str, CacheOrder]) -> dict[str, KeptImages]:
        """Release what a run does not use, and expect what it reads; returns the data sets of the run.

        ``wanted`` says, by a data set's :func:`identity`, in which order its blocks come if it is not there.
        """
        kept = self._whole()
        self._sets = {key: kept.get(key, KeptImages(order)) for key, order in wanted.items()}
        return self._sets

    def add(self, key: str, block: list[Any]) -> list[Any]:
        """Copy the next block of a data set (the only item of a list); returns the copy, which the actor owns."""
        images = self._sets[key]
        table = ray.get(block[0])
        images.blocks.append(ray.put(table))
        images.readable &= smallest_label(table) >= 0
        return images.blocks[-1:]

    def end(self) -> None:
        """The run has ended: release what another one cannot use."""
        self._sets = self._whole()

    def _whole(self) -> dict[str, KeptImages]:
        return {key: images for key, images in self._sets.items() if images.whole}


ImageKeeperHandle = ActorProxy[ImageKeeper]


def image_keeper() -> ImageKeeperHandle:
    """The actor that keeps images in this cluster, which is started if there is none."""
    actor = ray.remote(ImageKeeper)
    options = {"name": _NAME, "namespace": _NAMESPACE, "lifetime": "detached", "get_if_exists": True, "num_cpus": 0}
    return actor.options(**options).remote()


def identity(name: str, images: Manifest, format: ImageFormat) -> str:
    """What is the same for two runs whose decoded images are the same: SHA-256 of their files and their format."""
    parts = [name, images.url, images.digest, repr(format), *images.etags.to_pylist()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
