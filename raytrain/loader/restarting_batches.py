"""Batches whose decoders start again after an image that kills them, for a process that somebody else has started.

It has a cache with the other processes of its machine, and its decoders begin to start before the images are listed.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from itertools import islice

from raytrain.config import ResolvedConfig
from raytrain.data.blocks import LocalBatch
from raytrain.data.dataset import Dataset
from raytrain.data.images.crop_box import fastest_resizer
from raytrain.data.labels.part_names import Part
from raytrain.loader.choose_cache import ImageCache, image_cache
from raytrain.loader.decoder_processes import DecoderKilled, ImageReporter, NewProcess, start_processes
from raytrain.loader.machine import local_world_size
from raytrain.loader.machine_batches import MachineBatches
from raytrain.loader.process_group import ProcessGroup

_log = logging.getLogger("raytrain")


def machine_cache(
    config: ResolvedConfig, data: Dataset, first_step: int, group: ProcessGroup, opened: ExitStack
) -> ImageCache:
    """Return the cache of this machine, which the first of its processes chooses for all of them.

    Processes that cannot talk to each other each get a cache of their own, in their share of the memory. All processes
    of the group call this together. Closing ``opened`` removes the folder of a cache that this process has chosen.
    """
    # The names of all processes' machines, by rank; only this one's if the processes cannot talk.
    machines = group.gather(socket.gethostname())
    rank = group.rank_and_size()[0] if len(machines) > 1 else 0
    leader = machines.index(machines[rank])
    num_caches = 1 if group.can_talk else local_world_size()
    chosen = group.everywhere(
        lambda: image_cache(config, data, first_step, opened, num_caches) if rank == leader else None
    )
    cache = group.gather(chosen)[leader]
    assert cache is not None
    return cache


def start_decoding(data: str, opened: ExitStack) -> list[NewProcess]:
    """Start the processes that will decode the images of ``data``, a folder or a URL; ``opened`` ends them.

    They import what they need while this process lists the images, or makes its network.
    """
    processes = start_processes(_imports(data))
    for process in processes:
        opened.callback(process.end)
    return processes


def _imports(data: str) -> list[str]:
    """Return the modules that a process needs to read and decode images of ``data``, even those imported late."""
    modules = ["raytrain.loader.machine_batches", "simplejpeg", "PIL.Image"]
    modules += ["cykooz_resizer"] if fastest_resizer() == "cykooz" else []
    modules += ["raytrain.storage.bucket"] if "://" in data else []
    return modules + (["boto3"] if data.startswith("s3://") else [])


class RestartingBatches(AbstractContextManager["RestartingBatches"]):
    """Batches of a process that somebody else has started, a :class:`raytrain.training.protocols.BatchSource`.

    If an image has killed a decoder, new processes go on after the batches read so far, and decode in isolation, so
    that the next such image is skipped. ``loads`` are the shares of all processes. ``isolated``: decode in isolation
    from the start. ``reporter`` gets the images that cannot be read. ``processes`` are those of :func:`start_decoding`.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        data: Dataset,
        rank: int,
        loads: Sequence[float],
        cache: ImageCache,
        reporter: ImageReporter,
        processes: Sequence[NewProcess],
        *,
        isolated: bool = False,
    ) -> None:
        self._url = config.data
        self._restarting = threading.Lock()
        self._is_isolated = isolated
        self._open = partial(MachineBatches, data, data.plan(config), rank, loads, cache, reporter)
        self._batches = self._open(isolated=isolated, processes=processes)

    def __exit__(self, *exception: object) -> None:
        self._batches.__exit__(*exception)

    def train(self, first_step: int) -> Iterator[LocalBatch]:
        return self._read(lambda batches, num_read: batches.train(first_step + num_read))

    def held_out(self, part: Part) -> Iterator[LocalBatch]:
        return self._read(lambda batches, num_read: islice(batches.held_out(part), num_read, None))

    def keys(self, part: Part, samples: Sequence[int]) -> list[str]:
        return self._batches.keys(part, samples)

    def _read(self, open_batches: Callable[[MachineBatches, int], Iterator[LocalBatch]]) -> Iterator[LocalBatch]:
        """Yield all local batches, even if an image kills a decoder: then go on after the batches read so far.

        ``open_batches(source, n)`` returns the batches of ``source`` without the first n. Raises DecoderKilled if an
        image kills a decoder in isolation, too.
        """
        num_read = 0
        while True:
            batches = self._batches
            try:
                for local in open_batches(batches, num_read):
                    yield local
                    num_read += 1
                return
            except DecoderKilled as error:
                with self._restarting:
                    if self._batches is not batches:
                        continue  # another thread, which reads other images, has started new processes
                    if self._is_isolated:
                        raise
                    _log.warning("A process that decodes was killed by %s; images are decoded in isolation now.", error)
                    batches.__exit__()
                    self._is_isolated = True
                    self._batches = self._open(isolated=True, processes=start_processes(_imports(self._url)))
