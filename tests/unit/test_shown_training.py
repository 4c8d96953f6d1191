"""`raytrain.train`, `find_rate` and `sweep` show what they train by themselves, unless somebody else does."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest

import raytrain
from raytrain.display import find_rate as display_rate
from raytrain.display import sweep as display_sweep
from raytrain.display import train as display_train
from raytrain.experiments.sweep_result import SweepResult
from raytrain.launch import train as launch_train
from tests.helpers.snapshots import snapshot


@pytest.fixture
def views(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The views of the runs and sweeps that are started."""
    views: list[Any] = []
    # Each run or sweep would take seconds, and only its view matters here.
    for module, function in ((display_train, "launch_run"), (display_rate, "run_find_rate")):
        monkeypatch.setattr(module, function, lambda config, view, **others: views.append(view))

    def sweep(*asked: Any, view: Any, **others: Any) -> SweepResult:
        views.append(view)
        return SweepResult(name="rates", status="finished", best=None, trials=(), run_dir="", seconds=1.0)

    monkeypatch.setattr(display_sweep, "run_sweep", sweep)
    return views


@pytest.mark.parametrize("train", [raytrain.train, raytrain.find_rate, partial(raytrain.sweep, vary="seed=0,1")])
def test_it_is_shown_in_the_main_thread_unless_there_is_another_view(train: Any, views: list[Any]) -> None:
    config, shown = raytrain.TrainConfig(data="images", batch_size=8), list[Any]()
    train(config)
    train(config, view=shown.append)
    thread = threading.Thread(target=train, args=[config])
    thread.start()
    thread.join()
    assert callable(views[0])
    assert views[1:] == [shown.append, None]


def test_the_handle_of_a_run_says_how_far_the_run_is(monkeypatch: pytest.MonkeyPatch) -> None:
    shown, over = threading.Event(), threading.Event()

    def launch(config: raytrain.TrainConfig, view: Any, **others: Any) -> None:
        view(snapshot(step=30, status="running"))
        shown.set()
        over.wait()
        raise raytrain.TrainingFailed("Run 'first' failed: its worker was killed.")

    monkeypatch.setattr(launch_train, "train", launch)  # a run would take seconds
    handle = raytrain.start(raytrain.recipes.custom(data="images", name="first"))
    shown.wait()
    assert repr(handle) == "RunHandle('first', running, step 30/1000)"
    over.set()
    with pytest.raises(raytrain.TrainingFailed):
        handle.result()
    assert repr(handle) == "RunHandle(Run 'first' failed: its worker was killed.)"
