"""Run one command line: its outcome as text or JSON, its error as one sentence, its exit code."""

from __future__ import annotations

import errno
import gc
import inspect
import json
import logging
import os
import re
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, NoReturn

from raytrain.errors import RaytrainError, TrainingFailed, UsageError, current_folder, option_name
from raytrain.runs.redact import one_line, printable, redact

if TYPE_CHECKING:
    from raytrain.cli.command import CommandResult

_MORE = """
raytrain COMMAND --help explains one. --json prints a command's result as JSON,
--debug the traceback of an error, and --version the version.
In bash or zsh, this completes commands and options:
source <(raytrain --tyro-print-completion bash)"""
_JOB_SETTINGS = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # Ray sets the variable of this name for the command of a job
_GARBAGE_THRESHOLD = 10_000  # new objects between two collections; with Python's 700, importing torch is 10 % slower


def run() -> NoReturn:
    """Run the command line of this process, and exit without waiting for threads that still import Ray and torch."""
    gc.set_threshold(_GARBAGE_THRESHOLD)
    _open_closed_streams()
    # Help and tables have characters of all alphabets. If standard output is encoded as Latin-1 or ASCII, it gets a
    # question mark for each that it lacks.
    if reconfigure := getattr(sys.stdout, "reconfigure", None):
        reconfigure(errors="replace")
    try:
        try:
            code = main()
        except SystemExit as end:  # after the help of a command
            code = int(end.code or 0)
        sys.stdout.flush()
        sys.stderr.flush()
    except BrokenPipeError:  # nobody reads on, as after `| head`
        code = 128 + signal.SIGPIPE
    except OSError as error:  # standard output failed: main itself reports all other errors
        code = 1
        with suppress(OSError):
            print(f"raytrain: The output cannot be written ({error.strerror or error}).", file=sys.stderr, flush=True)
    os._exit(code)


