"""A run whose loop has built its network itself is used as any other: with the loop's code, which has to be trusted."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import raytrain
from raytrain.cli.main import main
from raytrain.inference.classifier import load
from raytrain.inference.loop_network import loop_network
from raytrain.runs.documents import run_store
from raytrain.runs.metrics_history import read_metrics
from raytrain.training.run import Run
from tests.helpers.loops_with_networks import (
    LOOPS,
    own,
    without_pooling,
)
from tests.helpers.memory_runs import config as memory_config
from tests.helpers.small_runs import config as small_config


def trained(images: Path, storage: Path, loop: str, function: Callable[[Run], None] | None = None) -> None:
    named = {} if function else {"loop": LOOPS + loop}
    options = small_config(
        images, storage, name=loop, model="resnet18", backend="local", workers=1, epochs=1, image_size=(32, 32), **named
    )
    raytrain.train(options, loop=function)


@pytest.mark.parametrize("loop", ["own", "averaged", "without_pooling", "swapped"])
def test_it_gives_the_numbers_that_the_run_has_measured(loop: str, images: Path, tmp_path: Path) -> None:
    trained(images, tmp_path, loop)
    measured = [row for row in read_metrics(run_store(str(tmp_path), loop)) if row.kind == "evaluation"][-1]
    with pytest.raises(raytrain.UsageError, match=r"names --loop .*add --trust"):
        load(loop, storage=tmp_path)
    result = raytrain.evaluate(loop, storage=tmp_path, trust=True)
    assert result.loss == pytest.approx(measured.loss, rel=1e-6)  # pyright: ignore


def test_its_model_card_names_the_loop_and_no_network_of_the_options(images: Path, tmp_path: Path) -> None:
    trained(images, tmp_path, "own")
    raytrain.export("own", str(tmp_path / "own.safetensors"), storage=str(tmp_path), trust=True)
    card = (tmp_path / "own.card.md").read_text()
    assert f"| network | built by the run's own loop `{LOOPS}own`, 3 outputs, 3 input channels |" in card
    assert "resnet18" not in card.partition("## Training")[0] and "starts a run" not in card


def test_a_function_that_no_file_names_is_given_again(images: Path, tmp_path: Path) -> None:
    trained(images, tmp_path, "run", own)
    with pytest.raises(raytrain.UsageError, match=r"raytrain.load\('run', loop=the_function\)"):
        load("run", storage=tmp_path, trust=True)
    assert isinstance(load("run", storage=tmp_path, loop=own).network, nn.Sequential)
    with pytest.raises(raytrain.UsageError, match="not those of the network that its loop prepares now"):
        load("run", storage=tmp_path, loop=without_pooling)


def test_a_network_of_the_options_needs_no_trust(images: Path, tmp_path: Path) -> None:
    trained(images, tmp_path, "as_the_options_say")
    assert not load("as_the_options_say", storage=tmp_path).training


def test_a_loop_may_use_all_that_a_run_offers_before_its_network_is_made() -> None:
    text = (Path(__file__).parents[2] / "docs/your-own-loop.md").read_text()
    tables = text.partition("## What a run offers")[2].partition("`run.prepare` wraps nothing")[0]
    names = set(re.findall(r"`run\.(\w+)", tables))
    assert len(names) > 20

    def loop(run: Run) -> None:
        assert not [name for name in names if not hasattr(run, name)]
        criterion = run.loss
        (num_classes,) = run.total([run.num_classes])
        with run.no_sync():
            widths = run.gather(torch.tensor([12]))
        model = run.prepare(nn.Linear(int(widths), int(num_classes)))
        run.evaluate()
        for epoch in run.epochs():
            for batch in epoch:
                criterion(model(batch.images), batch.targets).backward()

    network = loop_network(memory_config(), ("cat", "dog"), loop, None)
    assert isinstance(network, nn.Linear) and network.weight.shape == (2, 12)


PRINTING = """
import torch

print("imported", end="")


def network(num_classes, **options):
    print("built", end="")
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 12 * 12, num_classes))
"""


def test_what_its_file_prints_is_no_part_of_the_results_of_commands(
    images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(PRINTING)
    more = {"backend": "local", "workers": 1, "epochs": 1, "model": f"{tmp_path}/mine.py:network"}
    raytrain.train(small_config(images, tmp_path, **more))
    image = next(images.rglob("*.png"))
    for words, member in (
        (["evaluate", "run", "--data", str(images)], "accuracy"),
        (["predict", "run", str(image)], "rows"),
        (["export", "run", "--output", str(tmp_path / "run.pt2")], "size_bytes"),
    ):
        capsys.readouterr()
        assert main([*words, "--storage", str(tmp_path), "--trust", "--json"]) == 0
        out, err = capsys.readouterr()
        assert member in json.loads(out) and "built" in err

    # The same in a fresh process, for a person.
    command = [sys.executable, "-m", "raytrain", "predict", "run", str(image), "--storage", str(tmp_path), "--trust"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=True)
    assert "imported" not in done.stdout and "importedbuilt" in done.stderr
