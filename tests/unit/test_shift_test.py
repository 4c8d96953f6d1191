"""Test-time shifts: in a run's evaluations, in a loaded network, and in exported programs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import raytrain
from raytrain import Run
from raytrain.inference.classification_metrics import EvaluationResult
from raytrain.training.evaluation import evaluate, flip_test, shift_test
from tests.helpers.folder_runs import evaluation_losses
from tests.helpers.mirror_pairs import add_run, mirror_pairs, scores_of_pairs
from tests.helpers.own_loops import fit, prepared

pytestmark = pytest.mark.not_quick


def test_an_image_counts_half_and_each_diagonal_neighbour_a_quarter() -> None:
    images = torch.zeros(1, 1, 5, 7)
    images[0, 0, 2, 3] = 8  # each logit stands for a pixel
    found = shift_test(lambda pixels: pixels.flatten(1), images).view(5, 7)
    expected = torch.zeros(5, 7)
    expected[2, 3], expected[1, 2], expected[3, 4] = 4, 2, 2
    assert torch.equal(found, expected)
    ones = shift_test(lambda pixels: pixels.flatten(1), torch.ones(1, 1, 5, 7)).view(5, 7)
    assert (ones[1:-1, 1:-1] == 1).all() and ones[0, 0] == ones[-1, -1] == 0.75  # what is shifted in is 0


def test_a_run_trained_with_both_is_loaded_and_exported_with_six_views(tmp_path: Path) -> None:
    run = add_run(tmp_path / "runs", test_views=("flip", "shift"))
    model = raytrain.load(**run)
    images = torch.randint(0, 256, (3, 20, 12, 1), dtype=torch.uint8)
    with torch.no_grad():
        found = model(images)
    plain = raytrain.load(**run)
    plain.test_views = set()
    seen: list[Tensor] = []
    plain.network.register_forward_hook(lambda layer, inputs, output: seen.append(inputs[0]))
    with torch.no_grad():
        plain(images)
        views = shift_test(partial(flip_test, plain.network), seen[0])
    torch.testing.assert_close(found, views)
    assert len(seen) == 7 and not torch.allclose(found, plain(images))
    raytrain.export(output=str(tmp_path / "model.pt2"), **run)
    program = torch.export.load(tmp_path / "model.pt2").module()
    torch.testing.assert_close(program(images), found)


def test_evaluate_and_predict_do_it_for_other_runs(tmp_path: Path) -> None:
    images = mirror_pairs(tmp_path / "images")
    plain, option = add_run(tmp_path / "plain"), add_run(tmp_path / "option", test_views=("shift",))
    by_option = raytrain.evaluate(data=str(images), **option)
    asked = raytrain.evaluate(data=str(images), **plain, test_views=("shift",))
    without = raytrain.evaluate(data=str(images), **plain)
    assert (
        isinstance(by_option, EvaluationResult)
        and isinstance(asked, EvaluationResult)
        and isinstance(without, EvaluationResult)
    )
    assert asked.loss == by_option.loss != without.loss
    ours, _ = scores_of_pairs(images, **plain, test_views=("shift",))
    theirs, _ = scores_of_pairs(images, **option)
    assert (ours == theirs).all() and not np.allclose(ours, scores_of_pairs(images, **plain)[0])


def by_hand(run: Run) -> None:
    model, optimizer = prepared(run)

    def loss_of(model: Any, batch: Any) -> torch.Tensor:
        return run.loss(model(batch.images), batch.targets)

    fit(run, model, optimizer, loss_of, evaluate=lambda: evaluate(run, partial(shift_test, partial(flip_test, model))))


def test_evaluations_of_a_run_use_it_by_option_and_by_hand(images: Path, tmp_path: Path) -> None:
    losses = partial(evaluation_losses, images, tmp_path)
    by_option = losses("option", test_views=("flip", "shift"))
    assert by_option == pytest.approx(losses("hand", loop=by_hand))
    assert by_option != pytest.approx(losses("flipped", test_views=("flip",)))
