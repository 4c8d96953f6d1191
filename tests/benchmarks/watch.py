"""What watching costs: a run with three viewers of its page and two trackers, beside the same run with none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import raytrain
from raytrain.display.page.server import TOKEN_HEADER, PageServer
from raytrain.display.page.watched_runs import WatchedRuns
from tests.benchmarks.report import Check, Figure, Report
from tests.benchmarks.runner import Bench, Side

_BATCH, _LOG_EVERY = 128, 10
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
    results = bench.alternate(sides, bench.scaled(6), lambda rate: f"{rate:,.1f} images/s")
    figures = [Figure(name, "images/s", rates) for name, rates in results.items()]
    alone, watched = figures
    return Report(
        f"watch: cifar10's network, --backend local, 2 workers, a row every {_LOG_EVERY} steps",
        figures,
        [Check("watched : alone", watched.median / alone.median, at_least=0.99)],
    )


def train_alone(images: str, timed_s: int, folder: str) -> float:
    return _train(images, timed_s, folder, None, ())


def train_watched(images: str, timed_s: int, folder: str) -> float:
    os.chdir(folder)  # where MLflow keeps files of its own
    os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{folder}/mlflow.db"
    runs = WatchedRuns(folder, ["run"])
    with PageServer(runs, port=0) as server, ExitStack() as viewers:
        for _ in range(_NUM_VIEWERS):
            viewers.enter_context(_viewer(server))
        return _train(images, timed_s, folder, runs, _TRACKERS)


def _train(images: str, timed_s: int, folder: str, runs: WatchedRuns | None, trackers: tuple[str, ...]) -> float:
    """The images per second of all workers after the warm-up."""
    config = raytrain.recipes.cifar10(
        name="run",
        data=images,
        test_fraction=0.001,
        mean=(0.49, 0.48, 0.45),
        std=(0.25, 0.24, 0.26),
        storage=folder,
        backend="local",
        workers=2,
        batch_size=_BATCH,
        epochs=1000,
        max_time=f"{_WARM_UP_S + timed_s:.0f}s",
        evaluate_every=0,
        checkpoint_every=(),
        log_every=_LOG_EVERY,
    )
    loop = partial(_timed_loop, folder=folder)
    raytrain.train(config, loop=loop, view=runs.update if runs else None, trackers=trackers)
    times = json.loads(Path(folder, "times").read_text())
    timed = [end for end in times if end > times[0] + _WARM_UP_S]
    return _BATCH * (len(timed) - 1) / (timed[-1] - timed[0])


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
