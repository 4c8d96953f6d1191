"""Run one command line: its outcome as text or JSON, its error as one sentence, its exit code."""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from typing import NoReturn

from raytrain.backends.torchrun_environment import is_first_process, is_under_torchrun
from raytrain.cli.command_result import CommandResult
from raytrain.cli.commands import COMMANDS
from raytrain.cli.parser import parse
from raytrain.cli.process_start import process_started_at, set_process_started_at
from raytrain.errors import RaytrainError, TrainingFailed
from raytrain.runs.json_lines import plain
from raytrain.runs.printable import one_line, printable

_USE_TORCH = ("train", "study", "sweep", "evaluate", "predict", "export")
"""Commands that import torch, and mostly Ray, in the process that the user starts, and do not wait for its input."""


def run() -> NoReturn:
    """Run the command line of this process, and exit without waiting for threads that still import Ray and torch."""
    try:
        code = _run_forked(sys.argv[1:])
    except KeyboardInterrupt:  # before there was a process that it could be passed on to
        code = _aborted()
    if code is None:
        code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run_forked(argv: list[str]) -> int | None:
    """The exit code of a command that a process which has imported Ray and torch carries out; None if none does.

    Whoever names a cluster with --address gets a process of its own, too.
    """
    names_cluster = any(word.partition("=")[0] == "--address" for word in argv)
    if not argv or argv[0] not in _USE_TORCH or names_cluster or is_under_torchrun():
        return None
    from raytrain.backends.ray.command_client import carry_out

    return carry_out(f"{__name__}:run_for", {"argv": argv, "started_at": process_started_at()})


def run_for(argv: Sequence[str], started_at: float) -> int:
    """The exit code of a command line, in a process that was forked for one that was ``started_at``."""
    set_process_started_at(started_at)
    sys.argv = ["raytrain", *argv]
    try:
        return main(argv)
    except SystemExit as ended:  # after --help
        return int(ended.code or 0)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code: 0 done, 1 failed, 2 bad usage or input, 130 aborted."""
    argv = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    # --model may name a module in the current folder. It comes last: a folder of a stranger may hold a torch.py.
    sys.path.append(os.getcwd())
    # From the words themselves: an error may be that the parser rejects them.
    debug = "--debug" in argv or os.environ.get("RAYTRAIN_DEBUG", "0") not in ("", "0")
    if debug:
        logging.basicConfig(format="%(asctime)s %(name)s: %(message)s")
        logging.getLogger("raytrain").setLevel(logging.DEBUG)
    try:
        outcome = parse(argv, COMMANDS)()
    except KeyboardInterrupt:
        return _aborted()
    except Exception as error:
        if debug:
            print(printable(traceback.format_exc()), file=sys.stderr)
        return _print_error(error, as_json="--json" in argv)
    if is_first_process():
        _print_outcome(outcome, as_json="--json" in argv)
    return outcome.exit_code


def _aborted() -> int:
    print("raytrain: aborted.", file=sys.stderr)
    return 130


def _print_outcome(outcome: CommandResult, as_json: bool) -> None:
    if as_json:
        print(json.dumps(plain(outcome.document), default=str), flush=True)
        return
    from raytrain.display.console import PlainConsole

    PlainConsole().print(outcome.text, highlight=False)


def _print_error(error: Exception, as_json: bool) -> int:
    """Print one sentence to standard error and, if asked for, JSON to standard output; returns the exit code.

    The processes of torchrun fail together with the same TrainingFailed. Any other error may be of one process alone.
    """
    sentence = str(error) if isinstance(error, RaytrainError) else _unexpected(error)
    if is_first_process() or not isinstance(error, TrainingFailed):
        print(f"raytrain: {one_line(sentence)}", file=sys.stderr, flush=True)
    if as_json and is_first_process():
        print(json.dumps({**getattr(error, "summary", {}), "status": "failed", "error": sentence}), flush=True)
    return getattr(error, "exit_code", 1)


def _unexpected(error: Exception) -> str:
    """One sentence for an unforeseen error; the traceback goes to a file, because the run may have taken hours."""
    with tempfile.NamedTemporaryFile("w", prefix="raytrain-", suffix=".log", delete=False) as log:
        traceback.print_exception(error, file=log)
    message = (str(error).strip().splitlines() or ["no message"])[-1]
    return f"unexpected {type(error).__name__}: {message} (the traceback is in {log.name}; --debug shows it here)"
