"""Watches some steps of a loop on several workers for signs that the result depends on their number.

A loop is exact if its loss is a mean over images and each term depends on one image only. That cannot be proved from
outside, but the usual exceptions show in the calls of torch that the loop makes. They are followed
(:mod:`raytrain.training.loop_checks.watched_calls`) in the first two steps of each of the first five epochs of an
attempt, because some losses begin after a warm-up, and up to the first backward of an epoch, which comes later for a
loss of several batches. One of these steps is also computed with some images swapped
(:mod:`raytrain.training.loop_checks.swapped_images`). Nothing of the loop's is replaced, and other steps are not
watched. Numbers that come from outside of these calls are compared between the workers
(:mod:`raytrain.training.loop_checks.loop_numbers`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from raytrain.config import ResolvedConfig
from raytrain.data.plan.permutation import mix
from raytrain.errors import some_of
from raytrain.training.batches.batch import Batch
from raytrain.training.loop_checks import swapped_images, watched_calls
from raytrain.training.loop_checks.loop_numbers import Place, differing_lines
from raytrain.training.loop_checks.scripted_calls import scripted_calls_by
from raytrain.training.loop_checks.swapped_images import Table, are_alike
from raytrain.training.loop_checks.warning_places import warnings_at_callers
from raytrain.training.loop_checks.watch_notes import DRAWS, GENERATOR, LAYERS, NOTES_ON_LOSSES, NUMBERS
from raytrain.training.loop_checks.watched_calls import WatchedCalls
from raytrain.training.networks.compiled import compiled_calls_by
from raytrain.training.prepared_models import PreparedModels
from raytrain.training.protocols import Worker
from raytrain.training.random_numbers import held_generators, state_of, used_generators

_NUM_WATCHED = 2  # steps of an epoch
_MAX_WATCHED = 32  # steps of an epoch, if the loop calls no backward in those before
_NUM_EPOCHS = 5  # of an attempt


class LoopWatch:
    """Finds out in the first steps of an attempt's first epochs whether the loop depends on the number of workers.

    ``report`` gets a note, on all workers, for each sign that any of them has found. A run of one worker is not
    watched. With ``--compile``, what the networks compute within is not seen.

    Example::

        watch = LoopWatch(config, worker, models, print)
        with watch.step(batch, sys._getframe(), run):
            ...  # the loop's step
        watch.compare()
    """

    def __init__(
        self, config: ResolvedConfig, worker: Worker, models: PreparedModels, report: Callable[[str], None]
    ) -> None:
        self._config, self._worker, self._models, self._report = config, worker, models, report
        self._notes: set[str] = set()  # that this worker has found
        self._draws = False  # True if this worker draws random numbers that others do not, or for all images the same
        self._has_news = False  # True if steps were watched since the notes were last compared
        self._calls = WatchedCalls(self._notes.add, config.batch_size, worker.rank)
        self._num_steps_left = self._num_steps_watched = 0  # of this epoch
        self._has_backward = False  # True if the loop has called a backward in this epoch, on any worker
        self._num_epochs_left = _NUM_EPOCHS if worker.world_size > 1 else 0
        self._epoch: int | None = None
        self._may_swap = False  # True if no step of this epoch was computed with swapped images

    @contextmanager
    def step(self, batch: Batch, frame: FrameType | None, run: object) -> Iterator[None]:
        """Watch a step of the loop in this context; ``frame`` is the frame of the function that loops over the batches.

        Its variable ``run`` is left out in the search for generators, because the run seeds its own for each image.
        Steps that are not to be watched pass as they are. Raises UsageError, within the step, for a batch norm over
        this worker's images alone.
        """
        is_first = self._epoch is None
        if batch.epoch != self._epoch and self._num_epochs_left:
            self._num_epochs_left -= 1
            self._num_steps_left, self._num_steps_watched = _NUM_WATCHED, 0
            self._may_swap, self._has_backward = True, False
        self._epoch = batch.epoch
        if not self._num_steps_left:
            yield
            return
        self._num_steps_left -= 1
        self._num_steps_watched += 1

        # States of generators of NumPy and Python are compared before and after, as no call of torch shows their use.
        variables = [] if frame is None else [value for value in frame.f_locals.values() if value is not run]
        generators = held_generators([*variables, *self._models.trained])
        generators = [generator for generator in generators if not isinstance(generator, torch.Generator)]
        states = list(map(state_of, generators))

        weights = [weight for model in self._models.trained for weight in (*model.parameters(), *model.buffers())]
        # Swapped images cost up to the time of two steps, so they are computed once in an epoch. In an attempt's first
        # step, a network whose last layer begins with zeros gives the same for all images, which shows nothing.
        swaps, self._may_swap = self._may_swap and not is_first, self._may_swap and is_first
        self._calls.begin(batch, weights, swaps=swaps)
        with (
            compiled_calls_by(self._models.trained, self._calls.call_compiled),
            scripted_calls_by(self._calls.call_scripted),
            self._calls,
            warnings_at_callers(watched_calls.__file__, swapped_images.__file__, "_call_variant"),
        ):
            yield

        # A loop may have a generator for each image, which draws for it alone: then there are as many seeds as images.
        # With fewer, one of them has drawn for several images.
        draws_for_all = 0 < len(self._calls.drawn.seeds) < batch.num_used
        if draws_for_all or list(map(state_of, generators)) != states:
            self._notes.add(GENERATOR)
            self._draws = True

        # The run has seeded the libraries' own generators for this step. One that is not as it was has been used.
        seed = mix(self._config.seed, batch.step, self._worker.rank)
        if libraries := used_generators(seed, self._worker.device):
            self._notes.add(DRAWS.format(names=" and ".join(libraries)))
            self._draws = True
        self._calls.end(draws=self._draws)
        self._has_news = True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not watch calls of torch in this context, in which the run itself computes."""
        before, self._calls.is_paused = self._calls.is_paused, True
        try:
            yield
        finally:
            self._calls.is_paused = before

    def follow_mean(self, numerator: Tensor, mean: Tensor) -> None:
        """Take ``mean``, which ``run.mean`` has computed of a ``numerator``, for a mean over this worker's images.

        The workers' means differ, so a loss may be linear in this one, but must not square it.
        """
        self._calls.follow_mean(numerator, mean)

    def compare(self) -> None:
        """Report what any worker has found in the steps that were watched since the last call.

        These are the notes of each, and numbers in losses and in attributes of the networks' layers that differ between
        the workers. Nothing happens if no step was watched. All workers call it after the same step.
        """
        if not self._has_news:
            return
        self._has_news = False

        # A layer may keep a statistic of a worker's images as a plain number, which no comparison of weights covers.
        # Layers of one class share a name. The numbers are compared as texts, because NaN differs from itself.
        numbers: dict[str, list[str]] = {}
        for layer in (layer for model in self._models.trained for layer in model.modules()):
            for name, value in vars(layer).items():
                if isinstance(value, float) and not name.startswith("_"):
                    numbers.setdefault(f"{type(layer).__name__}.{name}", []).append(repr(value))
        signs = _Signs(
            sorted(self._notes),
            numbers,
            self._calls.numbers.in_losses(),
            self._draws,
            self._calls.depends_on_places,
            self._calls.tables,
            self._calls.has_backward,
        )
        of_workers: list[Any] = [None] * self._worker.world_size
        dist.all_gather_object(of_workers, signs)
        signs_of_workers = cast("list[_Signs]", of_workers)

        # A loss of several batches has its backward in the last one's step, which is watched and swapped, too.
        self._has_backward |= any(worker_signs.has_backward for worker_signs in signs_of_workers)
        if not self._has_backward and self._num_steps_watched < _MAX_WATCHED:
            self._num_steps_left, self._may_swap = max(self._num_steps_left, 1), True

        notes = {note for worker_signs in signs_of_workers for note in worker_signs.notes}
        tables = [worker_signs.tables for worker_signs in signs_of_workers if worker_signs.tables is not None]
        if any(worker_signs.depends_on_places for worker_signs in signs_of_workers) and are_alike(tables):
            notes.add(NOTES_ON_LOSSES["placed"])
        for note in sorted(notes):
            self._report(note)

        # Report lines whose numbers differ. If a worker draws random numbers, these may be such numbers, which have a
        # note of their own.
        lines = self._calls.numbers.lines()
        self._calls.numbers.forget()
        if not any(worker_signs.draws for worker_signs in signs_of_workers):
            for line in differing_lines([worker_signs.in_losses for worker_signs in signs_of_workers]):
                self._report(NUMBERS.format(line=lines.get(line, f"{line[0]}, line {line[1]}")))

        # Report attributes of layers that differ.
        differing = [
            name
            for name in numbers
            if any(worker_signs.in_layers.get(name) != numbers[name] for worker_signs in signs_of_workers)
        ]
        if differing:
            self._report(LAYERS.format(names=some_of(differing)))


class _Signs(NamedTuple):
    """Signs that one worker has found in the watched steps, which the workers compare.

    ``in_layers`` has numbers in attributes of layers as texts, by class and attribute; ``in_losses`` numbers in losses
    by step, file and line. ``draws`` is True if the worker draws random numbers that others do not, or for all images
    the same. ``depends_on_places``, ``tables`` and ``has_backward`` are those of its watched calls.
    """

    notes: list[str]
    in_layers: dict[str, list[str]]
    in_losses: dict[Place, list[float]]
    draws: bool
    depends_on_places: bool
    tables: list[Table] | None
    has_backward: bool
