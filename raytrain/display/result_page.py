"""How a run ended, and commands for what to do next: to resume it, and to use it."""

from __future__ import annotations

import dataclasses
import math

from rich.console import Group, RenderableType
from rich.text import Text

from raytrain.config import TrainConfig
from raytrain.config.named_functions import names_own_function
from raytrain.display.console import format_duration, format_optional, key_value_table, metric_label
from raytrain.display.event_text import shown_summary
from raytrain.errors import flag, format_count, format_dollars, shell_command
from raytrain.experiments.best_metric import best_metric_of
from raytrain.runs.documents import CHECKPOINTS
from raytrain.runs.outcome import StopReason, TrainResult, resume_command
from raytrain.runs.redact import one_line


def result_page(config: TrainConfig, result: TrainResult, best: tuple[float, str] | None = None) -> RenderableType:
    """Return how a run ended, and commands for what to do next: to resume it if it is not finished, and to use it.

    ``best`` is the score and the path of its best checkpoint, None if it has none. A score is the value of the metric
    of --best, negated if smaller values are better.
    """
    # Progress, time, the last checkpoint and the last evaluation.
    counts = {"step": result.steps, "epoch": round(result.epochs, 2), "image": result.samples_seen}
    steps = ", ".join(format_count(count, noun) for noun, count in counts.items())
    startup = f", of which {format_duration(result.startup_seconds)} to start" if result.startup_seconds else ""
    has_earlier = is_resumed(result.seconds, result.total_seconds)
    earlier = f"; with earlier attempts {format_duration(result.total_seconds or 0.0)}" if has_earlier else ""
    newest = "no checkpoint" if result.checkpoint is None else f"{CHECKPOINTS}{result.checkpoint.rpartition('/')[2]}"
    measured = {"validation accuracy": result.validation_accuracy, "validation loss": result.validation_loss}
    last_values = ", ".join(
        f"{name} {format_optional(value, '.4f')}" for name, value in measured.items() if value is not None
    )
    facts: dict[str, object] = {
        "name": result.name,
        "status": f"{result.status} after {steps} on {format_count(result.num_workers, 'worker')}",
        "time": format_duration(result.seconds) + startup + earlier,
        "last": newest + (f"; measured last: {last_values}" if last_values else ""),
    }

    # Costs, the test images, and the best checkpoint.
    if result.dollars is not None:
        facts["cost"] = format_dollars(result.dollars)
    if result.gpu_kwh is not None:
        facts["energy"] = f"{result.gpu_kwh:.3f} kWh of the GPUs"
    if result.test_accuracy is not None:
        loss = "" if result.test_loss is None else f", loss {format_optional(result.test_loss, '.4f')}"
        facts["test"] = f"accuracy {result.test_accuracy:.4f}{loss}, of the best checkpoint"
    if best is not None:
        score, path = best
        value = -score if best_metric_of(config).is_lower_better else score
        metric = f"; {metric_label(config.best_metric)} {format_optional(value, '.4f')}" if math.isfinite(value) else ""
        facts["best"] = f"{path}, which the commands below use{metric}"

    # Unusual things, each only if there is any, and the folder of the run.
    summary = shown_summary(result.summary())
    further = ("num_skipped", "num_retries", "num_decoded_on_cpu", "stop_reason", "error", "run_dir")
    facts |= {name: summary[name] for name in further if summary[name]}
    lines: list[RenderableType] = [key_value_table(facts)]

    # Commands for what to do next. They trust the user's own code, which the user has just run.
    if result.status != "finished":
        command = resume_command(dataclasses.replace(config, name=result.name))
        lines += [Text(f"\n{resume_heading('Resume', result.stop_reason)}"), command_line(command)]
    if best is not None and result.status != "failed":
        trust = any(map(names_own_function, (config.model, config.loop)))
        lines.append(try_next(result.name, config.storage, trust=trust))
    return Group(*lines)


def resume_heading(verb: str, reason: StopReason | None) -> str:
    """Return the line above the command that resumes a run or a sweep; if a limit has stopped it, name its option.

    ``verb`` begins the line, and ``reason`` is why the run or the sweep has stopped.

    Example: ``resume_heading("Resume", None) == "Resume with"``
    """
    if reason and reason.kind == "cost":
        return f"{verb} with a higher --max-cost added to"
    if reason and reason.option:
        return f"{verb} with another {flag(reason.option)}, or none, added to"
    return f"{verb} with"


def try_next(name: str, storage: str, data: str | None = None, *, trust: bool = False) -> RenderableType:
    """Return commands that use a run. ``data`` are images to test it on, by default the run's own.

    With ``trust``, the commands allow code that the run names: the reader is the author of the run.
    """
    trusted = ["--trust"] if trust else []
    commands = (
        (None, ["show", name]),
        (None, ["evaluate", name, *(["--data", data] if data else []), *trusted]),
        (None, ["predict", name, "--data", data or "IMAGES", "--output", "predictions.csv", *trusted]),
        ("onnx", ["export", name, "--output", f"{name}.onnx", *trusted]),
        ("serve", ["serve", name, *trusted]),
    )
    lines = (command_line(shell_command(*words, storage=storage, extra=extra)) for extra, words in commands)
    return Group(Text("\nTry next"), *lines)


def command_line(command: str) -> Text:
    """Return a command, indented, in one line however long it is, so that it can be copied from a terminal."""
    return Text(f"  {one_line(command)}", style="bold", no_wrap=True, overflow="ignore")


def is_resumed(seconds: object, total_seconds: object) -> bool:
    """Return True if a run took ``total_seconds`` over several attempts, of which the last one took ``seconds``."""
    return isinstance(seconds, float) and isinstance(total_seconds, float) and total_seconds > seconds + 1
