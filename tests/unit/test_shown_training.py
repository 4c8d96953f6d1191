"""`raytrain.train` shows a run by itself, unless somebody else does."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import raytrain
from raytrain.monitor.snapshot import Snapshot


@pytest.fixture
def views(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The views of the runs that are started; the runs themselves would take seconds each."""
    views: list[Any] = []
    monkeypatch.setattr("raytrain.display.train.launch_run", lambda config, view, **others: views.append(view))
    return views


def test_a_run_is_shown_in_the_main_thread_unless_there_is_another_view(views: list[Any]) -> None:
    config, shown = raytrain.TrainConfig(data="images", batch_size=8), list[Snapshot]()
    raytrain.train(config)
    raytrain.train(config, view=shown.append)
    thread = threading.Thread(target=raytrain.train, args=[config])
    thread.start()
    thread.join()
    assert callable(views[0])
    assert views[1:] == [shown.append, None]
