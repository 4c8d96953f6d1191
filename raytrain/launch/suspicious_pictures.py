"""Pictures of the training images whose labels look wrong, in ``suspicious-labels.json``, which the page shows.

The workers report these images as rows of the manifest. The driver has the manifest, and may read the files, so it
writes the document.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from raytrain.data.dataset import Dataset
from raytrain.data.images.crop_box import Pixels
from raytrain.data.images.fetch_and_decode import ImageReader
from raytrain.data.images.image_format import ImageShape
from raytrain.data.images.png_url import png_url
from raytrain.errors import RaytrainError
from raytrain.monitor.snapshot import Snapshot
from raytrain.runs.documents import SUSPICIOUS_LABELS, plain, write_json
from raytrain.runs.metric_row import SuspiciousLabel
from raytrain.storage.store import Store

_MAX_SIDE = 96  # pixels


class SuspiciousPictures:
    """Writes the suspicious images in a run's snapshots into the run's ``store``; ``data`` is the run's data set.

    Example::

        pictures = SuspiciousPictures(store, data)
        pictures.update(monitor.snapshot())
    """

    def __init__(self, store: Store, data: Dataset) -> None:
        self._store, self._data = store, data
        self._written: Sequence[SuspiciousLabel] = ()
        self._image_of: dict[int, str | None] = {}  # data URLs by sample; None if an image cannot be read

    def update(self, snapshot: Snapshot) -> None:
        """Write the suspicious images of ``snapshot``, unless they are written already.

        If that fails, nothing is raised or reported: the next call tries it again.
        """
        labels = snapshot.suspicious
        if not labels or labels == self._written:
            return
        train = self._data.train
        # Errors are ignored, because the run does not need pictures: storage may be out of reach, or no process may
        # start to decode.
        with suppress(RaytrainError, OSError, RuntimeError):
            # Most images stay the same from one evaluation to the next, so those in memory are not read again.
            samples = [label.sample for label in labels]
            self._image_of = {sample: self._image_of[sample] for sample in samples if sample in self._image_of}
            if new := [sample for sample in samples if sample not in self._image_of]:
                pictures = read_training_pictures(self._data, new, _MAX_SIDE)
                urls = [None if pixels is None else png_url(pixels) for pixels in pictures]
                self._image_of.update(zip(new, urls, strict=True))
            rows = [
                {
                    "key": train.keys[label.sample].as_py(),
                    "label": train.classes[train.labels[label.sample]],
                    "suggested": train.classes[label.suggested],
                    "margin": round(label.margin, 4),
                    "loss": round(label.loss, 4),
                    "draws": label.draws,
                    "image": self._image_of[label.sample],
                }
                for label in labels
            ]
            write_json(self._store, SUSPICIOUS_LABELS, plain({"step": snapshot.step, "labels": rows}))
            self._written = labels


def read_training_pictures(data: Dataset, samples: Sequence[int], max_side: int) -> list[Pixels | None]:
    """Return the training images with the numbers ``samples``, each uint8 (H, W, C), or None if it is unreadable.

    They are cropped as for an evaluation, and up to ``max_side`` pixels wide and high. Raises StorageError if storage
    is out of reach.
    """
    (height, width, channels), cropping, _ = data.evaluation_format
    factor = min(1.0, max_side / max(height, width))
    shape = ImageShape(max(1, round(height * factor)), max(1, round(width * factor)), channels)
    with ImageReader(data.train_store, shape, cropping, isolated=True) as reader:
        images, unreadable = reader.read(data.train.select(np.array(samples, np.int64)))
    return [None if index in unreadable else image for index, image in enumerate(images)]
