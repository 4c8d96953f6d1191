"""Everything before a run starts: one ordered pass of checks, its images, its place in storage and its owner."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from raytrain.config import ResolvedConfig, TrainConfig
from raytrain.config.network import Precision, Resizer, timm_name
from raytrain.data.images.resize import fastest_resizer
from raytrain.errors import UsageError, flag
from raytrain.launch.placement import Placement, fastest_precision
from raytrain.monitor.snapshot import View
from raytrain.monitor.stop_request import StopSignals
from raytrain.runs.checkpoint_files import Identity, newest_checkpoint, newest_step
from raytrain.runs.documents import (
    CONFIG,
    SUMMARY,
    SWEEP,
    check_name,
    is_own,
    known_fields,
    new_name,
    read_config,
    read_json,
    run_store,
)
from raytrain.runs.logs import STARTUP, DriverLog
from raytrain.runs.metric_row import SkipLimit
from raytrain.runs.outcome import TrainResult, stop_reason_of
from raytrain.runs.ownership import RunClaim, claim_run
from raytrain.runs.records import delete_run
from raytrain.runs.status import read_status
from raytrain.storage.lent_credentials import Scope
from raytrain.training.weights_source import DEFAULT

if TYPE_CHECKING:
    from raytrain.data.dataset import Dataset
    from raytrain.storage.store import Store
    from raytrain.trackers.tracking import NamedTracker
    from raytrain.training.run import Run

_LOG = logging.getLogger("raytrain")

Loop = Callable[["Run"], None]  # A training loop: called on every worker with its part of the run


@dataclass(frozen=True, kw_only=True)
class RunGroup:
    """What several runs of this process share that train at once, each with one worker.

    ``placement`` is each run's part of the machines. ``images`` are those of ``data``, as the backend shares them.
    """

    placement: Placement
    data: Dataset
    images: Any


@dataclass(frozen=True, kw_only=True)
class Start:
    """What the caller of :func:`raytrain.train` wants besides the options.

    ``loop`` is his own function, if any, and ``started_at`` when the user started the run, as ``time.monotonic()``
    tells the time. ``restarting`` says that this process started the run before, and lost it: requests to stop it are
    still valid. ``group`` is that of the runs beside which it trains, if any.
    """

    loop: Loop | None = None
    view: View | None = None
    signals: StopSignals = field(default_factory=StopSignals)
    trackers: Sequence[NamedTracker] = ()
    started_at: float = field(default_factory=time.monotonic)
    restarting: bool = False
    group: RunGroup | None = None


@dataclass(frozen=True, kw_only=True)
class PreparedRun(Start):
    """A run that may start: its place in storage is its own until the context manager is left, and its data is there.

    ``log`` keeps what this process prints; None if the run trains beside others.
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

    def copy_log(self) -> None:
        """Copy what the run's owner has printed: the run is about to end, and those who follow it with it."""
        if self.log is not None:
            self.log.copy()

    def resolve(
        self,
        num_workers: int,
        device: str,
        fastest_precision: Callable[[str], Precision] = fastest_precision,
        fastest_resizer: Callable[[], Resizer] = fastest_resizer,
    ) -> ResolvedConfig:
        """The options with everything decided. The last two are only called if it is up to us."""
        resolved = self.config.resolve(
            name=self.name,
            num_workers=num_workers,
            device=device,
            mean=self.data.mean,
            std=self.data.std,
            fastest_precision=fastest_precision(device) if self.config.precision == "auto" else "float32",
            # The runs of a group share decoded images.
            fastest_resizer=fastest_resizer() if self.config.resizer == "auto" and not self.group else "pillow",
        )
        if resolved.batch_size > (num_images := len(self.data.train)):
            sentence = "--batch-size is %s for %s training images: each step takes all of them, and is an epoch."
            _LOG.warning(sentence, f"{resolved.batch_size:,}", f"{num_images:,}")
        return resolved

    def scope(self) -> Scope | None:
        """What lent credentials are good for: reading the images, and the run's own place. None: no limit."""
        reads = f"{self.data.train_store.url}/", f"{self.data.test_store.url}/"
        return Scope(reads, (f"{self.store.url}/",)) if self.config.scope_keys else None

    def skip_limit(self) -> SkipLimit:
        """How many images may be skipped."""
        num_images = len(self.data.train) + len(self.data.test)
        return SkipLimit(num_images=num_images, max_bad_fraction=self.config.max_bad_fraction)


