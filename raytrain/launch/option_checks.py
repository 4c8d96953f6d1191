"""Refuse options that no run, attached run or job can start with, and report those that have no effect.

These checks come before anything starts, and look at the options alone: nothing is read from storage, and torch is not
imported.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from raytrain.config import TrainConfig
from raytrain.config.named_functions import check_module, check_not_importing, names_own_function
from raytrain.config.network import Decoder, timm_name
from raytrain.config.option_marks import Mark
from raytrain.config.options import options_with, own_functions
from raytrain.config.pickled_code import check_loop
from raytrain.errors import UsageError, current_folder, flag, shell_command
from raytrain.loader.machine import gpu_decoder_problem
from raytrain.recipes import RECIPES
from raytrain.runs.documents import check_name
from raytrain.training.loop_checks.loop_mistakes import check_loop_function, check_named_function
from raytrain.training.metrics.evaluation_metrics import measured_metrics
from raytrain.training.model_names import check_model_name, check_optimizer_name
from raytrain.training.weights_source import check_weights_source

if TYPE_CHECKING:
    from raytrain.training.run import Run


def check_options(config: TrainConfig, loop: Callable[[Run], None] | None = None) -> None:
    """Raise UsageError for options that no run can start with, whatever the images are.

    ``loop`` is the caller's own training loop, in place of one that ``config.loop`` names.

    Example: ``check_options(TrainConfig(data="images", model="resnet"))`` raises it, with similar names.
    """
    check_not_importing()
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


def check_options_of_attach(config: TrainConfig, *, in_ray: bool) -> None:
    """Raise UsageError for options that no attached run can start with. Read nothing from storage.

    ``in_ray``: this process is a worker of Ray Train or a trial of Tune, and Ray has given it a folder of its own.
    """
    check_named(config)
    # The launcher has decided on the processes. A kind of device, such as cuda, can be obeyed, but not single GPUs or a
    # type of GPU; and --accumulate auto would start the run again with more microbatches.
    defaults = {field.name: field.default for field in fields(TrainConfig)}
    refused = [name for name in options_with(Mark.OF_LAUNCHER) if getattr(config, name) != defaults[name]]
    refused += ["device"] * (config.device != config.device_type) + ["accumulate"] * (config.accumulate == "auto")
    if refused:
        value = getattr(config, refused[0])
        raise UsageError(
            f"{refused[0]} is {value!r}, which raytrain.attach cannot obey: it trains with the code of its block, in "
            "the processes that your launcher has started, and starts none; omit it, or call raytrain.train."
        )
    if in_ray and "://" not in config.storage and not os.path.isabs(os.path.expanduser(config.storage)):
        raise UsageError(
            f"storage is {config.storage!r}, and Ray has given this process a folder of its own ({os.getcwd()}), where "
            "nobody would find the run: give an absolute path or a URL."
        )
    check_named_code(config)
    check_warmup(config)


def check_options_of_job(config: TrainConfig, *, is_sweep: bool) -> None:
    """Raise UsageError for options with which no command can train on a cluster, without asking the cluster.

    The text of the user's functions is checked, too. What only the cluster may have is not: its packages, and files at
    absolute paths. With ``is_sweep``, or with a loop of the user's, learning rate, metrics and model are not checked,
    because the points of the sweep, or the loop, decide on them.

    Example: ``check_options_of_job(TrainConfig(data="s3://bucket/train", loop="my_loop.py:train"), is_sweep=False)``
    """
    # Options that work on this machine, but not in a job.
    if config.address is not None:
        raise UsageError("--address is the job server's; give it before the --, and none after it.")
    if config.notify is not None and not config.notify.startswith("$"):
        raise UsageError(
            "--notify would stand in the command line of the job, which others can read; set a variable on the "
            "machines of the cluster, and give --notify '$NAME' with its name."
        )
    check_named(config)
    check_places(config)

    # The user's functions, by the text of their files: what these import may be on the cluster alone.
    if config.loop is not None:
        check_module("--loop", config.loop)
    for option, name in own_functions(config):
        check_module(flag(option), name)
        check_named_function(flag(option), name, is_loop=option == "loop", runs_here=False)
    if config.loop is not None or is_sweep:
        return

    # What the built-in loop needs.
    config.check_learning_rate()
    config.check_metrics(measured_metrics(config, runs_here=False))
    if timm_name(config.model) is None:
        check_model_name(config.model)


def check_places(config: TrainConfig) -> None:
    """Raise UsageError if the options name a relative path, which the machines of the cluster do not share."""
    for option in options_with(Mark.SHARED_PLACE):
        place: str | None = getattr(config, option)
        if place in (None, "", "DEFAULT"):  # DEFAULT is no path, but the weights of the network's library
            continue
        if "://" in place or Path(place).is_absolute():
            continue
        raise UsageError(
            f"{flag(option)} is {place}, which the job would look for in a temporary folder of its own; give a URL "
            "(s3://bucket/prefix), or an absolute path that all machines of the cluster share."
        )


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


def hardly_meant(config: TrainConfig) -> list[str]:
    """Return a sentence for each option that is allowed, and that hardly anybody means.

    Most are intervals that are longer than the run, so that they have no effect.

    Example: ``hardly_meant(TrainConfig(batch_size=8, epochs=2, checkpoint_every=("5ep",)))``
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

    # Layers that are frozen, or wait for the head, should have learned something. Own code may load weights itself.
    held = [option for option in ("freeze", "head_epochs") if getattr(config, option)]
    if held and config.weights is None and not names_own_function(config.model):
        sentences.append(
            f"{' and '.join(map(flag, held))} without --weights: the layers that are held keep random weights; give "
            "some, or train all layers."
        )
    if config.sampling == "balanced" and config.class_weights == "balanced":
        sentences.append(
            "--sampling balanced and --class-weights balanced: each makes up for rare classes, which both together "
            "make the most important; leave one of them out."
        )
    return sentences
