"""--compile: the whole network is compiled, once, and computes what it computes otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from raytrain.training.prepared_models import apply_options
from tests.helpers.memory_runs import Recorder, config, images, make_run, trained


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def losses(folder: Path, **chosen: Any) -> list[float | None]:
    recorder = Recorder()
    options = config(model="tests.gpu.same:network", max_steps=3, evaluate_every=0, **chosen)
    run = make_run(options, images(48), str(folder), recorder)
    trained(run)
    return [row.loss for row in recorder.rows if row.kind == "step"]


@pytest.mark.slow
def test_a_network_with_dropout_trains_as_it_does_otherwise(tmp_path: Path) -> None:
    wanted = losses(tmp_path / "plain", compile=False)
    assert losses(tmp_path / "compiled", compile=True) == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("batch_norm", ["sync", "aggregate"])
def test_it_compiles_once_to_train_and_once_to_evaluate(
    batch_norm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    losses(tmp_path, compile=True, batch_norm=batch_norm)
    assert counters["stats"]["unique_graphs"] == 2


def test_a_sequence_of_layers_is_compiled_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    network = nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.ReLU(), nn.Linear(4, 2))
    apply_options(network, config(compile=True))
    network(torch.zeros(3, 3, 2, 2))
    assert (counters["stats"]["unique_graphs"], counters["stats"]["calls_captured"]) == (1, 4)
