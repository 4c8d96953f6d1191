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
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from raytrain.config import ResolvedConfig
from raytrain.config.network import Interpolation, Size
from raytrain.config.user_code import lacks_memory
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


class _Span(NamedTuple):
    """A row or a column of pixels, of which the interval from ``first`` to ``last`` becomes ``new_length`` pixels."""

    first: float
    last: float
    length: int
    new_length: int


def decode_jpegs(files: Sequence[bytes], channels: int, device: torch.device) -> list[Tensor]:
    """Return the pixels of JPEGs, turned upright, uint8 (C, h, w) each, on ``device``.

    Raises RuntimeError if it cannot decode all of them, ImportError or OSError if torchcodec or its libraries are
    missing.

    Example: ``decode_jpegs([Path("cat.jpg").read_bytes()], 3, torch.device("cuda"))``
    """
    from torchcodec.decoders import decode_jpeg  # pyright: ignore[reportPrivateImportUsage] ; it is documented there

    encoded = [torch.from_numpy(np.frombuffer(bytearray(file), np.uint8)) for file in files]
    decoded: Any = decode_jpeg(encoded, mode="GRAY" if channels == 1 else "RGB", device=device)
    return decoded


class DeviceDecoder:
    """Decodes the files of local batches on a device.

    ``reporter`` gets the images that nobody can read, by the keys that ``source`` knows, and the number of those that
    the CPU has decoded. Raises UsageError if the device cannot decode a small JPEG.

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
        """Return a batch of files with their pixels, uint8 (m, H, W, C), on the device; without unreadable images.

        A batch of pixels, or without images, is returned unchanged.
        """
        if not isinstance(local.images, Files) or not len(local.labels):
            return local
        files, crops = local.images.contents(), self._cropping.crops(local.draws, local.batch.epoch)

        # Find the files that the CPU has to decode, and why. It begins at once, and works at the same time as the
        # device. Of the others, keep the sizes in their headers.
        sizes: dict[int, Size] = {}
        kinds_on_cpu: dict[int, str] = {}
        for row, file in enumerate(files):
            size = plain_jpeg_size(file)
            if isinstance(size, str):  # a text in place of a size names the kind of file that a GPU cannot decode
                kinds_on_cpu[row] = size
            elif math.prod(size) * self._shape.channels > MAX_DEVICE_BYTES:
                kinds_on_cpu[row] = "JPEG of too many pixels for a GPU"
            else:
                sizes[row] = size
        on_cpu = {row: self._threads.submit(self._decode_on_cpu, files[row], crops[row]) for row in kinds_on_cpu}

        # Decode all others on the device, in chunks, and give the CPU those that the device refuses.
        unreadable: dict[int, str] = {}
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            pixels = torch.zeros((len(files), *self._shape), dtype=torch.uint8, device=self._device)
            for rows in _chunks(sizes, self._shape.channels):
                images = self._decode({row: files[row] for row in rows}, sizes)
                for row in (row for row in rows if row not in images):
                    kinds_on_cpu[row] = "JPEG that nvJPEG refuses"
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
        for kind, count in Counter(kind for row, kind in kinds_on_cpu.items() if row not in unreadable).items():
            self._reporter.note_decoded_on_cpu(count, kind)
        is_unreadable = np.isin(np.arange(len(files)), list(unreadable))
        if unreadable:
            rows = sorted(unreadable)
            keys = self._source.keys("train", local.samples[rows].tolist())
            self._reporter.note_skipped(
                [SkippedImage(key, unreadable[row]) for row, key in zip(rows, keys, strict=True)]
            )
        return replace(local.without(is_unreadable), images=pixels)

    def _decode(self, files: dict[int, bytes], sizes: dict[int, Size]) -> dict[int, Tensor]:
        """Return the images that the device decodes, by row; not those whose size differs from that in their header.

        If the device refuses one image, it refuses the whole call: then each is tried alone.
        """
        try:
            decoded = decode_jpegs(list(files.values()), self._shape.channels, self._device)
        except RuntimeError as error:
            if lacks_memory(error):
                raise
            if len(files) == 1:
                return {}
            alone = (self._decode({row: file}, sizes) for row, file in files.items())
            return {row: image for images in alone for row, image in images.items()}
        return {row: image for row, image in zip(files, decoded, strict=True) if image.shape[1:] == sizes[row]}

    def _decode_on_cpu(self, file: bytes, crop: Crop) -> Pixels:
        """Return the pixels of a file, which another process decodes, cuts and resizes. Raises BadImage if it cannot.

        Runs in a thread.
        """
        with self._processes.one() as process:
            return process.decode(file, crop)


def _chunks(sizes: dict[int, Size], channels: int) -> Iterator[list[int]]:
    """Yield lists of rows whose images, of the ``sizes`` given by row, fit together into CHUNK_BYTES of memory.

    An image that does not fit is alone in its list.
    """
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
    parts: list[Tensor] = []
    row_spans: list[_Span] = []
    column_spans: list[_Span] = []
    for image, box in zip(images, boxes, strict=True):
        height, width = image.shape[1:]
        left, top = max(0, math.floor(box.left)), max(0, math.floor(box.top))
        part = image[:, top : min(height, math.ceil(box.bottom)), left : min(width, math.ceil(box.right))]
        parts.append(part)
        _, height, width = part.shape
        row_spans.append(_Span(max(0.0, box.left - left), min(box.right - left, width), width, box.width))
        column_spans.append(_Span(max(0.0, box.top - top), min(box.bottom - top, height), height, box.height))
    longest_row, longest_column = (max(span.length for span in spans) for spans in (row_spans, column_spans))

    # The rows of the first table are columns of images, padded to the same length: (n·w, C·h).
    table = torch.zeros((len(images), longest_row, channels, longest_column), device=device)
    for padded, part in zip(table.unbind(), parts, strict=True):
        padded[: part.shape[2], :, : part.shape[1]] = part.permute(2, 0, 1)
    rows_resized = _resize(table, row_spans, size[1], interpolation)  # (n, W, C, h)
    table = rows_resized.permute(0, 3, 2, 1).contiguous()  # (n, h, C, W)
    resized = _resize(table, column_spans, size[0], interpolation)  # (n, H, C, W)
    return resized.permute(0, 1, 3, 2).to(torch.uint8)


def _resize(table: Tensor, spans: Sequence[_Span], length: int, interpolation: Interpolation) -> Tensor:
    """Resize the second dimension of a table (n, l, C, o) to ``length``, rounded to whole numbers from 0 to 255.

    The interval of each image's span becomes the span's new length. If that is less than ``length``, zeros fill up both
    sides.
    """
    # As in Pillow's precompute_coeffs: the middle of each new pixel, and how far the filter reaches from it.
    first, last, lengths, new_lengths = torch.tensor(spans, dtype=torch.float64).T.to(table.device)[..., None]  # (n, 1)
    scale = (last - first) / new_lengths
    widened = scale.clamp(min=1.0)
    position = torch.arange(length, device=table.device) - ((length - new_lengths) / 2).floor()  # (n, L)
    middle = first + (position + 0.5) * scale
    reach = _SUPPORT[interpolation] * widened
    start = (middle - reach + 0.5).floor().clamp(min=0)
    stop = torch.minimum((middle + reach + 0.5).floor(), lengths)

    # The taps of each new pixel, as many as the widest filter needs, and their weights, whose sum is 1. New pixels
    # outside of the interval get no weight.
    widest = max((span.last - span.first) / span.new_length for span in spans)
    num_taps = 2 * math.ceil(_SUPPORT[interpolation] * max(1.0, widest)) + 1
    taps = start[..., None] + torch.arange(num_taps, device=table.device)  # (n, L, K)
    weights = _filter((taps - middle[..., None] + 0.5) / widened[..., None], interpolation)
    is_inside = (position >= 0) & (position < new_lengths)
    weights = torch.where((taps < stop[..., None]) & is_inside[..., None], weights, 0.0)
    weights = weights / weights.sum(2, keepdim=True).where(is_inside[..., None], 1.0)

    # Row t of image i is row i·l + t of the table. Taps beyond the image have no weight, and stay in its rows.
    first_rows = torch.arange(len(spans), device=table.device)[:, None, None] * table.shape[1]
    rows = first_rows + torch.minimum(taps, lengths[..., None] - 1).long()
    flat = table.flatten(2).flatten(0, 1)
    new = F.embedding_bag(rows.flatten(0, 1), flat, per_sample_weights=weights.flatten(0, 1).to(flat.dtype), mode="sum")
    return (new + 0.5).floor().clamp(0, 255).view(len(spans), length, *table.shape[2:])


def _filter(distance: Tensor, interpolation: Interpolation) -> Tensor:
    """Return Pillow's weights for taps at these distances, in units of the filter, from the middle of a new pixel."""
    distance = distance.abs()
    if interpolation == "bilinear":
        return (1 - distance).clamp(min=0)
    near = (1.5 * distance - 2.5) * distance * distance + 1  # Keys' cubic with a = -0.5
    far = ((-0.5 * distance + 2.5) * distance - 4) * distance + 2
    return torch.where(distance < 1, near, torch.where(distance < 2, far, 0.0))
