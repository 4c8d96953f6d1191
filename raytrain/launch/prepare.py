"""The steps before a run starts, in the order in which ``raytrain.train`` calls them.

1. :func:`raytrain.launch.option_checks.check_options` refuses options that no run can start with. It reads nothing.
2. :func:`settle_options` names the run, and checks by a few requests whether its name is free, whether there are
   images, and, if it resumes, with which options it was started. After that, a cluster may start.
3. :func:`raytrain.launch.resumed_options.already_trained` finds a resume that has nothing to do, and refuses one that
   has spent its dollars.
4. :func:`prepare` lists the images, which may take minutes, and takes ownership of the run.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from raytrain.config import ResolvedConfig, TrainConfig
from raytrain.config.named_functions import load_optional
from raytrain.config.network import Precision, Resizer
from raytrain.data.images.crop_box import fastest_resizer
from raytrain.errors import StorageError, UsageError
from raytrain.launch.choose_options import open_decided
from raytrain.launch.notification import check_notify
from raytrain.launch.option_checks import check_cuda_graphs, choose_decoder, hardly_meant
from raytrain.launch.placement import Placement, fastest_precision
from raytrain.launch.resumed_options import resumed_options
from raytrain.loader.machine import gpu_decoder_problem
from raytrain.monitor.snapshot import View
from raytrain.monitor.stop_request import StopSignals
from raytrain.runs.documents import (
    CONFIG,
    STOP_REQUEST,
    is_run_file,
    new_name,
    read_config,
    read_json,
    run_store,
    warn_once,
)
from raytrain.runs.logs import STARTUP, DriverLog
from raytrain.runs.metric_row import SkipLimit
from raytrain.runs.ownership import RunClaim, claim_run
from raytrain.runs.records import delete_run, has_ended_without_step
from raytrain.runs.status import RunStatus, read_status
from raytrain.runs.stored_checkpoints import Identity, newest_checkpoint, newest_step
from raytrain.storage.open import open_store
from raytrain.training.metrics.evaluation_metrics import check_number_of_classes
from raytrain.training.weights_source import check_downloads

if TYPE_CHECKING:
    from raytrain.data.dataset import Dataset
    from raytrain.data.plan.batch_plan import BatchPlan
    from raytrain.storage.store import Store
    from raytrain.trackers.tracker_threads import NamedTracker
    from raytrain.training.run import Run

_log = logging.getLogger("raytrain")

Loop = Callable[["Run"], None]
"""A training loop: called on every worker with its part of the run."""


@dataclass(frozen=True, kw_only=True)
class RunGroup:
    """Inputs that runs share if they train in this process at the same time, such as the trials of a sweep.

    Each run has workers of its own, all placed by the same ``placement``. ``images`` are the images of ``data``, in the
    form in which the backend shares them.
    """

    placement: Placement
    data: Dataset
    images: Any


@dataclass(frozen=True, kw_only=True)
class TrainRequest:
    """The arguments of a caller of :func:`raytrain.train` besides the options.

    Attributes:
        loop: the caller's own training loop, if any.
        view: called about twice a second with the run's snapshot.
        signals: where requests to stop the run come from.
        trackers: where its metrics are sent, already opened.
        started_at: when the user started the run, by ``time.monotonic()``.
        restarting: this process has trained the run already, and starts it again because it lost its coordinator, or
            because memory did not suffice. The status in storage has the time and the cost until then, and requests to
            stop the run that are in storage are still valid.
        group: the group of runs in which it trains, if any.
        sweep: the name of the sweep of which it is a trial, if any.
        notifies: whether ``--notify`` reports how it ends.
        command: the function of :mod:`raytrain` that trains it; the sentence about a failure names it.
    """

    loop: Loop | None = None
    view: View | None = None
    signals: StopSignals = field(default_factory=StopSignals)
    trackers: Sequence[NamedTracker] = ()
    started_at: float = field(default_factory=time.monotonic)
    restarting: bool = False
    group: RunGroup | None = None
    sweep: str | None = None
    notifies: bool = True
    command: str = "train"


def settle_options(config: TrainConfig) -> TrainConfig:
    """Return the options with a name; if the run resumes, with those that it keeps from its last attempt.

    These are the checks that take only a few requests, before a cluster starts. A run of the same name that has ended
    before its first step is deleted. Raises UsageError or StorageError if storage cannot be written, the name is taken,
    the run was started with other options, or there are no images or weights.
    """
    name = config.name or new_name(config.recipe)
    check_notify(config)
    urls = config.data, config.validation_data, config.test_data
    image_stores = [open_store(url) for url in urls if url]  # a wrong URL is refused before anything is written
    open_store(config.storage).check_writable()
    store = run_store(config.storage, name)

    # A run that ended before its first step is replaced, because nothing of it can be resumed.
    if not config.resume and has_ended_without_step(store):
        _log.warning("Run %r has ended before its first step; a new one takes its place.", name)
        delete_run(config.storage, name)
    _check_free(config, name, store)

    # Images within the run's folder would be deleted with it; a run within the images would be listed as images.
    for images in image_stores:
        images_url, run_url = (within.url.rstrip("/") + "/" for within in (images, store))
        if images_url.startswith(run_url) or run_url.startswith(images_url):
            raise UsageError(
                f"The run would be stored in {store.url}, and the images are in {images.url}: one is within the other; "
                "choose another --storage."
            )
        images.check_readable()

    config = dataclasses.replace(config, name=name)
    if config.resume and not store.exists(CONFIG):
        _log.warning("There is no run %r in %s yet; it starts from the beginning.", name, config.storage)
    elif config.resume:
        before = read_config(store)
        config = resumed_options(config, before)
        # The workers compare the options with a checkpoint, too, but only after the run's documents were replaced.
        Identity.of(config).check(Identity.of(before), f"Run {name!r}")
    config.check_has_price()

    # Weights are looked for before workers start. A run that resumes has them in its checkpoints.
    if config.weights is not None and not (config.resume and newest_checkpoint(store)):
        STARTUP.info("looking for the weights …")
        check_downloads(config.model, config.weights)
    return config


def _check_free(config: TrainConfig, name: str, store: Store) -> None:
    """Raise UsageError if a new run's name is taken, or if its folder has files that no run wrote.

    With ``--resume``, a run that exists is what is wanted.
    """
    if store.exists(CONFIG):
        if config.resume:
            return
        raise UsageError(
            f"A run called {name!r} is in {config.storage} already; resume it with --resume, or choose another --name."
        )

    if foreign := next((stored.path for stored in store.list() if not is_run_file(stored.path)), None):
        raise UsageError(
            f"{store.url} is where the run would be stored, and holds files that no run wrote, such as {foreign}; "
            "choose another --name or --storage."
        )


def prepare(config: TrainConfig, request: TrainRequest | None = None) -> PreparedRun:
    """List the images of a run, and take ownership of it until the returned context is left.

    ``config`` is what :func:`settle_options` returns, to which the options that the images decide are added. Nothing is
    written but the claim of ownership, and a stop request that was meant for an earlier attempt is deleted. Takes up to
    half a minute longer if the last owner of the run may be alive.

    Raises UsageError if the images of a resumed run have changed, if an option does not fit the images, or if another
    process owns the run; StorageError if storage is out of reach.

    Example:
        >>> with prepare(settle_options(config)) as prepared:
        ...     print(len(prepared.data.train), prepared.first_step)
    """
    assert config.name
    name, request = config.name, request or TrainRequest()
    store = run_store(config.storage, name)
    # A stop request that is there by now was meant for an earlier attempt. One that comes later, as while this process
    # waits for the last owner, is for this one.
    old_stop_request = {} if request.restarting else read_json(store, STOP_REQUEST)

    # The runs of a group have listed the images together.
    if request.group is not None:
        data = request.group.data
    else:
        STARTUP.info("listing the images …")
        config, data = open_decided(config, store, request.loop)
        # If the run resumes, changed images are refused before any document is replaced.
        if data.stored is not None:
            listed, stored = (
                Identity.of(config, images.classes, images.digest, images.labels_digest)
                for images in (data.train, data.stored)
            )
            listed.check(stored, f"Run {name!r}")

    if request.loop is None and config.loop is None:  # a user's loop may measure in its own way
        check_number_of_classes(config.named_metrics, len(data.train.classes))

    # Check again once the run is owned: its owner until now may just have started it, or written a checkpoint.
    claim = claim_run(store, name)
    try:
        _check_free(config, name, store)
        first_step = newest_step(store)
        if old_stop_request and read_json(store, STOP_REQUEST) == old_stop_request:
            claim.owned_store.delete(STOP_REQUEST)
    except BaseException:
        claim.close()
        raise
    return PreparedRun(
        config=config,
        name=name,
        store=claim.owned_store,
        data=data,
        first_step=first_step,
        claim=claim,
        log=None if request.group else DriverLog(claim.owned_store),
        **vars(request),
    )


@dataclass(frozen=True, kw_only=True)
class PreparedRun(TrainRequest):
    """A run that may start: its images are listed, and this process owns it until the context manager is left.

    Attributes:
        store: the run's folder in storage, writable for its owner only.
        first_step: completed steps of its newest checkpoint; 0 if it has none.
        log: copies what this process prints to storage; None for a run of a group.
    """

    config: TrainConfig
    name: str
    store: Store
    data: Dataset
    first_step: int
    claim: RunClaim
    log: DriverLog | None

    def __enter__(self) -> PreparedRun:
        if self.log is not None:
            self.log.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        if self.log is not None:
            self.log.__exit__(*exception)
        self.claim.close()

    @property
    def arguments(self) -> tuple[str, ...]:
        """The ``sys.argv`` of the workers: the whole one of this process if it defines the loop, else only its name."""
        return tuple(sys.argv if self.loop is not None else sys.argv[:1])

    def copy_log(self) -> None:
        """Copy what this process has printed to storage now, because it is about to end."""
        if self.log is not None:
            self.log.copy()

    @cached_property
    def status_before(self) -> RunStatus:
        """The status that earlier attempts have left, with their time and cost; one without either if there are none.

        It is one without either, too, if storage is out of reach.
        """
        if self.config.resume:
            with suppress(StorageError):
                return read_status(self.store)
        return RunStatus(status="starting")

    def resolve(
        self,
        num_workers: int,
        device: str,
        fastest_precision: Callable[[str], Precision] = fastest_precision,
        fastest_resizer: Callable[[], Resizer] = fastest_resizer,
        decoder_problem: Callable[[str], str | None] | None = None,
        suits_channels_last: Callable[[], bool] | None = None,
    ) -> ResolvedConfig:
        """Return the options with everything decided, for ``num_workers`` workers on ``device``, ``cpu`` or ``cuda``.

        The functions, which may ask all nodes of a cluster, are only called if the options leave their question open;
        the last one, which builds the network, only on a GPU. ``decoder_problem`` returns why GPUs cannot decode the
        images, or None. Reports what was decided on, and settings that are hardly ever meant.

        Raises UsageError if the options ask for something that the device cannot do: ``--decoder gpu``, or CUDA graphs.
        """
        # Decide on the decoder. Runs of a group share decoded images, and a GPU would decode them for each run.
        problem = "its runs share decoded images" if self.group and self.config.decoder == "auto" else None
        if self.config.transforms is not None:
            problem = "--transforms changes images on the CPU"
        if problem is None and self.config.decoder != "cpu":
            problem = (decoder_problem or gpu_decoder_problem)(device)
        decoder = choose_decoder(self.config, problem)
        if device == "cuda" and self.config.decoder == "auto" and problem is not None:
            STARTUP.info("images are decoded by the CPUs: %s", problem)

        # Decide on everything else. If an option is not open, what is passed on for it does not count.
        check_cuda_graphs(self.config, device)
        suits = suits_channels_last or self._suits_channels_last
        resolved = self.config.resolve(
            name=self.name,
            num_workers=num_workers,
            device=device,
            mean=self.data.mean,
            std=self.data.std,
            fastest_precision=fastest_precision(device) if self.config.precision == "auto" else "float32",
            # Runs of a group share decoded images, so they have the same resizer.
            fastest_resizer=fastest_resizer() if self.config.resizer == "auto" and not self.group else "pillow",
            fastest_decoder=decoder,
            channels_last=device == "cuda" and self.config.channels_last == "auto" and suits(),
        )

        # Warn of settings that are allowed for short tests, but which are hardly ever meant.
        if self.loop is None and self.config.loop is None and not self.config.is_range_test:
            for sentence in hardly_meant(self.config):
                warn_once(sentence)
        if resolved.batch_size > (num_images := len(self.data.train)):
            _log.warning(
                "--batch-size is %s for %s training images: each step takes all of them, and is an epoch.",
                f"{resolved.batch_size:,}",
                f"{num_images:,}",
            )
        return resolved

    def _suits_channels_last(self) -> bool:
        """Return whether ``--channels-last auto`` is on, on a GPU, and report that it is.

        It is off for a loop that does not build the network of ``--model``, and for an attached run: which network
        these train is not known yet.
        """
        from raytrain.training.loop_checks.unused_options import names_in_code
        from raytrain.training.networks.memory_format import (
            suits_channels_last,  # imports torch, as the workers do meanwhile
        )

        loop: Any = self.loop or load_optional("--loop", self.config.loop)
        # raytrain.profile wraps the user's loop: look at the loop itself.
        while isinstance(loop, partial) and loop.func.__module__.startswith("raytrain."):
            loop = loop.keywords.get("loop")
        builds_network = self.command != "attach" and (loop is None or "build_model" in names_in_code(loop))
        is_on = builds_network and suits_channels_last(self.config, len(self.data.train.classes))
        if is_on and self.group is None:
            STARTUP.info("storing images and weights channels last, which makes convolutions faster on a GPU …")
        return is_on

    def monitor_arguments(self, plan: BatchPlan) -> dict[str, Any]:
        """Return the arguments of this run's :class:`~raytrain.monitor.monitor.RunMonitor` after name and history."""
        return {
            "num_steps": plan.num_steps,
            "steps_per_epoch": plan.steps_per_epoch,
            "skip_limit": self.skip_limit(),
            # After a restart, the time so far is in the status, and the clock begins now.
            "started_at": None if self.restarting else self.started_at,
            "elapsed_before_s": self.status_before.elapsed_s,
        }

    def skip_limit(self) -> SkipLimit:
        """Return the limit on the number of images that may be skipped."""
        return SkipLimit(num_images=self.data.num_images, max_bad_fraction=self.config.max_bad_fraction)
