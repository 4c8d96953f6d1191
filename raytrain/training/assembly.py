"""Puts a worker's part of a run together from its spec, trains it, and makes sentences of the loop's errors."""

from __future__ import annotations

import re
import traceback
from bdb import BdbQuit
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress

import torch
from torch import Tensor

from raytrain.config.pickled_code import send_own_code
from raytrain.config.user_code import describe, lacks_memory, restart_may_help, users_line
from raytrain.data.images.malloc import keep_freed_memory
from raytrain.errors import LoopFailed, RaytrainError, StorageError, UsageError
from raytrain.monitor.events import Note
from raytrain.runs.documents import UNUSED_OPTIONS, write_json
from raytrain.runs.outcome import Outcome, Progress
from raytrain.training import auto_accumulate as memory
from raytrain.training import loop
from raytrain.training.batches.augment_and_normalise import Augment
from raytrain.training.batches.batch import BATCH_HAS, Batch, Epoch
from raytrain.training.batches.device_batches import DeviceBatches
from raytrain.training.checkpoint import Checkpoints
from raytrain.training.checkpoint_state import CheckpointState
from raytrain.training.evaluation import check_built_in_evaluation, evaluate_prepared
from raytrain.training.loop_checks.left_behind import note_on_changes, states_of_variables
from raytrain.training.loop_checks.loop_source import remember_source_lines
from raytrain.training.loop_checks.unused_options import options_without_effect, unused_options
from raytrain.training.metrics.gallery import Gallery
from raytrain.training.metrics.sample_margins import MARGINS, SampleMargins
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

    Every worker calls this, after its process group is made.

    Args:
        source: where this worker gets its images.
        reporter: where it reports metrics and events.
        weights: the initial weights that :func:`load_initial_weights` has returned.
    """
    config, worker = spec.config, Worker.here(device)

    # Set up this process so that the device is fast, and report what will not take effect as asked.
    if device.type == "cpu":
        keep_freed_memory()
    else:
        set_gpu_products(config.precision)
        torch.backends.cudnn.benchmark = True  # worth its trials, because nearly all batches have the same size
    if worker.rank == 0 and (warning := precision_warning(config.precision, device)):
        reporter.note_event(Note(warning))  # before the first step, which may take minutes if the warning holds
    if worker.world_size == 1 and config.gradient_dtype is not None:
        reporter.note_event(
            Note(f"--gradient-dtype {config.gradient_dtype} changes nothing: one worker sends no gradients")
        )
    if worker.rank == 0:
        for note in transfer.notes_on_weights(config, spec.classes, weights):
            reporter.note_event(Note(note))

    # Read the newest checkpoint, from which each object is restored when the loop prepares it.
    checkpoints = Checkpoints(spec.store, spec.identity, config.keep_checkpoints, report=reporter.note_event)
    restored = checkpoints.load_newest(device)
    state = CheckpointState(restored.state if restored else {}, worker.rank)
    progress = restored.progress if restored else Progress()

    # These two refer to each other: networks ask steps for this worker's share of the images, and steps save networks.
    models = PreparedModels(config, worker, state, lambda: steps.share(), lambda note: steps.report_once(note))
    steps = Steps(
        config, spec.plan, models, state, checkpoints, reporter, worker, progress, resumes=restored is not None
    )
    margins = SampleMargins.of(config, spec.plan.num_samples, len(spec.classes), worker)
    state.add_sums(MARGINS, margins)
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
            record_unused_options(spec, run)
            yield from unused_options(run, spec.loop)
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


def record_unused_options(spec: RunSpec, run: Run) -> None:
    """Write which options the loop does not use into a document of the run, so that `compare` leaves them out.

    Worker 0 does, after the first step. If storage fails, the run goes on without the document.
    """
    assert spec.loop is not None
    unused = [name for names in options_without_effect(run, spec.loop).values() for name in names]
    if run.rank == 0:
        with suppress(StorageError):
            write_json(spec.store, UNUSED_OPTIONS, {"options": unused})


@contextmanager
def errors_of_loop(spec: RunSpec, run: Run) -> Iterator[None]:
    """Raise an exception of the loop, which runs in this context, as one of ours, whose sentence says what to do.

    It is an OutOfMemory, a UsageError for mistakes that many loops make, or else a LoopFailed. If another attempt may
    help, the exception itself is raised.
    """
    first_step = run.progress.step
    try:
        yield
    except RaytrainError:
        raise
    except BdbQuit as error:
        raise LoopFailed(
            f"its loop was left in a debugger, or the debugger had no terminal ({_line_of(error)}): breakpoint() opens "
            "one, with --backend local --workers 1 in a terminal",
            restart_may_help=False,
        ) from error
    except (Exception, SystemExit) as error:
        if lacks_memory(error):
            raise memory.out_of_memory(run) from error
        if restart_may_help(error):
            raise
        if (mistake := _common_mistake(error, run.world_size)) is not None:
            raise UsageError(mistake) from error

        # Any other exception. In the first step of the built-in loop, the network does not fit the images.
        step = run.progress.step
        if step:
            problem = f"its loop failed after step {step:,}"
        elif spec.loop is not None:
            problem = "its loop failed in its first step"
        else:
            height, width = spec.config.full_image_size
            problem = f"--model {spec.config.model} cannot be trained on images of {height}x{width} pixels"
        raise LoopFailed(f"{problem}: {describe(error)}", restart_may_help=step > first_step) from error


def _common_mistake(error: BaseException, world_size: int) -> str | None:
    """Return the sentence on a mistake that many loops make, if ``error`` comes from one; else None.

    torch has no exceptions of its own for most of these, so they are known by a part of its message.
    """
    message, line = str(error), _line_of(error)

    # torch compares the workers' collectives after one of them has aborted, and its error has their shapes.
    if "Detected mismatch between collectives" in message:
        shapes = " and ".join(re.findall(r"TensorShape=(\[[\d, ]*\])", message)) or "none"
        return (
            f"A collective of torch.distributed got other tensors on some workers than on others (shapes {shapes}; "
            f"{line}); a worker may have an image less than another: use run.gather, or tensors of one shape."
        )

    # The loop comes from a script for torchrun, which makes the process group itself.
    if "initialize the default process group twice" in message:
        return (
            f"The loop calls init_process_group ({line}), and the run has a process group already; leave that call out."
        )

    # The loop comes from a script that torchrun always starts, so that there is always a process group.
    if "process group has not been initialized" in message and world_size == 1:
        return (
            f"The loop calls torch.distributed ({line}), and a run of one worker has no process group: use run.gather "
            "or run.total, which need none, or make that call only if run.world_size > 1."
        )

    # Some networks take torch's SyncBatchNorm because there is a process group, and compute while they are built.
    if "SyncBatchNorm expected input tensor to be on" in message:
        return (
            f"A network with SyncBatchNorm, which needs a GPU, computes before run.prepare has it ({line}): give it "
            "BatchNorm layers, whose statistics run.prepare joins over the workers."
        )

    return _wrong_use_of_batches(error, message, line)


def _wrong_use_of_batches(error: BaseException, message: str, line: str) -> str | None:
    """Return the sentence on a loop that takes the run, an epoch or a batch for what a loader has; else None.

    The ``message`` of a TypeError names the class of the object.
    """
    how_to_loop = "write `for epoch in run.epochs():`, and in it `for batch in epoch:`."
    epoch_has = (
        "an epoch has epoch.number, counted from 0, and len(epoch), the number of its batches, which `for batch in "
        "epoch:` gives."
    )
    if isinstance(error, AttributeError) and isinstance(error.obj, Batch):
        return f"The loop takes batch.{error.name} ({line}); a batch has {BATCH_HAS}."
    if isinstance(error, AttributeError) and isinstance(error.obj, Epoch):
        # The loop uses run.epochs() like a loader, whose items are batches, or an epoch like one, which has a data set.
        if error.name in (*Batch.__dataclass_fields__, *vars(Batch)):
            return f"The loop takes an epoch for a batch ({line}); {how_to_loop}"
        return f"The loop takes epoch.{error.name} ({line}); {epoch_has}"
    if isinstance(error, TypeError) and re.search(r"'Epoch'|\bEpoch\.__|not Epoch\b", message):
        return f"The loop takes an epoch for a number or a list ({line}); {epoch_has}"
    goes_over_method = "'method' object is not iterable" in message and "run.epochs" in line
    if isinstance(error, TypeError) and ("'Run' object is not iterable" in message or goes_over_method):
        return f"The loop goes over the run, or its method, in place of its epochs ({line}); {how_to_loop}"
    return None


def _line_of(error: BaseException) -> str:
    """Return the user's line in which ``error`` was raised, as sentences name it."""
    return users_line(traceback.extract_tb(error.__traceback__))
