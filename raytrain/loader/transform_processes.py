"""The user's own transforms, which take one image at a time, in processes beside a worker.

They are Python code that draws from the random number generators of a process, so a process cannot run several at
once. The batches of any source are transformed like this: a batch is cut into pieces, a process gets a piece through
the memory that it shares with this one (:class:`raytrain.loader.decoder_processes.Decoders`), crops, resizes and
transforms it there, and the batch is put together again. A few batches are under way at once, so that all processes
have work.

It does not matter where images come from: kept images are transformed in each epoch, too.

The processes are new ones, because this one may have threads and a GPU by the time that the user's code is imported.
"""

from __future__ import annotations

import pickle
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from raytrain.config import ResolvedConfig
from raytrain.config.named_functions import import_missing_files, own_files
from raytrain.config.pickled_code import pickle_own_code, sending
from raytrain.data.blocks import Block, LocalBatch
from raytrain.data.dataset import training_format
from raytrain.data.images.crop_box import Pixels
from raytrain.data.labels.part_names import Part
from raytrain.data.plan.permutation import Int64s
from raytrain.loader.decoder_processes import Decoders, Report, num_decoders, start_processes
from raytrain.training.batches.user_transforms import UserTransforms, subject
from raytrain.training.protocols import BatchSource

_MAX_ROWS = 32  # images in a piece
_NUM_TRIED = 8  # images transformed twice to see whether the results are the same
_UNSEEDED = (
    "makes different images of the same one, although all random number generators that are found "
    "are seeded alike: the run depends on the number of workers, and goes on differently after a resume; draw from "
    "those of torch, NumPy or Python's random, or keep your own as an attribute"
)


@contextmanager
def transformed(
    source: BatchSource,
    config: ResolvedConfig,
    function: Callable[..., Any] | None,
    report: Callable[[str], object] | None = None,
) -> Iterator[BatchSource]:
    """Yield a source whose training images are changed by the transforms that ``function`` makes.

    Without a function, yield ``source`` itself. ``report`` gets a sentence, from another thread, if the transforms draw
    from generators that are not seeded. Raises UsageError if they cannot be made, or cannot be sent to another process.
    The processes end with this context.

    Example:
        >>> with transformed(source, config, v2.RandomInvert) as source:
        ...     batches = DeviceBatches(config, source, Augment(config, crops=False), device, num_classes)
    """
    if function is None:
        yield source
        return
    UserTransforms(config, function)  # raises UsageError for mistakes, before any process starts
    with TransformedBatches(source, config, function) as batches:
        if report is not None:
            threading.Thread(target=batches.try_twice, args=(report,), daemon=True, name="transforms").start()
        yield batches


class TransformedBatches(AbstractContextManager["TransformedBatches"]):
    """A source of batches whose training images are transformed in processes, which end when this is closed.

    ``function`` makes the transforms: see :func:`raytrain.training.batches.user_transforms.own_transforms`.
    """

    def __init__(self, source: BatchSource, config: ResolvedConfig, function: Callable[..., Any]) -> None:
        self._source, self._config = source, config
        self._shape = *training_format(config).shape.size, config.channels  # (H, W, C)
        self._num_processes = num_decoders()
        with sending({subject(config): function}):
            pickled = pickle_own_code(function)
        processes = start_processes([__name__], threads_per_process=1)
        self._decoders = Decoders(None, _MAX_ROWS * int(np.prod(self._shape)), processes)
        self._decoders.start(partial(_open_readers, config, pickled, own_files()))

    def __exit__(self, *exception: object) -> None:
        self._decoders.__exit__(*exception)

    def train(self, first_step: int) -> Iterator[LocalBatch]:
        """Yield the batches of the source from ``first_step`` on, transformed."""
        under_way: deque[tuple[LocalBatch, list[Future[Block]]]] = deque()
        num_pieces = 0  # in all batches that are under way
        for local in self._source.train(first_step):
            # Cut the batch into pieces of equally many images, rounded up: one for each process, if there are enough.
            num_rows = max(1, min(_MAX_ROWS, -(-len(local.draws) // self._num_processes)))
            slices = [slice(start, start + num_rows) for start in range(0, len(local.draws), num_rows)]
            epoch = local.batch.epoch
            pieces = [self._decoders.read(0, local.draws[rows], epoch, local.images[rows]) for rows in slices]
            under_way.append((local, pieces))
            num_pieces += len(pieces)
            # Wait for the oldest batch once more than two pieces for each process are under way.
            while num_pieces > 2 * self._num_processes and len(under_way) > 1:
                num_pieces -= len(under_way[0][1])
                yield _joined_batch(*under_way.popleft())
        while under_way:
            yield _joined_batch(*under_way.popleft())

    def held_out(self, part: Part) -> Iterator[LocalBatch]:
        return self._source.held_out(part)

    def keys(self, part: Part, samples: Sequence[int]) -> list[str]:
        return self._source.keys(part, samples)

    def try_twice(self, report: Callable[[str], object]) -> None:
        """Report if the transforms turn the same noise into two different results, in two processes if possible.

        Nothing is reported if they fail, because the first batch will fail in the same way.
        """
        noise = np.random.default_rng(0).integers(0, 256, (_NUM_TRIED, *self._shape), np.uint8)
        tries = [self._decoders.read(0, np.arange(_NUM_TRIED), 0, noise) for _ in range(2)]
        try:
            first, second = (future.result().images for future in tries)
        except Exception:
            return
        if not np.array_equal(first, second):
            report(f"{subject(self._config)} {_UNSEEDED}")


def _joined_batch(local: LocalBatch, pieces: Sequence[Future[Block]]) -> LocalBatch:
    """Wait for the transformed images of the ``pieces`` of ``local``, and return the batch with them."""
    images = [piece.result().images for piece in pieces]
    return replace(local, images=np.concatenate(images)) if images else local


# In a process beside the worker.


def _open_readers(config: ResolvedConfig, pickled: bytes, files: Mapping[str, str], report: Report) -> list[_Reader]:
    """Return the reader that transforms images in this process."""
    return [_Reader(config, pickled, files)]


class _Reader:
    """Transforms images in place, in memory that is shared with the worker: a ``BlockReader`` that reads nothing.

    ``pickled`` are the user's transforms, ``files`` those of the user's files that they need.
    """

    def __init__(self, config: ResolvedConfig, pickled: bytes, files: Mapping[str, str]) -> None:
        torch.set_num_threads(1)
        self._config, self._pickled, self._files = config, pickled, files
        self._shape = *training_format(config).shape.size, config.channels
        self._transforms: UserTransforms | None = None

    def read(self, draws: Int64s, epoch: int, pixels: Pixels | None = None) -> Block:
        """Transform the images of ``draws``, which the worker has written to the beginning of ``pixels``.

        Return a block whose images are in the same memory, in place of the others. Its labels, all 0, mean nothing: the
        worker has those of the batch.
        """
        assert pixels is not None  # the worker always sends images
        if self._transforms is None:  # only now, so that an exception of the user's code is sent to the worker
            import_missing_files(self._files)
            self._transforms = UserTransforms(self._config, pickle.loads(self._pickled))
        images = pixels[: len(draws) * int(np.prod(self._shape))].reshape(-1, *self._shape)
        transformed_images = self._transforms(images, draws, epoch)
        # They may be smaller, as images that grow from epoch to epoch are at first.
        output = pixels[: transformed_images.size].reshape(transformed_images.shape)
        output[:] = transformed_images
        return Block(output, np.zeros(len(draws), np.int64), draws)

    def read_ahead(self) -> None:
        """Do nothing: there is nothing to read."""
