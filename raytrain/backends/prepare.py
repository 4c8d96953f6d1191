"""What every backend does before it trains: checks the options, opens the data, and puts the run together."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raytrain.backends.fastest_precision import fastest_precision
from raytrain.backends.preprocessing import with_preprocessing_of_weights
from raytrain.config import ResolvedConfig, TrainConfig
from raytrain.config.network import Precision
from raytrain.errors import UsageError, flag
from raytrain.runs.checkpoint_files import newest_step
from raytrain.runs.claim import RunClaim, claim_run
from raytrain.runs.documents import check_name, new_name, read_config, run_store
from raytrain.runs.identity import Identity
from raytrain.runs.layout import CONFIG
from raytrain.runs.logs import DriverLog
from raytrain.runs.skipped_images import SkipLimit
from raytrain.runs.startup_log import STARTUP
from raytrain.storage.lent_credentials import Scope

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from torch import Tensor

    from raytrain.data.dataset import Dataset
    from raytrain.storage.base import Store
    from raytrain.training.run import Run
    from raytrain.training.run_spec import RunSpec
    from raytrain.training.transforms import Transforms

_LOG = logging.getLogger("raytrain")

Loop = Callable[["Run"], None]
"""A training loop: called on every worker with its part of the run."""


@dataclass(frozen=True)
class PreparedRun:
    """A run that may start: its place in storage is its own, and its data can be read.

    ``restarting`` says that this process started it before, and lost it: requests to stop it are still valid. ``claim``
    makes this process the run's owner until the context manager is left, and ``log`` keeps what the owner prints; None
    for the other processes of the run.
    """

    config: TrainConfig
    name: str
    store: Store
    data: Dataset
    first_step: int
    restarting: bool = False
    claim: RunClaim | None = None
    log: DriverLog | None = None

    def __enter__(self) -> PreparedRun:
        if self.log is not None:
            self.log.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.log is not None:
            self.log.__exit__(kind, error, trace)
        if self.claim is not None:
            self.claim.close()

    def copy_log(self) -> None:
        """Copy what the run's owner has printed: the run is about to end, and those who follow it with it."""
        if self.log is not None:
            self.log.copy()

    def resolve(
        self, num_workers: int, device: str, fastest_precision: Callable[[str], Precision] = fastest_precision
    ) -> ResolvedConfig:
        """The options with everything decided. ``fastest_precision`` is only called if it is up to us."""
        return self.config.resolve(
            name=self.name,
            num_workers=num_workers,
            device=device,
            mean=self.data.mean,
            std=self.data.std,
            fastest_precision=fastest_precision(device) if self.config.precision == "auto" else "float32",
        )

    def scope(self, *writes: str) -> Scope | None:
        """What credentials that the cluster is lent are good for: reading the images, and URLs that start with one of
        ``writes``. None if they are this process's own.
        """
        reads = f"{self.data.train_store.url}/", f"{self.data.test_store.url}/"
        return Scope(reads, writes) if self.config.scope_keys else None

    def skip_limit(self) -> SkipLimit:
        """How many images may be skipped."""
        return SkipLimit.of(self.config, len(self.data.train) + len(self.data.test))


def prepare(
    config: TrainConfig, *, restarting: bool = False, owns_run: bool = True, shared: Dataset | None = None
) -> PreparedRun:
    """Check all that can be checked without a cluster: the run's place in storage, and that its data can be read.

    With ``resume``, a run that does not exist yet is started. The run is then this process's own, unless another of its
    processes owns it. Writes nothing else to it. ``restarting``: this process started the run before. ``shared``: the
    images, if the run trains beside others of this process, whose log is kept for all of them together.
    """
    from raytrain.storage.open import open_store

    name = config.name or new_name(config.recipe)
    open_store(config.storage).check_writable()
    store = run_store(config.storage, name)
    _check_place(config, name, store)
    if config.resume and not store.exists(CONFIG):
        _LOG.warning("There is no run %r in %s yet; it starts from the beginning.", name, config.storage)
    elif config.resume:
        before = read_config(store)
        config = _resumed(config, before)
        check_options(config, before, f"Run {name!r}")
    if shared is None:
        config = with_preprocessing_of_weights(config)
    data = shared or _listed(config, name, store)
    prepared = PreparedRun(config, name, store, data, newest_step(store), restarting)
    return _own(prepared, keeps_log=shared is None) if owns_run else prepared


def _listed(config: TrainConfig, name: str, store: Store) -> Dataset:
    from raytrain.data.dataset import open_dataset

    STARTUP.info("listing the images …")
    data = open_dataset(config, store)
    _check_images(config, data, f"Run {name!r}")
    return data


def check_places(config: TrainConfig) -> None:
    """Raise UsageError or StorageError if the name is taken or the images cannot be read, as few requests tell.

    :func:`prepare` checks more, beside a cluster that starts, and would have to end again.
    """
    from raytrain.storage.open import open_store

    if config.name:
        _check_place(config, config.name, run_store(config.storage, config.name))
    for url in filter(None, (config.data, config.test_data)):
        open_store(url).check_readable()


