"""Refuse options that no run can start with, and report those that have no effect, before anything starts.

These checks look at the options alone: nothing is read from storage, and torch is not imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from raytrain.config import TrainConfig
from raytrain.config.network import Decoder
from raytrain.errors import UsageError, current_folder, shell_command
from raytrain.loader.machine import gpu_decoder_problem
from raytrain.recipes import RECIPES
from raytrain.runs.documents import check_name

if TYPE_CHECKING:
    from raytrain.training.run import Run


def check_options(config: TrainConfig, loop: Callable[[Run], None] | None = None) -> None:
    """Raise UsageError for options that no run can start with, whatever the images are.

    ``loop`` is the caller's own training loop, in place of one that ``config.loop`` names.

    Example: ``check_options(TrainConfig(data="images", model="resnet"))`` raises it, with similar names.
    """
    from raytrain.config.named_functions import check_module
    from raytrain.config.pickled_code import check_loop
    from raytrain.training.loop_checks.loop_mistakes import check_loop_function, check_named_function
    from raytrain.training.metrics.evaluation_metrics import measured_metrics
    from raytrain.training.model_names import check_model_name, check_optimizer_name

    check_named(config)
    if config.decoder == "gpu" and config.device_type == "cpu":
        choose_decoder(config, gpu_decoder_problem("cpu"))  # raises UsageError
    check_cuda_graphs(config, config.device_type)
    check_warmup(config)
    # These options are for the built-in loop: a user's loop may have its own network, optimizer and evaluation.
    if loop is None and config.loop is None:
        config.check_learning_rate()
        check_model_name(config.model)
        check_optimizer_name(config.optimizer)
        config.check_metrics(measured_metrics(config))
    elif loop is not None:
        check_loop(loop)
        check_loop_function(loop)
    elif config.loop is not None:
        check_module("--loop", config.loop)
        check_named_function("--loop", config.loop, is_loop=True)
    check_named_code(config)


def check_named(config: TrainConfig) -> None:
    """Raise UsageError if ``data`` is missing, or if no run may have the name.

    A run that resumes must have a name. UsageError is also raised if the current folder was removed.
    """
    current_folder()  # raises UsageError if there is none: processes are about to start there
    if config.resume and not config.name:  # with a name, --data would be that of the run
        raise UsageError(f"--resume needs --name; `{shell_command('runs', storage=config.storage)}` lists the runs.")
    if not config.data:
        raise UsageError(
            "--data is missing; give s3://…, gs://…, az://… or a folder with one folder of images per class."
        )
    if config.name:
        check_name(config.name)


def check_named_code(config: TrainConfig) -> None:
    """Raise UsageError if a network, transforms or weights that the options name do not exist.

    It neither runs the user's code nor asks over the network. What only these can find out is checked later.
    """
    from raytrain.config.named_functions import check_module, names_own_function
    from raytrain.training.loop_checks.loop_mistakes import check_named_function
    from raytrain.training.weights_source import check_weights_source

    model = config.model if names_own_function(config.model) else None
    for option, name in (("--model", model), ("--transforms", config.transforms)):
        if name is not None:
            check_module(option, name)
            check_named_function(option, name)
    if config.weights is not None and not config.resume:  # a run that resumes has them in its checkpoints
        check_weights_source(config.weights)


def check_cuda_graphs(config: TrainConfig, device: str) -> None:
    """Raise UsageError if ``--compile`` asks for CUDA graphs on a CPU; ``device`` may be auto."""
    if config.compile_mode == "reduce-overhead" and device == "cpu":
        raise UsageError(
            "--compile is reduce-overhead, which records CUDA graphs, and this run trains on CPUs; give --compile "
            "default, or train on a GPU."
        )


def choose_decoder(config: TrainConfig, problem: str | None) -> Decoder:
    """Return the decoder of a run's training images; ``problem`` says why the workers' GPUs cannot decode, or is None.

    Raises UsageError if they cannot, but the options ask for ``--decoder gpu``.
    """
    if config.decoder == "gpu" and problem is not None:
        raise UsageError(
            f"--decoder is gpu, by this command or as the run began, and {problem}; give --decoder cpu, with which "
            "pixels differ by some of 255."
        )
    if config.decoder == "auto":
        return "cpu" if problem else "gpu"
    return config.decoder


def check_warmup(config: TrainConfig) -> None:
    """Raise UsageError if the warm-up is longer than the run, so that no step has the learning rate that was given.

    The default warm-up of a recipe may be longer, so that a recipe can be tried for one epoch; a warning says so later.
    """
    is_given = config.recipe not in RECIPES or config.warmup_epochs != RECIPES[config.recipe]().warmup_epochs
    num_epochs = config.epochs - config.head_epochs  # the schedule begins anew when all layers learn
    if config.warmup_epochs > num_epochs and is_given and not config.resume:
        less_head = f", of which --head-epochs takes {config.head_epochs}" if config.head_epochs else ""
        raise UsageError(
            f"--warmup-epochs is {config.warmup_epochs:g} and --epochs {config.epochs}{less_head}: the learning rate "
            f"would never be the one that is given; a warm-up of this run has at most {num_epochs}."
        )


def useless_lengths(config: TrainConfig) -> list[str]:
    """Return a sentence for each option whose interval is longer than the run, so that it has no effect.

    Example: ``useless_lengths(TrainConfig(batch_size=8, epochs=2, checkpoint_every=("5ep",)))``
    """
    epochs, every = config.epochs, config.evaluate_every  # --evaluate-every 0: only at the end
    sentences: list[str] = []

    # The learning rate: its warm-up, and its falls.
    if config.warmup_epochs > epochs - config.head_epochs:
        sentences.append(
            f"--warmup-epochs is {config.warmup_epochs:g} and --epochs {epochs}: the learning rate only rises, and "
            "does not reach that of --learning-rate."
        )
    schedule = config.learning_rate_schedule
    if schedule.shape == "piecewise" and schedule.period >= epochs - config.head_epochs:
        sentences.append(f"--schedule is {config.schedule} and --epochs {epochs}: the learning rate never falls.")

    # Evaluations and checkpoints.
    num_evaluations = -(-epochs // every) if every else 1  # rounded up, because the last one is at the end
    if config.patience is not None and config.patience >= num_evaluations:
        times = "once" if num_evaluations == 1 else f"{num_evaluations} times"
        sentences.append(
            f"--patience is {config.patience}, and the run is evaluated {times} (--epochs {epochs}, "
            f"--evaluate-every {every}): it cannot end earlier by that."
        )
    if every > epochs:
        sentences.append(f"--evaluate-every is {every} and --epochs {epochs}: the run is evaluated at its end alone.")
    if config.checkpoint_intervals.epochs > epochs:
        sentences.append(
            f"--checkpoint-every is {' '.join(config.checkpoint_every)} and --epochs {epochs}: no epoch but the last "
            "is followed by a checkpoint."
        )
    return sentences
