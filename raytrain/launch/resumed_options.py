"""The options that a resumed run keeps from its last attempt, and whether it has anything left to train."""

from __future__ import annotations

import dataclasses

from raytrain.config import TrainConfig
from raytrain.config.option_marks import Mark
from raytrain.config.options import options_with
from raytrain.errors import UsageError, flag, format_count, format_dollars
from raytrain.recipes import RECIPES
from raytrain.runs.documents import CONFIG, SUMMARY, read_config, read_json, run_store
from raytrain.runs.outcome import TrainResult, result_of, stop_reason_of
from raytrain.runs.status import RunStatus, read_status
from raytrain.runs.stored_checkpoints import newest_checkpoint


def resumed_options(config: TrainConfig, before: TrainConfig) -> TrainConfig:
    """Return the options of a run that resumes: those that ``config`` leaves undecided are as in ``before``.

    ``config`` is what the user asks for now, ``before`` are the options of the last attempt. On another number of
    workers, a run thus keeps its global batch size and its learning rate. Raises UsageError if an option differs that
    decides on the layout of the state in checkpoints, or on the images that are held out.
    """
    # Options that --recipe auto leaves open have been decided by the images when the run started.
    if config.open_options:
        plain = RECIPES[config.recipe]()
        decided = [name for name in config.open_options if getattr(config, name) == getattr(plain, name)]
        config = dataclasses.replace(config, open_options=(), **{name: getattr(before, name) for name in decided})

    # Options that decide on the layout of the state in checkpoints cannot change.
    for option in options_with(Mark.SHAPES_STATE):
        asked, stored = getattr(config, option), getattr(before, option)
        if asked != stored:
            raise UsageError(
                f"{flag(option)} is {asked}, and the run was started with {stored}; resume with that, or start another "
                "run from its --weights."
            )
    # Neither can those that decide on the images held out: images that were trained on would be evaluated.
    split = ("validation_fraction", "validation_fold", "group_by")
    for option in split:
        asked, stored = getattr(config, option), getattr(before, option)
        if asked not in (None, stored):
            raise UsageError(
                f"{flag(option)} is {asked}, and the run was started with {stored or 'none'}, which decided on the "
                "images held out for validation; omit it, or start another run."
            )

    # Options that were not given are as they were. First those that are decided at the start of a run.
    undecided = [option for option in options_with(Mark.DECIDED_AT_START) if getattr(config, option) in (None, "auto")]
    # Then the split of the images, unless these or their labels come from elsewhere now. Whether they are the run's
    # images is checked later.
    places = ("validation_data", "validation_labels", "label_pattern")
    has_places = all(getattr(config, option) == getattr(before, option) for option in places)
    if has_places and (config.labels is None) == (before.labels is None):
        undecided += [option for option in split if getattr(config, option) is None]
    # Then those that describe the run: without the price, its cost so far would be lost, and `raytrain tag` may have
    # changed the note and the tags since the script that resumes the run was written. New tags are added to the others.
    undecided += [option for option in options_with(Mark.DESCRIBES_RUN) if getattr(config, option) in (None, ())]
    kept = {option: getattr(before, option) for option in undecided}
    return dataclasses.replace(config, **kept | {"tag": tuple(dict.fromkeys([*before.tag, *config.tag]))})


def already_trained(config: TrainConfig) -> tuple[TrainResult, str] | None:
    """Return the earlier result of a resumed run that has nothing to do, with a sentence that says so; else None.

    A run has nothing to do if it has its epochs already, or would stop again at once. Raises UsageError if there is
    more to do, but the dollars of ``--max-cost`` are spent. ``config`` is what
    :func:`~raytrain.launch.prepare.settle_options` returns.
    """
    store = run_store(config.storage, config.name or "")
    if not config.resume or not store.exists(CONFIG):
        return None
    before, status, summary = read_config(store), read_status(store), read_json(store, SUMMARY)

    is_stopped, is_finished = status.status == "stopped", status.status == "finished"
    result = result_of(summary) if is_stopped or is_finished else None
    why_over, advice = "", ""
    if result is not None:
        # Whoever gives another batch size or number of steps wants a run of another length. Otherwise it is over if it
        # finished with as many epochs, or was stopped on the way to more, and has those asked for now.
        has_same_length = (config.batch_size, config.max_steps) == (before.batch_size, before.max_steps)
        steps_per_epoch = -(-status.num_steps // before.epochs)  # rounded up
        has_enough = not before.max_steps and config.epochs * steps_per_epoch <= status.step
        if has_same_length and (config.epochs <= before.epochs if is_finished else has_enough):
            why_over = f"has {format_count(result.epochs, 'epoch')} already, and --epochs is {config.epochs}"
        if config.max_steps is not None and config.max_steps <= status.step:
            why_over = f"has {format_count(result.steps, 'step')} already, and --max-steps is {config.max_steps}"

        # So it is if an option has stopped it that has the same value now: that would stop it at its next evaluation.
        stop_reason = stop_reason_of(summary)
        option = stop_reason.option if stop_reason and is_stopped else None
        if option and has_same_length and getattr(config, option) == getattr(before, option):
            num_epochs = format_count(result.epochs, "epoch")
            why_over = f"was stopped by {flag(option)} {getattr(config, option)} after {num_epochs}"
            advice = f"; give another {flag(option)}, or none, to train on"

    if result is None or not why_over or newest_checkpoint(store) is None:
        check_budget(config, status, f"Run {config.name!r}")
        return None
    return result, f"Run {config.name!r} {why_over}: there is nothing to do, and nothing was changed{advice}."


def check_budget(config: TrainConfig, before: RunStatus, subject: str) -> None:
    """Raise UsageError if ``subject``, a run or a sweep with the status ``before``, has spent ``--max-cost`` already.

    Nothing is raised without that option.

    Example: ``check_budget(config, read_status(store), "Run 'first'")``
    """
    if config.max_cost is not None and (before.dollars or 0.0) >= config.max_cost:
        raise UsageError(
            f"{subject} has cost {format_dollars(before.dollars or 0.0)} already, and --max-cost is "
            f"{config.max_cost:g}; give a higher limit to go on."
        )
