"""Mean and standard deviation of the training images, with a warning of images that are nearly black or white."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from raytrain.data.images.crop_box import Pixels
from raytrain.data.images.decode import is_unusual_png
from raytrain.data.images.fetch_and_decode import ImageReader, read_contents, readable_images
from raytrain.data.images.image_format import ImageFormat
from raytrain.data.labels.manifest import Manifest
from raytrain.storage.store import Store

_log = logging.getLogger(__name__)
_NUM_MEASURED_IMAGES = 1024
_NUM_LOOKED_AT = 32  # for images that are nearly black, if mean and deviation are given
_NEARLY_BLACK = 32  # of 256; no image has all of its values below, unless it is dark by mistake
_MOST_ONE_COLOUR = 0.05  # fraction of the images that may be nearly black, or white, without a line


def measure_mean_std(
    store: Store, manifest: Manifest, format: ImageFormat, seed: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of each channel in 0..1, over at most 1,024 random images.

    Raises UsageError if none of these can be decoded.
    """
    chosen = manifest.select(np.sort(manifest.random_order(seed)[:_NUM_MEASURED_IMAGES]))
    images = readable_images(store, chosen, format.shape, format.cropping)
    _report_black_and_white(images, len(images), manifest.url)
    # Add up values and squares image by image: all images at once would take gigabytes as float64.
    sums = np.zeros((2, format.shape.channels))
    for image in images:
        values = image.reshape(-1, format.shape.channels) / 255
        sums += values.sum(axis=0), np.square(values).sum(axis=0)
    mean, mean_of_squares = sums / (len(images) * format.shape.height * format.shape.width)
    std = np.sqrt(np.maximum(mean_of_squares - mean**2, 0)).clip(min=1e-3)  # of images of one colour it would be 0
    return tuple(mean.round(6).tolist()), tuple(std.round(6).tolist())


def look_for_black_and_white(store: Store, manifest: Manifest, format: ImageFormat, seed: int) -> None:
    """Log if some of at most 32 random images are nearly black or nearly white.

    Only PNGs are fetched, and only those decoded that have more than 8 bits a value, one channel, a palette or
    transparency: others are seldom of one colour by mistake.
    """
    chosen = np.sort(manifest.random_order(seed)[:_NUM_LOOKED_AT])
    keys = manifest.keys_of(chosen.tolist())
    pngs = [index for index, key in zip(chosen, keys, strict=True) if key.lower().endswith(".png")]
    contents = read_contents(store, manifest.select(np.array(pngs, np.int64))) if pngs else []
    unusual = [
        index
        for index, content in zip(pngs, contents, strict=True)
        if isinstance(content, bytes) and is_unusual_png(content)
    ]
    if not unusual:
        return
    with ImageReader(store, format.shape, format.cropping, isolated=True) as reader:
        images, bad = reader.read(manifest.select(np.array(unusual)))
    decoded = [image for position, image in enumerate(images) if position not in bad]
    _report_black_and_white(decoded, len(chosen), manifest.url)


def _report_black_and_white(images: Sequence[Pixels], num_measured: int, url: str) -> None:
    """Log how many of ``images`` are nearly black or nearly white, if that is more than one in twenty of all measured.

    Such files are seldom meant so. A camera or a scanner of 12 bits leaves the upper 4 of 16 empty, a mask holds small
    numbers, and a white drawing on a transparent ground is white on white.
    """
    num_black = sum(int(image.max()) < _NEARLY_BLACK for image in images)
    num_white = sum(int(image.min()) > 255 - _NEARLY_BLACK for image in images)
    if num_black > _MOST_ONE_COLOUR * num_measured:
        _log.warning(
            "%s of %s training images of %s that were measured are nearly black: no value is above %s of 255. Of 16 "
            "bits a value the upper 8 are read, so 12 bits (up to 4,095) have to be scaled to 65,535; and masks, which "
            "hold small numbers, are no images.",
            *(f"{num_black:,}", f"{num_measured:,}", url, _NEARLY_BLACK - 1),
        )
    if num_white > _MOST_ONE_COLOUR * num_measured:
        _log.warning(
            "%s of %s training images of %s that were measured are nearly white: no value is below %s of 255. What is "
            "transparent is white, so a white drawing needs another ground.",
            *(f"{num_white:,}", f"{num_measured:,}", url, 256 - _NEARLY_BLACK),
        )
