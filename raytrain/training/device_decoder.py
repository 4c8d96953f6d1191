"""Decodes a worker's training images on its GPU (``--decoder gpu``): the worker gets files instead of pixels.

The path of a local batch of files, in the thread that reads ahead:

1. :func:`raytrain.data.images.decode.plain_jpeg_size` reads each header. Files that are no plain JPEGs, or have more
   pixels than a GPU should decode at once, go to processes that decode on the CPU, as all images do without a GPU: an
   image that kills such a process counts as unreadable. Files that the GPU refuses go there, too.
2. :func:`decode_jpegs` decodes the plain JPEGs, some at a time, as whole images. Only this needs a GPU with nvJPEG.
3. :func:`cut_and_resize` cuts out the crop boxes and resizes them, all in a few kernels.

The pixels of an image are the same in any batch: its crop box depends only on the seed, the epoch and the sample, and
no sum includes other images, or adds its terms in another order. So runs on any number of GPUs of one kind see the same
pixels. They differ by a few of 255 levels from those of libjpeg-turbo on a CPU: nvJPEG rounds differently, and decodes
the whole image, where a CPU decodes large ones at 1/2, 1/4 or 1/8 of their size.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from raytrain.config import ResolvedConfig
from raytrain.config.network import Interpolation, Size
from raytrain.data.blocks import Files, LocalBatch
from raytrain.data.dataset import training_format
from raytrain.data.images.crop_box import Crop, CropBox, Pixels
from raytrain.data.images.decode import plain_jpeg_size
from raytrain.data.images.decode_process import DecodeProcesses
from raytrain.data.images.image_format import BadImage
from raytrain.errors import UsageError
from raytrain.runs.metric_row import SkippedImage
from raytrain.training.protocols import BatchSource, DecodeReporter

MAX_DEVICE_BYTES = 128 << 20
"""Most bytes of pixels of one image on a device; a larger image is decoded on the CPU."""
CHUNK_BYTES = 64 << 20  # of pixels that are decoded together, unless a single image has more
_NUM_CPU_DECODERS = 4  # at the same time, for each worker
_SUPPORT: dict[Interpolation, float] = {"bilinear": 1.0, "bicubic": 2.0}  # pixels on each side within a filter's reach


def decode_jpegs(files: Sequence[bytes], channels: int, device: torch.device) -> list[Tensor]:
    """Return the pixels of JPEGs, turned upright, uint8 (C, h, w) each, on ``device``; RuntimeError if it can't.

    Example: ``decode_jpegs([Path("cat.jpg").read_bytes()], 3, torch.device("cuda"))``
    """
    from torchcodec.decoders import decode_jpeg  # pyright: ignore[reportPrivateImportUsage] ; it is documented there

    encoded = [torch.from_numpy(np.frombuffer(bytearray(file), np.uint8)) for file in files]
    decoded: Any = decode_jpeg(encoded, mode="GRAY" if channels == 1 else "RGB", device=device)
    return decoded


class DeviceDecoder:
    """Decodes the files of local batches on a device. ``source`` knows the images' keys, for ``reporter``.

    Raises UsageError if the device can't decode a small JPEG.

    Example:
        >>> decoder = DeviceDecoder(config, source, torch.device("cuda"), reporter)
        >>> batches = map(decoder, source.train(first_step=0))
    """

    def __init__(
        self, config: ResolvedConfig, source: BatchSource, device: torch.device, reporter: DecodeReporter
    ) -> None:
        self._shape, self._cropping, _ = training_format(config)
        self._source, self._device, self._reporter = source, device, reporter
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._processes = DecodeProcesses(self._shape)
        self._threads = ThreadPoolExecutor(_NUM_CPU_DECODERS, thread_name_prefix="decode")  # none before the first file
        import simplejpeg

        # Decode a small JPEG, so that a missing library is reported before the first image.
        try:
            decode_jpegs([simplejpeg.encode_jpeg(np.zeros((16, 16, 3), np.uint8))], self._shape.channels, device)
        except (ImportError, OSError, RuntimeError) as error:
            reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
            raise UsageError(
                f"--decoder is gpu, and torchcodec decodes no JPEG on {device} here ({reason}); install one that fits "
                f"torch {torch.__version__}, or give --decoder cpu."
            ) from error

    def close(self) -> None:
        """End the processes that decode on the CPU."""
        self._threads.shutdown(cancel_futures=True)
        self._processes.close()

    def __call__(self, local: LocalBatch) -> LocalBatch:
        """Return a batch of files with their pixels, uint8 (m, H, W, C), on the device; without unreadable images."""
        if not isinstance(local.images, Files) or not len(local.labels):
            return local
        files, crops = local.images.contents(), self._cropping.crops(local.draws, local.batch.epoch)

        # Find the files that the CPU has to decode. It begins at once, and works at the same time as the device.
        sizes: dict[int, Size] = {}
        kinds: dict[int, str] = {}
        for row, file in enumerate(files):
            size = plain_jpeg_size(file)
            if isinstance(size, str):
                kinds[row] = size
            elif math.prod(size) * self._shape.channels > MAX_DEVICE_BYTES:
                kinds[row] = "JPEG of too many pixels for a GPU"
            else:
                sizes[row] = size
        on_cpu = {row: self._threads.submit(self._decode_on_cpu, files[row], crops[row]) for row in kinds}

        # Decode all others on the device, in chunks, and give the CPU those that the device refuses.
        unreadable: dict[int, str] = {}
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            pixels = torch.zeros((len(files), *self._shape), dtype=torch.uint8, device=self._device)
            for rows in _chunks(sizes, self._shape.channels):
                images = self._decode({row: files[row] for row in rows}, sizes)
                for row in (row for row in rows if row not in images):
                    kinds[row] = "JPEG that nvJPEG refuses"
                    on_cpu[row] = self._threads.submit(self._decode_on_cpu, files[row], crops[row])
                if images:
                    boxes = [crops[row](sizes[row], self._shape.size) for row in images]
                    resized = cut_and_resize(list(images.values()), boxes, self._shape.size)
                    pixels[torch.tensor(list(images)).to(self._device, non_blocking=True)] = resized

            # Copy the images that the CPU has decoded to the device.
            for row, future in on_cpu.items():
                try:
                    pixels[row] = torch.from_numpy(future.result().copy()).to(self._device, non_blocking=True)
                except BadImage as error:
                    unreadable[row] = str(error)
            if unreadable:
                kept = [row for row in range(len(files)) if row not in unreadable]
                pixels = pixels[torch.tensor(kept, dtype=torch.long).to(self._device, non_blocking=True)]
            if self._stream is not None:
                self._stream.synchronize()  # this thread may wait: it hands over finished pixels

        # Report what the CPU decoded, and leave out images that it could not read, either.
        for kind, count in Counter(kind for row, kind in kinds.items() if row not in unreadable).items():
            self._reporter.decoded_on_cpu(count, kind)
        is_unreadable = np.isin(np.arange(len(files)), list(unreadable))
        if unreadable:
            keys = {row: self._source.key(int(local.samples[row])) for row in sorted(unreadable)}
            self._reporter.skip([SkippedImage(key, unreadable[row]) for row, key in keys.items()])
        return replace(local.without(is_unreadable), images=pixels)

    def _decode(self, files: dict[int, bytes], sizes: dict[int, Size]) -> dict[int, Tensor]:
        """Return the images that the device decodes, by row, if they have the sizes in their headers.

        If the device refuses one image, it refuses the whole call: then each is tried alone.
        """
        try:
            decoded = decode_jpegs(list(files.values()), self._shape.channels, self._device)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            if len(files) == 1:
                return {}
            alone = (self._decode({row: file}, sizes) for row, file in files.items())
            return {row: image for images in alone for row, image in images.items()}
        return {row: image for row, image in zip(files, decoded, strict=True) if image.shape[1:] == sizes[row]}

    def _decode_on_cpu(self, file: bytes, crop: Crop) -> Pixels:
        with self._processes.one() as process:
            return process.decode(file, crop)


def _chunks(sizes: dict[int, Size], channels: int) -> Iterator[list[int]]:
    """Yield lists of rows: the images of each list, by ``sizes``, fit together into CHUNK_BYTES of memory."""
    chunk: list[int] = []
    height = width = 0
    for row, size in sizes.items():
        # All images of a chunk are padded to the largest height and width when they are resized.
        height, width = max(height, size[0]), max(width, size[1])
        if chunk and (len(chunk) + 1) * height * width * channels > CHUNK_BYTES:
            yield chunk
            chunk, (height, width) = [], size
        chunk.append(row)
    if chunk:
        yield chunk


def cut_and_resize(images: Sequence[Tensor], boxes: Sequence[CropBox], size: Size) -> Tensor:
    """Cut the crop box of each image, uint8 (C, h, w), and resize it; return all of them, uint8 (n, H, W, C).

    It computes the same as Pillow's ``resize``, whose filters reach further if an image becomes smaller: first each row
    is resized, then each column. Each pixel of a resized row is a weighted sum of some pixels of that row, its taps.
    ``embedding_bag`` computes weighted sums of rows of a table. So the columns of all images become the rows of one
    table, and one call resizes all images in one direction.

    Example: ``cut_and_resize([image], [CropBox(0, 0, 500, 375, 224, 224)], (224, 224))``
    """
    device, channels, interpolation = images[0].device, images[0].shape[0], boxes[0].interpolation

    # Cut out the whole pixels that the boxes touch, and move the boxes accordingly.
    seen: list[Tensor] = []
    spans: list[list[tuple[float, float, int, int]]] = [[], []]  # of columns, and of rows: from, to, length, new length
    for image, box in zip(images, boxes, strict=True):
        height, width = image.shape[1:]
        left, top = max(0, math.floor(box.left)), max(0, math.floor(box.top))
        part = image[:, top : min(height, math.ceil(box.bottom)), left : min(width, math.ceil(box.right))]
        seen.append(part)
        _, height, width = part.shape
        spans[0].append((max(0.0, box.left - left), min(box.right - left, width), width, box.width))
        spans[1].append((max(0.0, box.top - top), min(box.bottom - top, height), height, box.height))
    longest_row, longest_column = (max(length for _, _, length, _ in span) for span in spans)

    # The rows of the first table are columns of images, padded to the same length: (n·w, C·h).
    table = torch.zeros((len(images), longest_row, channels, longest_column), device=device)
    for place, part in zip(table.unbind(), seen, strict=True):
        place[: part.shape[2], :, : part.shape[1]] = part.permute(2, 0, 1)
    rows_resized = _resize(table, spans[0], size[1], interpolation)  # (n, W, C, h)
    table = rows_resized.permute(0, 3, 2, 1).contiguous()  # (n, h, C, W)
    resized = _resize(table, spans[1], size[0], interpolation)  # (n, H, C, W)
    return resized.permute(0, 1, 3, 2).to(torch.uint8)


def _resize(
    table: Tensor, spans: Sequence[tuple[float, float, int, int]], length: int, interpolation: Interpolation
) -> Tensor:
    """Resize the second dimension of a table (n, l, C, o) to ``length``, rounded to whole numbers from 0 to 255.

    The span of image i is (first, last, number of pixels, new number of pixels): the interval from first to last of
    its pixels is resized to the new number; both sides of it are filled up with 0 to ``length``.
    """
    # As in Pillow's precompute_coeffs: the middle of each new pixel, and how far the filter reaches from it.
    first, last, lengths, new_lengths = torch.tensor(spans, dtype=torch.float64).T.to(table.device)[..., None]  # (n, 1)
    scale = (last - first) / new_lengths
    widened = scale.clamp(min=1.0)
    place = torch.arange(length, device=table.device) - ((length - new_lengths) / 2).floor()  # (n, L)
    middle = first + (place + 0.5) * scale
    reach = _SUPPORT[interpolation] * widened
    start = (middle - reach + 0.5).floor().clamp(min=0)
    stop = torch.minimum((middle + reach + 0.5).floor(), lengths)

    # The taps of each new pixel, as many as the widest filter needs, and their weights, whose sum is 1.
    widest = max((to - begin) / new for begin, to, _, new in spans)
    num_taps = 2 * math.ceil(_SUPPORT[interpolation] * max(1.0, widest)) + 1
    taps = start[..., None] + torch.arange(num_taps, device=table.device)  # (n, L, K)
    weights = _filter((taps - middle[..., None] + 0.5) / widened[..., None], interpolation)
    is_seen = (place >= 0) & (place < new_lengths)
    weights = torch.where((taps < stop[..., None]) & is_seen[..., None], weights, 0.0)
    weights = weights / weights.sum(2, keepdim=True).where(is_seen[..., None], 1.0)

    # Row t of image i is row i·l + t of the table.
    of_image = torch.arange(len(spans), device=table.device)[:, None, None] * table.shape[1]
    rows = of_image + torch.minimum(taps, lengths[..., None] - 1).long()
    flat = table.flatten(2).flatten(0, 1)
    new = F.embedding_bag(rows.flatten(0, 1), flat, per_sample_weights=weights.flatten(0, 1).to(flat.dtype), mode="sum")
    return (new + 0.5).floor().clamp(0, 255).view(len(spans), length, *table.shape[2:])


def _filter(distance: Tensor, interpolation: Interpolation) -> Tensor:
    """Return Pillow's weights for taps at these distances from the middle of a new pixel."""
    distance = distance.abs()
    if interpolation == "bilinear":
        return (1 - distance).clamp(min=0)
    near = (1.5 * distance - 2.5) * distance * distance + 1  # Keys' cubic with a = -0.5
    far = ((-0.5 * distance + 2.5) * distance - 4) * distance + 2
    return torch.where(distance < 1, near, torch.where(distance < 2, far, 0.0))
