"""The command that shows runs in the browser."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated

from tyro.conf import FlagCreatePairsOff, Positional, arg

from raytrain.cli.command_result import CommandResult
from raytrain.cli.commands.arguments import Storage
from raytrain.errors import UsageError

if TYPE_CHECKING:
    from raytrain.backends.stop_signals import StopSignals
    from raytrain.config import TrainConfig
    from raytrain.display.page.server import PageServer
    from raytrain.runs.snapshot import View


def watch(
    runs: Annotated[Positional[tuple[str, ...]], arg(help="Names of runs, of a sweep or of a study.")],
    storage: Storage = "./runs",
    port: Annotated[int | None, arg(help="Port on this machine; by default 8266, or any that is free.")] = None,
    terminal: Annotated[FlagCreatePairsOff[bool], arg(help="Show one run in this terminal, until it is over.")] = False,
) -> CommandResult:
    """Show runs in the browser, live or when they are over, until Ctrl-C. The page can stop them.

    Example: raytrain watch first
    """
    if terminal:
        return _watch_in_terminal(storage, runs)
    from raytrain.display.page.run_names import names_of
    from raytrain.display.page.server import PageServer
    from raytrain.display.page.watched_runs import StoredRuns

    names = [name for run in runs for name in names_of(storage, run)]
    with StoredRuns(storage, names) as watched, PageServer(watched, port) as server:
        _print_address(server)
        with suppress(KeyboardInterrupt):
            threading.Event().wait()
    return CommandResult("", {"storage": storage, "runs": names})


def _watch_in_terminal(storage: str, runs: tuple[str, ...]) -> CommandResult:
    from raytrain.display.terminal import TerminalView
    from raytrain.runs.documents import open_run
    from raytrain.runs.run_reader import RunReader, follow_run

    if len(runs) != 1:
        raise UsageError("--terminal shows one run; without it, the page shows several.")
    reader = RunReader(open_run(storage, runs[0]).fail_fast(), runs[0])
    with TerminalView(hint="Ctrl-C ends the view, not the run") as view, suppress(KeyboardInterrupt):
        follow_run(reader, view.update)
    return CommandResult("", {"storage": storage, "runs": runs})


@contextmanager
def page_of(config: TrainConfig, signals: StopSignals, *, wanted: bool) -> Generator[list[View]]:
    """Serve the page of a run that this process trains, if it is ``wanted``. Gives the view that feeds it.

    Its Stop button asks ``signals``.
    """
    if not wanted:
        yield []
        return
    from raytrain.display.page.server import PageServer
    from raytrain.display.page.watched_runs import WatchedRuns

    watched = WatchedRuns(config.storage, [config.name] if config.name else [], signals.request_stop)
    with PageServer(watched) as server:
        _print_address(server)
        yield [watched.update]


def _print_address(server: PageServer) -> None:
    """Say where the page is. The address is the key to it."""
    print(f"Watch it at {server.url}", flush=True)
