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

    # It finished with as many epochs; or it was stopped on the way to more epochs, and has those asked for now; or an
    # option has stopped it that still has the same value, and would stop it again at its first evaluation. Whoever
    # gives another batch size or number of steps wants a run of another length.
    is_stopped, stop_reason = status.status == "stopped", stop_reason_of(summary)
    steps_per_epoch = -(-status.num_steps // before.epochs)  # rounded up
    has_finished = status.status == "finished" and config.epochs <= before.epochs
    has_enough = is_stopped and not before.max_steps and config.epochs * steps_per_epoch <= status.step
    ended_by = stop_reason.option if stop_reason and is_stopped else None
    would_stop_again = ended_by is not None and getattr(config, ended_by) == getattr(before, ended_by)
    has_same_length = (config.batch_size, config.max_steps) == (before.batch_size, before.max_steps)
    is_over, max_steps = is_stopped or status.status == "finished", config.max_steps
    has_all_steps = is_over and max_steps is not None and max_steps <= status.step
    has_ended = has_all_steps or (has_same_length and (has_finished or has_enough or would_stop_again))
    result = result_of(summary) if has_ended and newest_checkpoint(store) is not None else None
    if result is None:
        check_budget(config, status, f"Run {config.name!r}")
        return None

    # The sentence.
    because = f"has {format_count(result.epochs, 'epoch')} already, and --epochs is {config.epochs}"
    if config.max_steps is not None and result.steps >= config.max_steps:
        because = f"has {format_count(result.steps, 'step')} already, and --max-steps is {config.max_steps}"
    advice = ""
    if ended_by is not None and would_stop_again:
        because = (
            f"was stopped by {flag(ended_by)} {getattr(config, ended_by)} after {format_count(result.epochs, 'epoch')}"
        )
        advice = f"; give another {flag(ended_by)}, or none, to train on"
    return result, f"Run {config.name!r} {because}: there is nothing to do, and nothing was changed{advice}."


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