def _open_closed_streams() -> None:
    """Open the null device as each standard stream that is closed, as by ``>&-``.

    Otherwise the next file or connection would get its number, and what other processes print would go there.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)  # by the processes of workers
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; return the exit code: 0 done, 1 failed, 2 bad usage or input, 130 aborted.

    Prints the result, or the error as one sentence. Raises only SystemExit, after the help of a command, and OSError if
    standard output cannot be written, such as BrokenPipeError if nobody reads it any more.

    Example: ``main(["show", "first", "--json"])``
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    # --model may name a module in the current folder. It comes last: a folder of a stranger may hold a torch.py.
    try:
        sys.path.append(current_folder())
    except UsageError as error:
        return _print_error(error, as_json="--json" in argv)
    # --debug is looked for in the words themselves, because the parser may refuse them.
    debug = "--debug" in argv or os.environ.get("RAYTRAIN_DEBUG", "0") not in ("", "0")
    if debug:
        logging.basicConfig(format="%(asctime)s %(name)s: %(message)s")
        logging.getLogger("raytrain").setLevel(logging.DEBUG)
    first = next((word for word in argv if word not in ("--json", "--debug")), "--help")
    if first == "--version":
        from importlib.metadata import version

        print(version("raytrain"))
        return 0
    if first in ("-h", "--help"):
        _print_overview()
        return 0

    # However a command ends, it gives an exit code. The commands and the parser are imported inside this block, so that
    # Ctrl-C during the import prints no traceback.
    try:
        from raytrain.cli.commands import COMMANDS
        from raytrain.cli.parser import parse

        with ExitStack() as at_end:
            at_end.callback(_end_ray)
            outcome = parse(argv, COMMANDS)()
    except KeyboardInterrupt:
        print("raytrain: aborted.", file=sys.stderr, flush=True)
        if "--json" in argv:
            print(json.dumps({"status": "aborted", "error": "aborted."}), flush=True)
        return 130
    except Exception as error:
        # A broken pipe is no error if it is standard output, as after `| head`: run() exits quietly.
        if isinstance(error, BrokenPipeError):
            from raytrain.monitor.stop_request import has_lost_reader

            if has_lost_reader(sys.stdout):
                raise
        # The reason why training failed arose in a worker, whose traceback has been logged already.
        if debug and not isinstance(error, TrainingFailed):
            print(printable(redact(traceback.format_exc())), file=sys.stderr)
        return _print_error(error, as_json="--json" in argv)
    _print_outcome(outcome, as_json="--json" in argv)
    return outcome.exit_code


def _print_overview() -> None:
    """Print all commands, grouped by what people want to do."""
    from rich.table import Table
    from rich.text import Text

    from raytrain.cli.commands import GROUPS
    from raytrain.display.console import PlainConsole

    console = PlainConsole()
    console.print("Train image classifiers on all your GPUs with your own loop, straight from S3.", highlight=False)
    for title, commands in GROUPS.items():
        table = Table.grid(padding=(0, 2))
        table.add_column(width=16)
        for command in commands:
            first_clause = re.split(r"[.:;]\s", inspect.getdoc(command) or "")[0]
            table.add_row(f"  {option_name(command.__name__)}", first_clause)
        console.print(Text(f"\n{title}", style="bold"), table, sep="\n")
    console.print(_MORE, highlight=False)


def _end_ray() -> None:
    """End the Ray that this process has started, if any; a command that has none does not import Ray for it."""
    if "raytrain.launch.ray.connection" in sys.modules:
        from raytrain.launch.ray.connection import end_own_ray  # imported to its end, also if another thread began it

        end_own_ray()


def _print_outcome(outcome: CommandResult, as_json: bool) -> None:
    """Print the result of a command: its document as JSON, or its text. A result without text is shown as a table."""
    if as_json:
        from raytrain.runs.documents import plain

        print(json.dumps(plain(outcome.document), default=str), flush=True)
        return
    from raytrain.display.console import PlainConsole, key_value_table

    text = key_value_table(outcome.document) if outcome.text is None else outcome.text
    if text == "":  # the command has shown everything already
        return
    console = PlainConsole()
    # Commands and paths to copy are not cut: a terminal wraps them, and in a file or a pipe they stay in one line.
    console.print(text, highlight=False, crop=False, soft_wrap=not console.is_terminal)


def _print_error(error: Exception, as_json: bool) -> int:
    """Print one sentence to standard error and, if asked for, JSON to standard output; return the exit code.

    The traceback of an error that raytrain did not raise on purpose is written into a temporary file, which the
    sentence names.
    """
    # Four errors of Python get a sentence that says what to do.
    if isinstance(error, MemoryError):
        reason = str(error).partition(" for an array")[0] or "it is full"  # without numpy's shape and type
        error = UsageError(
            f"This machine has too little memory ({reason}); give smaller images, a smaller "
            "--batch-size or fewer --workers."
        )
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        error = UsageError(
            f"Nothing more can be written ({error.strerror}): the disk of "
            f"{error.filename2 or error.filename or 'the output'}, or that of "
            f"the temporary folder {os.environ.get('TMPDIR', '/tmp')}, is full; make room."
        )
    if isinstance(error, ImportError) and not (error.name or "").startswith("raytrain"):
        library = (error.name or "A library").partition(".")[0]
        error = UsageError(f"{library} cannot be imported ({error}); install it again, into {sys.prefix}.")
    if isinstance(error, FileNotFoundError):
        # Perhaps all relative paths have lost their meaning, because the current folder has been removed.
        try:
            current_folder()
        except UsageError as folder_is_gone:
            error = folder_is_gone

    if isinstance(error, RaytrainError):
        sentence = redact(str(error))
        # In a job, the sentence says where it was written: the reader's own machine has other keys and files.
        if _JOB_SETTINGS in os.environ and error.exit_code == 2:
            sentence = f"On the cluster's head, {socket.gethostname()}, where this job runs: {sentence}"
    else:
        # This exception is our own mistake, and the run may have taken hours: the traceback is kept in a file.
        trace, log_place = redact("".join(traceback.format_exception(error))), ""
        with suppress(OSError):  # there may be no temporary folder that can be written
            number, log = tempfile.mkstemp(prefix="raytrain-", suffix=".log")
            with open(number, "w", encoding="utf-8") as file:
                file.write(trace)
            log_place = f"the traceback is in {log}; "
        message = (str(error).strip().splitlines() or ["no message"])[-1]
        sentence = redact(f"unexpected {type(error).__name__}: {message} ({log_place}--debug shows the traceback here)")
    print(f"raytrain: {one_line(sentence)}", file=sys.stderr, flush=True)
    if as_json:
        from raytrain.runs.documents import plain

        document = {**getattr(error, "summary", {}), "status": "failed", "error": sentence}
        print(json.dumps(plain(document), default=str), flush=True)
    return getattr(error, "exit_code", 1)
