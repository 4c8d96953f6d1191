"""What watching costs: a run with three viewers of its page and two trackers, beside the same run with none.

The workers' speed differs by several percent from run to run. What the driver, its page and its viewers take from the
workers is told more precisely by their CPU time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import psutil

import raytrain
from raytrain.display.page.server import TOKEN_HEADER, PageServer
from raytrain.display.page.watched_runs import WatchedRuns
from tests.benchmarks.report import Check, Figure, Report
from tests.benchmarks.runner import Bench, Side

_BATCH, _LOG_EVERY = 128, 10
_NUM_CORES = 2  # of the machine; one worker on each
_WARM_UP_S = 60.0
"""From the first step on. Trackers open in this time: imports and MLflow's new database take 10 s of a core, once."""
_NUM_VIEWERS, _TRACKERS = 3, ("tensorboard", "mlflow")
_VIEWER = """
import sys, urllib.request
for line in urllib.request.urlopen(urllib.request.Request(sys.argv[1], headers={sys.argv[2]: sys.argv[3]})):
    pass
"""


def measure(bench: Bench) -> Report:
    arguments = {"images": str(bench.images), "timed_s": bench.scaled(60, least=10)}
    sides = {
        "nobody watches": Side(train_alone, arguments),
        "three viewers and two trackers": Side(train_watched, arguments),
    }
    text = "{0[rate]:,.1f} images/s, {0[cores]:.4f} cores beside the workers".format
    results = bench.alternate(sides, bench.scaled(6), text)
    rates = [Figure(name, "images/s", [each["rate"] for each in values]) for name, values in results.items()]
    cores = [
        Figure(f"{name}: driver, page and viewers", "cores", [each["cores"] for each in values])
        for name, values in results.items()
    ]
    return Report(
        f"watch: cifar10's network, --backend local, 2 workers, a row every {_LOG_EVERY} steps",
        rates + cores,
        [
            Check("watched : alone", rates[1].median / rates[0].median, at_least=0.99),
            Check("cores left by watching : all", 1 - (cores[1].median - cores[0].median) / _NUM_CORES, at_least=0.99),
        ],
    )


def train_alone(images: str, timed_s: int, folder: str) -> dict[str, float]:
    return _train(images, timed_s, folder, None, ())


def train_watched(images: str, timed_s: int, folder: str) -> dict[str, float]:
    os.chdir(folder)  # where MLflow keeps files of its own
    os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{folder}/mlflow.db"
    runs = WatchedRuns(folder, ["run"])
    with PageServer(runs, port=0) as server, ExitStack() as viewers:
        for _ in range(_NUM_VIEWERS):
            viewers.enter_context(_viewer(server))
        return _train(images, timed_s, folder, runs, _TRACKERS)


def _train(
    images: str, timed_s: int, folder: str, runs: WatchedRuns | None, trackers: tuple[str, ...]
) -> dict[str, float]:
    """After the warm-up: the images per second of all workers, and the cores that other processes use."""
    config = raytrain.recipes.cifar10(
        name="run",
        data=images,
        test_fraction=0.001,
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
    loop = partial(_timed_loop, folder=folder)
    with _cpu_times() as cpu_times:
        raytrain.train(config, loop=loop, view=runs.update if runs else None, trackers=trackers)
    times = json.loads(Path(folder, "times").read_text())
    timed = [end for end in times if end > times[0] + _WARM_UP_S]
    clock, cpu = np.array(cpu_times).T
    used = np.interp([timed[0], timed[-1]], clock, cpu)
    seconds = timed[-1] - timed[0]
    return {"rate": _BATCH * (len(timed) - 1) / seconds, "cores": float(used[1] - used[0]) / seconds}


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