def check_asked(config: TrainConfig, loop: Loop | None = None) -> None:
    """Raise UsageError for options that no run can start with, as far as they alone show it. Reads nothing."""
    check_named(config)
    if loop is None and config.loop is None:
        config.check_learning_rate()
    check_functions(config, loop)


def check_places(config: TrainConfig) -> TrainConfig:
    """The same options with a name; those of a run that resumes keep what it started with.

    Raises UsageError or StorageError if storage cannot be written, the name is taken, the run was made with other
    options, or there are no images: all that few requests tell, before a cluster starts.
    """
    from raytrain.storage.open import open_store

    name = config.name or new_name(config.recipe)
    data = [open_store(url) for url in (config.data, config.test_data) if url]  # refuses URLs before it writes
    open_store(config.storage).check_writable()
    store = run_store(config.storage, name)
    if not config.resume:
        _free_name(config.storage, name, store)
    _check_free(config, name, store)
    for images in data:
        _check_apart(images, store)
        images.check_readable()
    config = dataclasses.replace(config, name=name)
    if config.resume and not store.exists(CONFIG):
        _LOG.warning("There is no run %r in %s yet; it starts from the beginning.", name, config.storage)
    elif config.resume:
        before = read_config(store)
        config = _resumed(config, before)
        Identity.of(config).check(Identity.of(before), f"Run {name!r}")  # workers would, after a document is replaced
    return config