def _check_place(config: TrainConfig, name: str, store: Store) -> None:
    """Raise UsageError if a new run exists already."""
    if store.exists(CONFIG) and not config.resume:
        raise UsageError(
            f"A run called {name!r} is in {config.storage} already; resume it with --resume, or choose another --name."
        )


def _own(prepared: PreparedRun, *, keeps_log: bool) -> PreparedRun:
    """The same run, which this process now owns. Whoever owned it until now may have written a checkpoint since."""
    claim = claim_run(prepared.store, prepared.name)
    try:
        _check_place(prepared.config, prepared.name, prepared.store)
        first_step = newest_step(prepared.store)
    except BaseException:
        claim.close()
        raise
    store = claim.owned_store
    log = DriverLog(store) if keeps_log else None
    return dataclasses.replace(prepared, store=store, first_step=first_step, claim=claim, log=log)


def check(config: TrainConfig, loop: Loop | None = None) -> None:
    """Raise UsageError for options that no run can start with, as far as they alone show it."""
    check_named(config)
    if loop is None and config.loop is None:
        config.check_learning_rate()
    check_functions(config, loop)


def check_functions(config: TrainConfig, loop: Loop | None) -> None:
    """Raise UsageError for a network, a loop or weights that do not exist, as far as torch is not needed to tell."""
    from raytrain.config.user_function import check_module
    from raytrain.training.model_names import check_model_name, check_optimizer_name
    from raytrain.training.weights_source import check_weights_source

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
    from raytrain.training import class_metrics, label_metrics

    metrics = label_metrics.METRICS if config.multi_label else class_metrics.METRICS
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


def load_loop(config: TrainConfig, loop: Loop | None) -> Loop | None:
    """The training loop to use: ``loop``, or else the one that ``--loop`` names; None for the built-in one."""
    if loop is not None or config.loop is None:
        return loop
    from raytrain.config.user_function import load_function

    return load_function("--loop", config.loop)


def load_transforms(config: TrainConfig) -> Callable[[], Transforms] | None:
    """The function that ``--transforms`` names."""
    if config.transforms is None:
        return None
    from raytrain.config.user_function import load_function

    return load_function("--transforms", config.transforms)


def run_spec(config: ResolvedConfig, data: Dataset, store: Store, loop: Loop | None, num_workers: int) -> RunSpec:
    """The one way to put a run together, whoever trains it. ``num_workers`` only sizes the batches of evaluations."""
    from raytrain.data.class_weights import class_weights
    from raytrain.training.run_spec import RunSpec

    return RunSpec(
        config=config,
        loop=loop,
        transforms=load_transforms(config),
        classes=data.train.classes,
        manifest_digest=data.train.digest,
        plan=data.plan(config),
        test_plan=data.test_plan(num_workers),
        store=store,
        class_weights=class_weights(config.class_weights, data.train),
        label_sets=data.train.label_sets,
    )


def load_initial_weights(spec: RunSpec, first_step: int) -> Mapping[str, Tensor] | None:
    """The weights that ``--weights`` names, read once for all workers; None if the seed or a checkpoint decides.

    Raises UsageError if the network, its weights or what is asked of its layers do not fit: the network is built here
    for that alone.
    """
    from raytrain.training import transfer
    from raytrain.training.gradient_checkpointing import checkpoint_gradients
    from raytrain.training.model import check_growing_size
    from raytrain.training.optimizer import parameter_groups

    config, num_classes = spec.config, len(spec.classes)
    weights = transfer.initial_weights(config, spec.classes, first_step)
    model = transfer.initial_model(config, num_classes, weights)
    if spec.loop is None:  # a loop of the user's may train another network
        check_growing_size(model, config)
        transfer.freeze(model, config.freeze, num_classes)
        parameter_groups(config, model, num_classes)  # no optimizer, which would import torch._dynamo: seconds
        if config.gradient_checkpointing:
            checkpoint_gradients(model)
    return weights


def check_options(config: TrainConfig, before: TrainConfig, what: str) -> None:
    """Raise UsageError if ``what`` was started with options that make its checkpoints useless with those of ``config``.

    The workers check the same by the checkpoint; here it is checked before a document of the run is overwritten.
    """
    Identity.of(config).check(Identity.of(before), what)


def _check_images(config: TrainConfig, data: Dataset, what: str) -> None:
    """Raise UsageError if ``what`` was started with other images or labels, also before a document is overwritten."""
    if data.stored is not None:
        if data.train.labels_digest != data.stored.labels_digest:
            raise UsageError(
                f"{what} was made with other labels (digest {_shown(data.stored.labels_digest)}), and --labels has "
                f"{_shown(data.train.labels_digest)}: resume with the labels that it was made with, or start a new run "
                "under another --name."
            )
        now, then = (Identity.of(config, images.classes, images.digest) for images in (data.train, data.stored))
        now.check(then, what)


def _shown(labels_digest: str) -> str:
    return f"{labels_digest[:8]}…" if labels_digest else "none, but class folders"


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
        **{option: getattr(before, option) for option in kept if getattr(config, option) is None},
    )
