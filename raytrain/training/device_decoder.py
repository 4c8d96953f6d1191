"""Decodes a worker's training images on its GPU, out of the files that it gets in place of pixels (``--decoder gpu``).

The way of a local batch of files, in the thread that reads ahead:

1. :func:`raytrain.data.images.decode.plain_jpeg_size` looks at each header. What is no plain JPEG, or has more pixels
   than a GPU should take at once, goes to processes that decode on the CPU, as all images do without a GPU: there an
   image that kills its decoder is an unreadable one. So do files that the GPU refuses.
2. :func:`decode_jpegs` decodes the plain ones, some at a time, whole. It alone needs a GPU, and nvJPEG.
3. :func:`cut_and_resize` cuts the crop box of each and resizes it, all of them in a few kernels.

An image comes out the same in any batch: its crop box depends on the seed, the epoch and the sample alone, and no sum
goes over two images, or has its terms in another order in another batch. So runs on any number of GPUs of one kind see
the same pixels. They differ by some of 255 from those of libjpeg-turbo on a CPU: nvJPEG rounds in other places, and is
given the whole image, where a CPU decodes large ones at 1/2, 1/4 or 1/8 of their size.
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
"""Pixels that are on a device at a time, as bytes; an image that has more goes to the CPU."""
CHUNK_BYTES = 64 << 20  # of pixels that are decoded at once, unless a single image has more
_NUM_CPU_DECODERS = 4  # at a time, of each worker
_SUPPORT: dict[Interpolation, float] = {"bilinear": 1.0, "bicubic": 2.0}  # pixels on each side that a filter looks at


def decode_jpegs(files: Sequence[bytes], channels: int, device: torch.device) -> list[Tensor]:
    """Return JPEGs, turned upright, uint8 (C, h, w) each, on ``device``; raise RuntimeError if it can't decode one.

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

        # What is wrong with all images is said before the first one.
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

        # What is not for the device. The CPU begins at once, and decodes while the device does.
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

            # What the CPU has decoded joins.
            for row, future in on_cpu.items():
                try:
                    pixels[row] = torch.from_numpy(future.result().copy()).to(self._device, non_blocking=True)
                except BadImage as error:
                    unreadable[row] = str(error)
            if unreadable:
                kept = [row for row in range(len(files)) if row not in unreadable]
                pixels = pixels[torch.tensor(kept, dtype=torch.long).to(self._device, non_blocking=True)]
            if self._stream is not None:
                self._stream.synchronize()  # in this thread, which has nothing else to do: what it hands over is done

        # The images that the CPU could not read, either, are left out, as those that could not be fetched were.
        for kind, count in Counter(kinds.values()).items():
            self._reporter.decoded_on_cpu(count, kind)
        is_unreadable = np.isin(np.arange(len(files)), list(unreadable))
        if unreadable:
            keys = {row: self._source.key(int(local.samples[row])) for row in sorted(unreadable)}
            self._reporter.skip([SkippedImage(key, unreadable[row]) for row, key in keys.items()])
        return replace(local.without(is_unreadable), images=pixels)

    def _decode(self, files: dict[int, bytes], sizes: dict[int, Size]) -> dict[int, Tensor]:
        """Return the images, by row, that the device decodes, in the sizes that their headers say.

        It refuses one by refusing all of them: then each is tried alone.
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
    """Yield the rows of images of these ``sizes``, as many at a time as fit into a part of the device's memory."""
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

    It computes what Pillow's ``resize`` does, whose filters reach further if an image becomes smaller: first each row
    is resized, then each column. Each pixel of a resized column is a weighted sum of some pixels of the column, its
    taps. ``embedding_bag`` is a sum of some rows of a table, with weights: so all columns of all images are the rows of
    one table, and one call resizes them.

    Example: ``cut_and_resize([image], [CropBox(0, 0, 500, 375, 224, 224)], (224, 224))``
    """
    device, channels, interpolation = images[0].device, images[0].shape[0], boxes[0].interpolation

    # Whole pixels that the boxes touch. The boxes move with them, as in resize.cut.
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
    """Resize the second dimension of a table (n, l, C, o) to ``length``, rounded to whole numbers of 0 to 255.

    Of image i, the span from the first to the second number is seen, of so many pixels, and gets the new length; what
    is left of ``length`` on both sides is 0.
    """
    # As in Pillow's precompute_coeffs: where the middle of each new pixel is, and how far the filter reaches from it.
    first, last, lengths, new_lengths = torch.tensor(spans, dtype=torch.float64).T.to(table.device)[..., None]  # (n, 1)
    scale = (last - first) / new_lengths
    widened = scale.clamp(min=1.0)
    place = torch.arange(length, device=table.device) - ((length - new_lengths) / 2).floor()  # (n, L)
    middle = first + (place + 0.5) * scale
    reach = _SUPPORT[interpolation] * widened
    start = (middle - reach + 0.5).floor().clamp(min=0)
    stop = torch.minimum((middle + reach + 0.5).floor(), lengths)

    # The taps of each new pixel, and their weights, of which the sum is 1; as many as the widest filter needs.
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
    """Return the weights of taps at these distances from the middle of a new pixel, as Pillow has them."""
    distance = distance.abs()
    if interpolation == "bilinear":
        return (1 - distance).clamp(min=0)
    near = (1.5 * distance - 2.5) * distance * distance + 1  # Keys' cubic with a = -0.5
    far = ((-0.5 * distance + 2.5) * distance - 4) * distance + 2
    return torch.where(distance < 1, near, torch.where(distance < 2, far, 0.0))
