"""Test-time flips: in a run's evaluations, in evaluate and predict, and in exported programs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import raytrain
from raytrain import Run
from raytrain.inference.classification_metrics import EvaluationResult
from raytrain.training.evaluation import evaluate, flip_test
from tests.helpers.folder_runs import evaluation_losses
from tests.helpers.mirror_pairs import add_run, mirror_pairs, scores_of_pairs
from tests.helpers.own_loops import fit, prepared
from tests.helpers.stored_runs import ANIMALS

pytestmark = pytest.mark.not_quick

SEVERAL: dict[str, Any] = {"labels": "labels.csv", "label_separator": "|"}


@pytest.mark.parametrize("kind", [{}, SEVERAL])
def test_an_image_and_its_mirror_image_have_the_same_predictions(kind: dict[str, Any], tmp_path: Path) -> None:
    images, plain = mirror_pairs(tmp_path / "images"), add_run(tmp_path / "plain", **kind)
    ours, mirrored = scores_of_pairs(images, **plain)
    assert np.abs(ours - mirrored).max() > 1e-3
    ours, mirrored = scores_of_pairs(images, **plain, test_views=("flip",))
    np.testing.assert_allclose(ours, mirrored, atol=1e-6)
    by_option, _ = scores_of_pairs(images, **add_run(tmp_path / "option", **kind, test_views=("flip",)))
    np.testing.assert_array_equal(ours, by_option)


def test_evaluate_measures_the_mean_of_the_logits(tmp_path: Path) -> None:
    images, run = mirror_pairs(tmp_path / "images"), add_run(tmp_path / "plain")
    result = raytrain.evaluate(data=str(images), **run, test_views=("flip",))
    model = raytrain.load(**run)
    files = sorted(images.rglob("*.png"))
    decoded = torch.from_numpy(np.stack([np.asarray(Image.open(file)) for file in files]))[..., None]
    with torch.no_grad():
        logits = (model(decoded) + model(decoded.flip(2))) / 2
    labels = torch.tensor([ANIMALS.index(file.parent.name) for file in files])
    assert isinstance(result, EvaluationResult)
    assert result.loss == pytest.approx(torch.nn.functional.cross_entropy(logits, labels).item(), rel=1e-5)
    model.test_views = {"flip"}
    torch.testing.assert_close(model(decoded), logits)


def test_an_exported_program_does_it_too(tmp_path: Path) -> None:
    run = add_run(tmp_path / "runs", test_views=("flip",))
    raytrain.export(output=str(tmp_path / "model.pt2"), **run)
    program = torch.export.load(tmp_path / "model.pt2").module()
    images = torch.randint(0, 256, (3, 20, 12, 1), dtype=torch.uint8)
    torch.testing.assert_close(program(images), program(images.flip(2)))


def by_hand(run: Run) -> None:
    model, optimizer = prepared(run)

    def loss_of(model: Any, batch: Any) -> torch.Tensor:
        return run.loss(model(batch.images), batch.targets)

    fit(run, model, optimizer, loss_of, evaluate=lambda: evaluate(run, partial(flip_test, model)))


def test_evaluations_of_a_run_use_it_by_option_and_by_hand(images: Path, tmp_path: Path) -> None:
    losses = partial(evaluation_losses, images, tmp_path)
    by_option = losses("option", test_views=("flip",))
    assert by_option == pytest.approx(losses("hand", loop=by_hand)) and by_option != pytest.approx(losses("plain"))