def already_trained(config: TrainConfig) -> TrainResult | None:
    """Return how a resumed run ended that has all the epochs that ``config`` asks for; None if it lacks some."""
    store = run_store(config.storage, config.name or "")
    if not config.resume or not store.exists(CONFIG) or newest_checkpoint(store) is None:
        return None
    before, status, summary = read_config(store), read_status(store), read_json(store, SUMMARY)
    if (config.batch_size, config.max_steps) != (before.batch_size, before.max_steps):
        return None
    steps_per_epoch = -(-status.num_steps // before.epochs)
    has_all = status.status == "finished" and config.epochs <= before.epochs
    has_more = status.status == "stopped" and not before.max_steps and config.epochs * steps_per_epoch <= status.step
    if not (has_all or has_more):
        return None
    stop_reason = stop_reason_of(summary)
    try:
        result = TrainResult(**{**known_fields(TrainResult, summary), "stop_reason": stop_reason})
    except TypeError:  # its summary is not there, or damaged
        return None
    _LOG.warning(
        "Run %r has %g epochs already, and --epochs is %d: there is nothing to do, and nothing was changed.",
        config.name,
        result.epochs,
        config.epochs,
    )
    return result


def prepare(config: TrainConfig, start: Start | None = None) -> PreparedRun:
    """List the images of a run whose options :func:`check_places` has returned, and make the run this process's own.

    Writes nothing to it but the claim. Raises UsageError if the images are other ones than before, or if another
    process owns the run.
    """
    assert config.name
    start = start or Start()
    store = run_store(config.storage, config.name)
    if start.group is None:
        config = with_preprocessing_of_weights(config)
    data = start.group.data if start.group else _listed(config, store)
    claim, first_step = _own(config, store)
    return PreparedRun(
        config=config,
        name=config.name or "",
        store=claim.owned_store,
        data=data,
        first_step=first_step,
        claim=claim,
        log=None if start.group else DriverLog(claim.owned_store),
        **vars(start),
    )


def with_preprocessing_of_weights(config: TrainConfig) -> TrainConfig:
    """The options, with the image size, cropping and normalisation of timm's weights as far as they are left open."""
    name = timm_name(config.model)
    if name is None or config.weights != DEFAULT:
        return config
    from raytrain.training.model import preprocessing  # imports torch and timm

    wanted = preprocessing(name, config.channels)
    return dataclasses.replace(
        config, **{option: value for option, value in wanted.items() if getattr(config, option) is None}
    )


def _listed(config: TrainConfig, store: Store) -> Dataset:
    from raytrain.data.dataset import open_dataset

    STARTUP.info("listing the images …")
    data = open_dataset(config, store)
    _check_images(config, data, f"Run {config.name!r}")
    return data


def _free_name(storage: str, name: str, store: Store) -> None:
    """Delete a run that ended before its first step: nothing of it can be resumed."""
    if not store.exists(CONFIG) or store.exists(SWEEP):
        return
    status = read_status(store)
    if status.status in ("failed", "stopped") and not status.step and newest_checkpoint(store) is None:
        _LOG.warning("Run %r has ended before its first step; a new one takes its place.", name)
        delete_run(storage, name)


def _check_free(config: TrainConfig, name: str, store: Store) -> None:
    """Raise UsageError if a new run exists already."""
    if store.exists(CONFIG):
        if config.resume:
            return
        raise UsageError(
            f"A run called {name!r} is in {config.storage} already; resume it with --resume, or choose another --name."
        )
    if other := next((each.path for each in store.list() if not is_own(each.path)), None):
        raise UsageError(
            f"{store.url} is where the run would be stored, and holds files that no run wrote, such as {other}; choose "
            "another --name or --storage."
        )


def _check_apart(images: Store, store: Store) -> None:
    """Raise UsageError if the images are in the run's folder, or the run's folder is among the images."""
    data, run = (each.url.rstrip("/") + "/" for each in (images, store))
    if data.startswith(run) or run.startswith(data):
        raise UsageError(
            f"The run would be stored in {store.url}, and the images are in {images.url}: one is within the other; "
            "choose another --storage."
        )


def _own(config: TrainConfig, store: Store) -> tuple[RunClaim, int]:
    """Own the run, from its newest step on. Whoever owned it until now may have written a checkpoint since."""
    name = config.name or ""
    claim = claim_run(store, name)
    try:
        _check_free(config, name, store)
        return claim, newest_step(store)
    except BaseException:
        claim.close()
        raise


def check_functions(config: TrainConfig, loop: Loop | None) -> None:
    """Raise UsageError for a network, a loop or weights that do not exist, as far as torch is not needed to tell."""
    from raytrain.config.user_code import check_loop, check_module
    from raytrain.training.model_names import check_model_name, check_optimizer_name
    from raytrain.training.weights_source import check_weights_source

    if loop is not None:
        check_loop(loop)
    if loop is None and config.loop is not None and ":" in config.loop:
        check_module("--loop", config.loop)
    if loop is None and config.loop is None:  # a loop of the user's may train another network
        check_model_name(config.model)
        check_optimizer_name(config.optimizer)
        _check_best(config)
    if config.weights is not None and not config.resume:
        check_weights_source(config.weights)


def _check_best(config: TrainConfig) -> None:
    """Raise UsageError if the built-in evaluation, which a loop of the user's may replace, lacks the best's metric."""
    from raytrain.training import evaluation_metrics

    metrics = evaluation_metrics.LABEL_METRICS if config.multi_label else evaluation_metrics.CLASS_METRICS
    if config.best_metric not in metrics:
        raise UsageError(
            f"--best is {config.best_metric}, and evaluations measure {', '.join(metrics)}; name one of these."
        )


def check_named(config: TrainConfig) -> None:
    """Raise UsageError if the data or the name is missing, or the name is not allowed."""
    if not config.data:
        raise UsageError(
            "--data is missing; give s3://…, gs://…, az://… or a folder with one folder of images per class."
        )
    if config.resume and not config.name:
        raise UsageError("--resume needs --name; `raytrain runs` lists the runs.")
    if config.name:
        check_name(config.name)


def refuse_sweep(config: TrainConfig) -> None:
    """Raise UsageError if a sweep is to be resumed as if it were a run."""
    if config.resume and config.name and run_store(config.storage, config.name).exists(SWEEP):
        raise UsageError(
            f"{config.name!r} is a sweep; resume it with `raytrain sweep … --resume`, or choose another --name."
        )


def _check_images(config: TrainConfig, data: Dataset, what: str) -> None:
    """Raise UsageError if ``what`` was started with other images or labels, also before a document is overwritten."""
    if data.stored is not None:
        now, then = (
            Identity.of(config, images.classes, images.digest, images.labels_digest)
            for images in (data.train, data.stored)
        )
        now.check(then, what)


def _resumed(config: TrainConfig, before: TrainConfig) -> TrainConfig:
    """On another number of workers, a run keeps the global batch and the learning rate that it started with."""
    for option in ("freeze", "head_learning_rate_factor", "layer_decay", "decay_norms_and_biases", "ema_decay", "best"):
        now, then = getattr(config, option), getattr(before, option)
        if now != then:  # the state in its checkpoints is laid out by them
            raise UsageError(
                f"{flag(option)} is {now}, and the run was started with {then}; resume with that, or start another run "
                "from its --weights."
            )
    kept = ("batch_size", "learning_rate", "image_size", "resize", "crop_fraction", "interpolation", "mean", "std")
    return dataclasses.replace(
        config,
        precision=before.precision if config.precision == "auto" else config.precision,
        resizer=before.resizer if config.resizer == "auto" else config.resizer,
        **{option: getattr(before, option) for option in kept if getattr(config, option) is None},
    )
