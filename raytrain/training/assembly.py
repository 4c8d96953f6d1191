"""Puts a worker's part of a run together from its spec, and trains it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress

import torch
from torch import Tensor

from raytrain.config.pickled_code import send_own_code
from raytrain.data.images.malloc import keep_freed_memory
from raytrain.errors import StorageError
from raytrain.monitor.events import Note
from raytrain.runs.documents import UNUSED_OPTIONS, write_json
from raytrain.runs.outcome import Outcome, Progress
from raytrain.training import auto_accumulate as memory
from raytrain.training import loop
from raytrain.training.batches.augment_and_normalise import Augment
from raytrain.training.batches.device_batches import DeviceBatches
from raytrain.training.checkpoint import Checkpoints
from raytrain.training.checkpoint_state import CheckpointState
from raytrain.training.evaluation import check_built_in_evaluation, evaluate_prepared
from raytrain.training.loop_checks.left_behind import note_on_changes, states_of_variables
from raytrain.training.loop_checks.number_of_workers import notes_on_number_of_workers
from raytrain.training.loop_checks.reached_code import remember_source_lines
from raytrain.training.loop_checks.unused_options import options_without_effect, unused_options
from raytrain.training.loop_errors import errors_of_loop
from raytrain.training.metrics.gallery import Gallery
from raytrain.training.metrics.sample_margins import SampleMargins
from raytrain.training.networks import transfer
from raytrain.training.networks.device_precision import precision_warning, set_gpu_products
from raytrain.training.networks.loss import Loss
from raytrain.training.networks.model import check_growing_size
from raytrain.training.optimisation import parameter_groups
from raytrain.training.prepared_models import PreparedModels, checkpoint_gradients
from raytrain.training.protocols import BatchSource, Reporter, Worker
from raytrain.training.run import Run
from raytrain.training.run_files import RunFiles
from raytrain.training.run_spec import RunSpec
from raytrain.training.steps import Steps
from raytrain.training.waiting import report_long_waits

_RETURNED = "what the loop returns ({}) is dropped: log numbers with run.log, and write anything else into run.folder"
_SENT_WITHIN_S = 30.0  # for the files of a loop that has failed


def load_initial_weights(spec: RunSpec, first_step: int) -> Mapping[str, Tensor] | None:
    """Return the weights that ``--weights`` names, if any, for a run that begins after ``first_step`` steps.

    Raises UsageError if they do not fit the network. For the built-in loop, also raise it if an option about the
    network does not fit: these are refused here, before the workers start. The network is only built for that.
    """
    config, num_classes = spec.config, len(spec.classes)
    weights = transfer.initial_weights(config, spec.classes, first_step)
    model = transfer.initial_model(config, num_classes, weights)
    if spec.loop is None:  # a loop of the user's may train another network
        check_growing_size(model, config)
        transfer.freeze(model, config.freeze, num_classes)
        # Its groups are made without the optimizer, which would import torch._dynamo and so take seconds.
        parameter_groups(config, model, num_classes)
        if config.gradient_checkpointing:
            checkpoint_gradients(model)
    return weights


def make_run(
    spec: RunSpec,
    source: BatchSource,
    reporter: Reporter,
    device: torch.device,
    weights: Mapping[str, Tensor] | None = None,
) -> Run:
    """Return this worker's part of the run, which continues from the newest checkpoint, if there is one.

    Every worker calls this, after its process group is made, with the result of :func:`load_initial_weights`.
    """
    config, worker = spec.config, Worker.here(device)

    # Set up this process so that the device is fast, and report what will not take effect as asked.
    if device.type == "cpu":
        keep_freed_memory()
    else:
        set_gpu_products(config.precision)
        torch.backends.cudnn.benchmark = True  # worth its trials, because nearly all batches have the same size
    if worker.rank == 0:  # before the first step, which may take minutes if the precision is emulated
        notes = [precision_warning(config.precision, device), *transfer.notes_on_weights(config, spec.classes, weights)]
        if worker.world_size == 1 and config.gradient_dtype is not None:
            notes.append(f"--gradient-dtype {config.gradient_dtype} changes nothing: one worker sends no gradients")
        for note in filter(None, notes):
            reporter.note_event(Note(note))

    # Read the newest checkpoint, from which each object is restored when the loop prepares it.
    checkpoints = Checkpoints(spec.store, spec.identity, config.keep_checkpoints, report=reporter.note_event)
    restored = checkpoints.load_newest(device)
    state = CheckpointState(restored.state if restored else {}, worker.rank)
    progress = restored.progress if restored else Progress()

    # These two refer to each other: networks ask steps for this worker's share of the images, and steps save networks.
    models = PreparedModels(config, worker, state, lambda: steps.share())
    steps = Steps(
        config, spec.plan, models, state, checkpoints, reporter, worker, progress, resumes=restored is not None
    )
    margins = SampleMargins.of(config, spec.plan.num_samples, len(spec.classes), worker)
    state.add_margins(margins)
    augment = Augment(config, crops=spec.transforms is None)
    label_sets = None if spec.label_sets is None else torch.from_numpy(spec.label_sets).to(device)
    return Run(
        config=config,
        classes=spec.classes,
        plan=spec.plan,
        reporter=reporter,
        worker=worker,
        weights=weights,
        label_sets=label_sets,
        augment=augment,
        batches=DeviceBatches(config, source, augment, device, len(spec.classes), label_sets, reporter),
        loss=Loss(config, len(spec.classes), spec.class_weights, device, margins.add),
        models=models,
        state=state,
        steps=steps,
        margins=margins,
        gallery=Gallery(config, spec.classes, spec.store, reporter.note_event),
        files=RunFiles(spec.store, worker.rank, reporter.note_event),
        evaluation=evaluate_prepared,
        has_test="test" in spec.held_out_plans,
    )


def train_run(spec: RunSpec, run: Run) -> Outcome:
    """Train ``run`` to its end, or until somebody asks it to stop. Only worker 0's outcome has the checkpoint.

    Raises OutOfMemory if the run should be started again with more ``--accumulate``, LoopFailed or UsageError if the
    loop raised an exception of its own, and that exception itself if another attempt may help.
    """
    # The loop's files may be missing on this machine: errors quote its lines, and the processes that it starts get it.
    remember_source_lines(spec.sources)
    send_own_code()
    with training(spec, run):
        with errors_of_loop(spec, run):
            if spec.config.accumulate == "auto" and spec.loop is None:  # another loop may train another network
                memory.check_step_fits(run)
            train = spec.loop or loop.train
            variables_before = states_of_variables(train)
            returned = train(run)
            if returned is not None and run.rank == 0:
                run.reporter.note_event(Note(_RETURNED.format(type(returned).__name__)))
            # A script that has given its loop as a function may read its variables later, but copies have changed.
            is_of_script = spec.loop is not None and spec.config.loop is None
            note = note_on_changes(variables_before, states_of_variables(train)) if is_of_script else None
            if note is not None and run.rank == 0:
                run.reporter.note_event(Note(note))
        return run.finish()


@contextmanager
def training(spec: RunSpec, run: Run) -> Iterator[None]:
    """Watch ``run`` in this context, in which its loop trains and the run is finished; clean up if that fails.

    After the first step, notes are reported on options without effect, on the loss, and on the evaluation.
    """

    def notes_after_first_step() -> Iterator[str]:
        """Yield the notes. Every worker makes these checks, so that all of them raise the same error."""
        if spec.loop is not None:
            # Write which options the loop does not use into a document of the run, so that `compare` leaves them out.
            unused = [name for names in options_without_effect(run, spec.loop).values() for name in names]
            if run.rank == 0:
                with suppress(StorageError):  # the run goes on without the document
                    write_json(spec.store, UNUSED_OPTIONS, {"options": unused})
            yield from unused_options(run, spec.loop)
            if run.world_size > 1:
                yield from notes_on_number_of_workers(spec.loop)
        yield from run.loss.notes()
        if spec.loop is not None:
            check_built_in_evaluation(run)

    run.steps.notes = notes_after_first_step
    watched = report_long_waits(run.steps, run.reporter, run.worker)
    with watched, run.steps.optimizers.followed(), closing(run.batches):
        try:
            yield
        except BaseException:
            run.leave_batch()
            run.steps.wait_for_checkpoint()  # so that another attempt loses fewer steps
            run.files.close(_SENT_WITHIN_S)
            raise
