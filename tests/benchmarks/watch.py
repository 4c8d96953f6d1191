"""What watching costs: a run that in turn is watched and is not, by three viewers of its page and two trackers.

The workers' speed differs by several percent from run to run, and within a run over minutes. So both are measured in
one run, in short windows: each watched one is compared with those before and after it. What the driver, its page and
its viewers take from the workers is told more precisely by their CPU time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch
from urllib.parse import urlsplit

import numpy as np
import psutil

import raytrain
from raytrain.display.page.server import TOKEN_HEADER, PageServer
from raytrain.display.page.watched_runs import WatchedRuns
from raytrain.trackers import tracker_threads
from tests.benchmarks.report import Check, Figure, Report
from tests.benchmarks.runner import Bench, Side

_BATCH, _LOG_EVERY = 128, 10
_NUM_CORES = 2  # of the machine; one worker on each
_WARM_UP_S = 90.0
"""From the start on. Trackers open in this time: imports and MLflow's new database take 10 s of a core, once."""
_WINDOW_S, _SETTLE_S = 20.0, 6.0
"""Of each window, the first seconds count for neither side: trackers send what they have gathered before it."""
_NUM_VIEWERS, _TRACKERS = 3, ("tensorboard", "mlflow")
_VIEWER = """
import sys, urllib.request
for line in urllib.request.urlopen(urllib.request.Request(sys.argv[1], headers={sys.argv[2]: sys.argv[3]})):
    pass
"""


def measure(bench: Bench) -> Report:
    arguments = {"images": str(bench.images), "num_watched": bench.scaled(12, least=2)}
    result = bench.alone(Side(train, arguments))
    alone, watched = result["rates"][::2], result["rates"][1::2]
    ratios = [2 * rate / sum(beside) for rate, beside in zip(watched, pairwise(alone), strict=True)]
    cores = [median(result["cores"][::2]), median(result["cores"][1::2])]
    return Report(
        f"watch: cifar10's network, --backend local, 2 workers, a row every {_LOG_EVERY} steps",
        [
            Figure("nobody watches", "images/s", alone),
            Figure("three viewers and two trackers", "images/s", watched),
            Figure("watched : alone, beside each other", "×", ratios),
            Figure("nobody watches: driver, page and viewers", "cores", result["cores"][::2]),
            Figure("watched: driver, page and viewers", "cores", result["cores"][1::2]),
        ],
        [
            Check("watched : alone", median(ratios), at_least=0.99),
            Check("cores left by watching : all", 1 - (cores[1] - cores[0]) / _NUM_CORES, at_least=0.99),
        ],
    )


def train(images: str, num_watched: int, folder: str) -> dict[str, list[float]]:
    """The images per second of all workers, and the cores that other processes use, in each window.

    The first window is not watched, and every other one is.
    """
    os.chdir(folder)  # where MLflow keeps files of its own
    os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{folder}/mlflow.db"
    runs = WatchedRuns(folder, ["run"])
    watching = threading.Event()
    send_rows = tracker_threads.Tracking.update
    with PageServer(runs, port=0) as server, ExitStack() as open_until_end:
        for _ in range(_NUM_VIEWERS):
            open_until_end.enter_context(_viewer(server))
        starts = open_until_end.enter_context(_windows(watching, 2 * num_watched + 1))
        cpu_times = open_until_end.enter_context(_cpu_times())
        # More often than trackers get rows by themselves, so that they are sent in the window that they are of.
        open_until_end.enter_context(patch.object(tracker_threads, "_MAX_GATHER_S", _SETTLE_S - 1))
        open_until_end.enter_context(patch.object(tracker_threads.Tracking, "update", _only_if(watching, send_rows)))
        _train(images, folder, _only_if(watching, runs.update), (2 * num_watched + 1) * _WINDOW_S)
    times = np.array(json.loads(Path(folder, "times").read_text()))
    clock, cpu = np.array(cpu_times).T
    result: dict[str, list[float]] = {"rates": [], "cores": []}
    for start in starts:
        begin, end = start + _SETTLE_S, start + _WINDOW_S
        timed = times[(times >= begin) & (times < end)]
        result["rates"].append(_BATCH * (len(timed) - 1) / (timed[-1] - timed[0]))
        used = np.interp([begin, end], clock, cpu)
        result["cores"].append(float(used[1] - used[0]) / (end - begin))
    return result


def _train(images: str, folder: str, view: Callable[..., None], timed_s: float) -> None:
    config = raytrain.recipes.cifar10(
        name="run",
        data=images,
        validation_fraction=0.001,
        mean=(0.49, 0.48, 0.45),
        std=(0.25, 0.24, 0.26),
        storage=folder,
        backend="local",
        workers=_NUM_CORES,
        batch_size=_BATCH,
        epochs=1000,
        max_time=f"{_WARM_UP_S + timed_s:.0f}s",
        evaluate_every=0,
        checkpoint_every=(),
        log_every=_LOG_EVERY,
    )
    raytrain.train(config, loop=partial(_timed_loop, folder=folder), view=view, trackers=_TRACKERS)


def _only_if(watching: threading.Event, call: Callable[..., None]) -> Callable[..., None]:
    """``call`` while somebody watches, and nothing otherwise."""

    def view(*arguments: Any) -> None:
        if watching.is_set():
            call(*arguments)

    return view


@contextmanager
def _windows(watching: threading.Event, number: int) -> Iterator[list[float]]:
    """Watch in every other window; yield the times at which they start. Until the first, all is watched."""
    starts: list[float] = []
    ended = threading.Event()
    watching.set()

    def alternate() -> None:
        pause_s = _WARM_UP_S
        while len(starts) < number and not ended.wait(pause_s):
            pause_s = _WINDOW_S
            starts.append(time.perf_counter())
            if len(starts) % 2:
                watching.clear()
            else:
                watching.set()

    thread = threading.Thread(target=alternate)
    thread.start()
    try:
        yield starts
    finally:
        ended.set()
        thread.join()


@contextmanager
def _cpu_times() -> Iterator[list[tuple[float, float]]]:
    """Collect once a second the time, and the seconds of a core that this process and its viewers have used."""
    times: list[tuple[float, float]] = []
    ended = threading.Event()
    beside = [psutil.Process(), *psutil.Process().children()]

    def collect() -> None:
        while not ended.wait(1.0):
            used = [process.cpu_times() for process in beside]
            times.append((time.perf_counter(), sum(each.user + each.system for each in used)))

    thread = threading.Thread(target=collect)
    thread.start()
    try:
        yield times
    finally:
        ended.set()
        thread.join()


def _timed_loop(run: raytrain.Run, folder: str) -> None:
    """The built-in loop; the first worker writes down when it finished each step."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from raytrain.training.loop import train

    times: list[float] = []
    register_optimizer_step_post_hook(lambda *_: times.append(time.perf_counter()))
    train(run)
    if run.rank == 0:
        Path(folder, "times").write_text(json.dumps(times))


@contextmanager
def _viewer(server: PageServer) -> Iterator[None]:
    """A process that reads all that the page sends."""
    address = urlsplit(server.url)
    token = address.fragment.removeprefix("token=")
    events = f"http://{address.netloc}/api/events"
    with subprocess.Popen([sys.executable, "-c", _VIEWER, events, TOKEN_HEADER, token]) as viewer:
        yield
        viewer.kill()
