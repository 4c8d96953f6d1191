"""`raytrain.ImageLoader`: the reader of runs for any loop, on any launcher, without a run.

The images reach each process in the same way, and through the same code, as a worker of a run:

1. One process lists the images, and the others get its manifest (:func:`_list_together`).
2. The plan says which samples are in which global batch, and each process has a contiguous slice of it. So all of them
   together read the same batches, whatever their number, and the number of the next step is all of a loader's state.
3. Processes beside this one fetch and decode (:mod:`raytrain.loader.decoder_processes`), and keep what fits, once for
   all processes of a machine if these have a process group of torch, otherwise once for each. They are new ones, not
   forked: this process may have threads and a GPU in use.
4. The images are augmented and normalised on the device, with random numbers that belong to a sample and an epoch.

Images are listed when the loader is made, so that a wrong address is reported at once. Meanwhile the processes that
will decode start and import what they need. Everything else waits for the first batch, because the rank and the device
of a process are often set only after the loader is made.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from copy import copy
from operator import index
from typing import Any, SupportsIndex

import torch

from raytrain.config import ResolvedConfig, TrainConfig
from raytrain.config.data import AugmentationOptions, DataOptions
from raytrain.config.named_functions import load_optional
from raytrain.config.options import why_needless
from raytrain.data.blocks import LocalBatch
from raytrain.data.dataset import Dataset, evaluation_plan, open_dataset
from raytrain.data.images.crop_box import fastest_resizer
from raytrain.data.labels.part_names import Part
from raytrain.data.prefetch import Prefetch
from raytrain.errors import UsageError, did_you_mean
from raytrain.loader.decoder_processes import NewProcess
from raytrain.loader.machine import gpu_decoder_problem
from raytrain.loader.process_group import ProcessGroup
from raytrain.loader.restarting_batches import RestartingBatches, machine_cache, start_decoding
from raytrain.loader.transform_processes import transformed
from raytrain.runs.metric_row import SkippedImage
from raytrain.storage.open import open_store
from raytrain.training.batches.augment_and_normalise import Augment
from raytrain.training.batches.batch import Batch
from raytrain.training.batches.device_batches import DeviceBatches, HostTensors
from raytrain.training.exact import images_of_tensors

_log = logging.getLogger("raytrain")

_OTHER_OPTIONS = (  # of other sections than those of the data and of the augmentation
    *("image_size", "channels", "resize", "crop_fraction", "interpolation", "resizer", "decoder", "mean", "std"),
    *("channels_last", "seed", "epochs"),
)
_ENDLESS = 1_000_000  # epochs, if the user gives no number
# Attributes with processes, pipes and threads, which cannot be copied or pickled.
_OPEN_RESOURCES = (
    *("_processes", "_batches", "_ahead", "_ahead_step"),
    *("_open_resources", "_reading", "_opened_by", "_close_resources"),
)


class ImageLoader:
    """Batches of a data set's images for this process, from a folder or a bucket, in any training loop.

    Iterate over it once for each epoch. It yields :class:`raytrain.Batch` objects, each of which unpacks into
    ``images``, float32 (m, C, H, W), and ``labels``, int64 (m,), on the ``device``. All processes together read each
    sample once an epoch, in an order that depends on ``seed`` alone, not on their number::

        loader = raytrain.ImageLoader("s3://bucket/photos", batch_size=256, image_size=224, flip="random")
        for epoch in range(10):
            for images, labels in loader:
                ...

    ``state_dict()`` holds the number of the next step, so a checkpoint of one number of processes goes on with any
    other, in the middle of an epoch, with each sample once.

    One loop at a time goes over a loader. A copy, also in another process, goes on from the same place by itself.

    A batch may have fewer images than others: the last one of an epoch (unless ``drop_last``), or one with images that
    cannot be read, which are left out, logged, and listed in ``skipped``. A process that has no image in a step gets a
    black placeholder, whose ``num_used`` is 0; networks of :func:`raytrain.parallel` count it as nothing.

    If images are mixed (``mixup``, ``cutmix``), or have several classes, their classes are ``batch.targets``, (m, C).
    Training batches do not unpack into a pair then: write ``for batch in loader``.

    Args:
        data: training images: a folder or a URL (s3://…, gs://…, az://…), as ``--data`` of ``raytrain train``.
        batch_size: number of images in a global batch, of all processes together; a whole number.
        rank: number of this process. By default that of ``torch.distributed``, or RANK of the environment, as torchrun
            and Ray Train set it; give it with ``world_size``.
        world_size: number of processes, given with ``rank``.
        device: where batches are wanted; by default the current GPU, or the CPU.
        drop_last: leave out the last global batch of an epoch if it is shorter.
        transforms: one function of your own, which takes uint8 (C, H, W) and returns the same; or as ``--transforms``.
        options: options of the data, the images and the augmentation, as ``raytrain train custom --help-all`` lists
            them, with ``_`` in place of ``-``: ``test_data``, ``labels``, ``cache``, ``image_size``, ``mean``,
            ``flip``, ``mixup``, ``seed``, … ``epochs`` is needed for an ``image_size`` that grows; after the last one,
            nothing is read ahead.

    Raises UsageError for options that do not fit, or that differ between the processes, and StorageError if the images
    cannot be reached.
    """

    def __init__(
        self,
        data: str | os.PathLike[str],
        *,
        batch_size: int,
        rank: int | None = None,
        world_size: int | None = None,
        device: torch.device | str | None = None,
        drop_last: bool = False,
        transforms: Callable[..., Any] | str | None = None,
        **options: Any,
    ) -> None:
        # Refuse wrong arguments before any process starts.
        self._group = ProcessGroup(_given_rank_and_size(rank, world_size))
        self._device = _given_device(device)
        self._drop_last = drop_last
        self._transforms = transforms
        if isinstance(transforms, str):
            options["transforms"] = transforms
        elif transforms is not None and not callable(transforms):
            raise UsageError(
                f"transforms is a {type(transforms).__name__}, and ImageLoader takes one function of an image; make "
                "one of several by torchvision.transforms.v2.Compose([...])."
            )
        asked = _options(data, batch_size, options)
        self._asked_decoder = asked.decoder

        # Start the processes, and list the images meanwhile. A failure on one process is raised on all.
        self._reset_open_resources()
        try:
            self._processes = self._group.everywhere(lambda: start_decoding(asked.data, self._open_resources))
            self._config, self._data = _list_together(asked, self._group)
            self._plan = self._data.plan(self._config)
            if not len(self):
                raise UsageError(
                    f"batch_size is {batch_size}, and drop_last leaves out the only batch of an epoch, as there are "
                    f"{self.num_images} training images; give a smaller batch_size, or leave out drop_last."
                )
        except BaseException:
            self.close()
            raise

        # The state of the loops over this loader, and the other parts of the images.
        self._next_step = 0  # in the plan
        self._resumes = False  # a state was loaded, and no epoch has begun since
        self._loops = 0  # number of loops begun so far, and of loaded states; only the newest loop may go on
        self._skipped = _SkippedImages(self._config, self._data.num_images)
        self.validation = HeldOutImages(self, "validation")
        """This process's slice of the validation images: an iterable of batches, each image on one process."""
        self.test = HeldOutImages(self, "test") if self._data.test is not None else None
        """The same of the test images; None if the images have two parts."""

    def _reset_open_resources(self) -> None:
        """Give the loader empty resources: no processes are started yet, and nothing is read ahead."""
        # Processes that were started when the loader was made, and that do nothing until the first batch is wanted.
        self._processes: list[NewProcess] = []
        # From the first batch on: the source of batches on the device.
        self._batches: DeviceBatches | None = None
        # The thread that reads training images ahead, if any, and the step of the batch that it will give next.
        self._ahead: Prefetch[tuple[LocalBatch, HostTensors]] | None = None
        self._ahead_step = 0
        # What `close`, or the end of the loader, has to close; and, of that, what reads ahead, which is closed first.
        self._open_resources, self._reading = ExitStack(), ExitStack()
        # The process that has opened it all: a fork of it must not close what it has inherited.
        self._opened_by = os.getpid()
        self._close_resources = weakref.finalize(self, _close_own, self._open_resources, self._opened_by)

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes without open resources, for a copy or another process, which opens its own."""
        return {name: value for name, value in vars(self).items() if name not in _OPEN_RESOURCES}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Continue from the ``state`` of another loader, at the same step, with resources of its own."""
        vars(self).update(state)
        self._reset_open_resources()
        # A shallow copy would read held-out images by the processes of the original, and report skipped images to it.
        self._skipped = copy(self._skipped)
        self._skipped.by_key = dict(self._skipped.by_key)
        self.validation = HeldOutImages(self, "validation")
        self.test = HeldOutImages(self, "test") if self._data.test is not None else None

    # What is read.

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in the order of the labels."""
        return self._data.train.classes

    @property
    def num_classes(self) -> int:
        """Number of classes, the width of a classifier's output."""
        return len(self.classes)

    @property
    def num_images(self) -> int:
        """Number of training images, of all processes together."""
        return len(self._data.train)

    @property
    def mean(self) -> tuple[float, ...]:
        """Mean of each channel, in 0..1, that is subtracted from images: that of the training images if none is given.

        Whatever gives images to the network later must do the same: ``(pixels / 255 - mean) / std``.
        """
        return self._config.mean

    @property
    def std(self) -> tuple[float, ...]:
        """Standard deviation of each channel, in 0..1, by which images are divided: see :attr:`mean`."""
        return self._config.std

    @property
    def skipped(self) -> list[SkippedImage]:
        """Images that this process could not read so far, each with its ``key`` and the ``reason``."""
        return list(self._skipped.by_key.values())

    @property
    def epoch(self) -> int:
        """Number of the next batch's epoch, counted from 0; after a loop that left early, still the epoch it left."""
        return self._next_step // self._plan.steps_per_epoch

    def keys(self, batch: Batch) -> list[str]:
        """Return the keys of the images of a batch, also of one of validation or test images.

        Key i, such as a path in the data set, is that of ``batch.images[i]``; a placeholder has the key "". The host
        waits for a GPU here.

        Example::

            for key, loss in zip(loader.keys(batch), losses.tolist()):
                print(key, loss)
        """
        return self._data.parts[batch.part][1].keys_of(batch.samples.tolist()) if batch.num_used else [""]

    def __len__(self) -> int:
        """Return the number of batches in a whole epoch, including those before a resume."""
        drops_last = self._drop_last and self._plan.last_batch_size < self._plan.batch_size
        return self._plan.steps_per_epoch - (1 if drops_last else 0)

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches of the next epoch; after :meth:`load_state_dict` in the middle of one, the rest of it.

        Raises UsageError if the option ``epochs`` has no more of them, or if another loop has begun meanwhile.
        """
        # Only a loaded state leads into the middle of an epoch. If the loop before has left an epoch early, the next
        # epoch begins.
        epoch, position = divmod(self._next_step, self._plan.steps_per_epoch)
        if position and not self._resumes:
            epoch, position = epoch + 1, 0
        first_step_of_epoch = epoch * self._plan.steps_per_epoch
        self._next_step = first_step_of_epoch + position
        self._resumes = False
        if epoch >= self._config.epochs:
            raise UsageError(f"epochs is {self._config.epochs}, and the loop asks for another one; give more epochs.")
        self._loops = this_loop = self._loops + 1
        for step in range(self._next_step, first_step_of_epoch + len(self)):
            if self._loops != this_loop:
                raise UsageError(
                    "A loop over an ImageLoader goes on after another one over the same loader has begun, or after a "
                    "state was loaded; two loops at once need a loader each."
                )
            batch = self._batch(step)
            # From now on the batch counts as used, and after the last batch the epoch.
            self._next_step = self._step_after(step)
            yield batch
        images_of_tensors.expect_nothing()  # no forward belongs to this loader's last batch any more

    # Its state.

    def state_dict(self) -> dict[str, Any]:
        """Return the number of the next step, the same on all processes, and the facts that it depends on.

        A batch counts as used when the loop has got it, so save the state after the optimizer has stepped.
        """
        return {"next_step": self._next_step, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the step of a ``state``, on any number of processes: the next loop has the rest of its epoch.

        Raises UsageError if the state is that of other images, or of batches of another size or order.
        """
        next_step: object = state.get("next_step") if isinstance(state, Mapping) else None
        if not isinstance(next_step, int) or next_step < 0:
            raise UsageError(
                "ImageLoader.load_state_dict got something else than the state of a loader: its next_step is no whole "
                "number from 0 on; give it the result of a loader's state_dict()."
            )
        for name, value in self._identity().items():
            if state.get(name) != value:
                raise UsageError(
                    f"The state is of a loader with {name} {state.get(name)}, and this loader has {name} {value}; "
                    "load it into a loader of the same images and options, or begin without it."
                )
        self._next_step = self._step_after(next_step - 1) if next_step else 0
        self._resumes = True
        self._loops += 1

    def _step_after(self, step: int) -> int:
        """Return the step that follows ``step``, passing over those that ``drop_last`` leaves out."""
        epoch, position = divmod(step, self._plan.steps_per_epoch)
        is_last = position + 1 >= len(self)
        return (epoch + 1) * self._plan.steps_per_epoch if is_last else step + 1

    def _identity(self) -> dict[str, Any]:
        """Return what decides which images step n has: a state fits a loader only if all of this is equal."""
        config, train = self._config, self._data.train
        return {
            "batch_size": config.batch_size,
            "seed": config.seed,
            "sampling": config.sampling,
            "images": len(train),
            "manifest": train.digest,
        }

    # How batches come about.

    def _batch(self, step: int) -> Batch:
        """Return the batch of ``step``, which has been read ahead, unless a state was loaded or a loop left early."""
        batches = self._start()
        try:
            # Pass over the shorter batch of the step before, which drop_last leaves out.
            if self._ahead is not None and self._ahead_step == step - 1:
                next(self._ahead)
                self._ahead_step = step
            # If another batch would come next, or none, read ahead anew, from this step on.
            if self._ahead is None or self._ahead_step != step:
                self._reading.close()
                self._ahead, self._ahead_step = batches.read_ahead(step), step
                self._reading.callback(self._ahead.close)
            local, tensors = next(self._ahead)
        except BaseException:
            self._ahead = None  # it would raise the same error for ever; the next loop reads anew
            raise
        self._ahead_step += 1
        return batches.prepare(local, tensors)

    def _start(self) -> DeviceBatches:
        """Start reading, unless it has begun, and return the source of batches; all processes call this together."""
        if not self._close_resources.alive:
            raise UsageError("The loop asks a closed ImageLoader for a batch; close it after the last one.")
        if self._opened_by != os.getpid():  # a fork: the threads and the ends of the pipes are in the other process
            self._close_resources.detach()
            self._reset_open_resources()
        if self._batches is not None:
            return self._batches

        # By now, the rank and the device of this process are set.
        config, data, group = self._config, self._data, self._group
        rank, world_size = group.rank_and_size()
        device = self._device
        if device is None:
            gpu = torch.cuda.is_available()
            device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
        group.everywhere(lambda: _check_gpu_exists(device))

        # Compare the processes: any difference would give them different batches, or different numbers of batches.
        digests = {part: manifest.digest for part, (_, manifest, _) in data.parts.items()}
        transform = self._transforms if callable(self._transforms) else None
        transform_name = None if transform is None else getattr(transform, "__qualname__", type(transform).__qualname__)
        facts = config.to_json(), digests, self._drop_last, transform_name
        group.check_equal("a loader of other images or options", *facts)
        group.check_equal("its loader at another step", self._next_step)
        if (config.mixup or config.cutmix) and world_size > 1 and not group.can_talk:
            raise UsageError(
                f"mixup and cutmix mix the images of all {world_size} processes, which cannot talk to each other here: "
                "call torch.distributed.init_process_group() first, and leave out rank and world_size."
            )

        config, data = self._with_decoder(device)
        with ExitStack() as opened:  # closed at once if anything fails: a notebook may begin the loop again and again
            # Open the source: processes that decode, which may be waiting already, and what this machine keeps.
            cache = machine_cache(config, data, self._next_step, group, opened)
            processes, self._processes = self._processes or start_decoding(config.data, opened), []
            images = RestartingBatches(config, data, rank, (1.0,) * world_size, cache, self._skipped, processes)
            opened.enter_context(images)

            # On its way to the loop, a batch passes the user's transforms, if there are any, and the augmentation.
            transform = transform or load_optional("transforms", config.transforms)
            source = opened.enter_context(transformed(images, config, transform, _log.warning))
            augment = Augment(config, crops=transform is None)
            sets = data.train.label_sets
            label_sets = None if sets is None else torch.from_numpy(sets).to(device)
            batches = DeviceBatches(config, source, augment, device, len(self.classes), label_sets, self._skipped)
            opened.callback(batches.close)

            # Resources are closed in the reverse order: what reads ahead before its source. Nothing has failed, so hand
            # all of them over to the loader.
            self._reading = opened.enter_context(ExitStack())
            self._open_resources.enter_context(opened.pop_all())
        self._batches = batches
        return batches

    def _with_decoder(self, device: torch.device) -> tuple[ResolvedConfig, Dataset]:
        """Return options and images with the decoder decided, in the same way in all processes."""
        config, data, asked = self._config, self._data, self._asked_decoder
        if asked == "cpu":
            return config, data
        problem = "transforms change images on the CPU" if self._transforms is not None else None
        if problem is None:
            problems = self._group.gather(gpu_decoder_problem(device.type))
            problem = next((problem for problem in problems if problem is not None), None)
        if asked == "gpu" and problem is not None:
            raise UsageError(f"decoder is gpu, and {problem}; omit decoder.")
        config = dataclasses.replace(config, decoder="cpu" if problem else "gpu")
        return config, data.decoded_as(config)

    def close(self) -> None:
        """End the processes beside this one, and free the kept images. That also happens when this process ends."""
        self._close_resources()
        self._batches = self._ahead = None  # they hold the kept images

    def __enter__(self) -> ImageLoader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class HeldOutImages:
    """Validation or test images of an :class:`ImageLoader`: iterate over them on every process, as often as you like.

    Example: ``correct = sum((model(images).argmax(1) == labels).sum() for images, labels in loader.validation)``
    """

    def __init__(self, loader: ImageLoader, part: Part) -> None:
        self._loader = loader
        self._part: Part = part
        self._manifest = loader._data.parts[part][1]

    def __len__(self) -> int:
        """Return the number of batches, some of which may have no image for this process, and are left out."""
        _, world_size = self._loader._group.rank_and_size()
        return evaluation_plan(self._manifest, world_size).num_steps

    @property
    def num_images(self) -> int:
        """Number of images, of all processes together."""
        return len(self._manifest)

    def __iter__(self) -> Iterator[Batch]:
        """Yield this process's batches, resized and normalised."""
        yield from self._loader._start().held_out(self._part)
        images_of_tensors.expect_nothing()  # no forward belongs to this loader's last batch any more


def _given_rank_and_size(rank: object, world_size: object) -> tuple[int, int] | None:
    """Return the rank and the number of processes; None if neither is given. Raise UsageError for other values."""
    if rank is None and world_size is None:
        return None
    if rank is None or world_size is None:
        raise UsageError("ImageLoader has only one of rank and world_size; give both, or neither.")
    if isinstance(rank, SupportsIndex) and isinstance(world_size, SupportsIndex):  # also whole numbers of NumPy's
        rank, world_size = index(rank), index(world_size)
        if 0 <= rank < world_size:
            return rank, world_size
    raise UsageError(
        f"ImageLoader has rank {rank!r} and world_size {world_size!r}; the ranks of N processes are 0 to N-1, whole "
        "numbers."
    )


def _given_device(device: torch.device | str | None) -> torch.device | None:
    """Return the device that was given; None without one. Raise UsageError if torch knows none of this name."""
    try:
        return None if device is None else torch.device(device)
    except (RuntimeError, TypeError):
        raise UsageError(f"device is {device!r}, which torch does not know; give cpu, cuda or cuda:1.") from None


def _check_gpu_exists(device: torch.device) -> None:
    """Raise UsageError if ``device`` is a GPU that this process does not have."""
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise UsageError(f"device is {device}, and the GPUs that this process sees are {count}; give another, or cpu.")


def _close_own(opened: ExitStack, process: int) -> None:
    """Close the resources of ``process``, unless this is a fork of it, which must not close what it has inherited."""
    if os.getpid() == process:
        opened.close()


def _options(data: str | os.PathLike[str], batch_size: int, options: dict[str, Any]) -> TrainConfig:
    """Return the options of a loader as those of a run. Raise UsageError for a wrong one, or one of other sections."""
    # Options of a run that say nothing about images are unknown here.
    sections = DataOptions, AugmentationOptions
    known = {field.name for section in sections for field in dataclasses.fields(section)} | {*_OTHER_OPTIONS}
    for name in options:
        if name not in known:
            hint = f" ({reason})" if (reason := why_needless(name)) else did_you_mean(name, known)
            raise UsageError(
                f"ImageLoader has no option {name}{hint}; it takes those of the data, the images "
                "and the augmentation, which `raytrain train custom --help-all` lists."
            )

    # Values that only a run can resolve: a batch size per worker, and sizes that grow over its epochs.
    if not isinstance(batch_size, SupportsIndex):  # text, or a quotient such as 64 / 2
        raise UsageError(
            f"batch_size is {batch_size!r}, and ImageLoader takes a whole number, of images of all processes together; "
            "for 32 of each process give 32 * world_size."
        )
    if "epochs" not in options and ".." in str(options.get("image_size")):
        raise UsageError(f"image_size is {options['image_size']}, which grows with the epochs; give epochs, too.")
    asked = TrainConfig(**{"epochs": _ENDLESS, **options, "data": data, "batch_size": batch_size})
    if not asked.data:
        raise UsageError("data is empty; give s3://…, gs://…, az://… or a folder with one folder of images per class.")
    return asked


def _list_together(options: TrainConfig, group: ProcessGroup) -> tuple[ResolvedConfig, Dataset]:
    """List the images on process 0, and return the resolved options and the images on all processes."""
    group.check_equal("a loader of other options", options.to_json())

    def list_images() -> tuple[ResolvedConfig, Dataset]:
        for url in filter(None, (options.data, options.validation_data, options.test_data)):
            open_store(url).check_readable()
        data = open_dataset(options)
        resolved = options.resolve(
            name="loader", num_workers=1, device="cpu", mean=data.mean, std=data.std, fastest_resizer=fastest_resizer()
        )
        return resolved, data.decoded_as(resolved)

    return group.from_first(list_images)


class _SkippedImages:
    """Collects images that could not be read, or not decoded on a GPU: the ``ImageReporter`` of a loader."""

    def __init__(self, config: ResolvedConfig, num_images: int) -> None:
        self._config, self._num_images = config, num_images
        self.by_key: dict[str, SkippedImage] = {}
        self.num_decoded_on_cpu = 0  # each image as often as it was used

    def note_skipped(self, images: list[SkippedImage]) -> None:
        """Add ``images`` that cannot be read, and log some of them. Raise UsageError if there are too many."""
        for image in images:
            if image.key in self.by_key:
                continue  # it was reported in an earlier epoch
            self.by_key[image.key] = image
            count = len(self.by_key)
            if count & (count - 1) == 0:  # a power of two: log less and less often
                _log.warning("Images left out so far: %d, the last one %s (%s).", count, image.key, image.reason)
        num_images = self._num_images
        if len(self.by_key) > self._config.max_bad_fraction * num_images:
            first = next(iter(self.by_key.values()))
            raise UsageError(
                f"{len(self.by_key):,} of {num_images:,} images cannot be read, such as {first.key} ({first.reason}), "
                f"and max_bad_fraction is {self._config.max_bad_fraction:g}; repair or remove them, or allow more."
            )

    def note_decoded_on_cpu(self, num_images: int, reason: str) -> None:
        """Count images that the CPU decoded because a GPU cannot, and log the count each time it has doubled."""
        before, self.num_decoded_on_cpu = self.num_decoded_on_cpu, self.num_decoded_on_cpu + num_images
        if before.bit_length() < self.num_decoded_on_cpu.bit_length():  # a power of two lies between them
            _log.warning("Images decoded on the CPU so far: %d, the last one a %s.", self.num_decoded_on_cpu, reason)

    def note_retries(self, num_requests: int) -> None:
        """Do nothing: a retried request has succeeded, or its error is reported elsewhere."""
