"""Dropout with random numbers of each sample's own: as often and as strong as PyTorch's, the same in any batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchvision.ops import StochasticDepth

from raytrain.training.exact import dropout

LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "elements": (nn.Dropout(0.3), (600, 8, 4, 4)),
    "channels": (nn.Dropout2d(0.3), (600, 8, 4, 4)),
    "sequence": (nn.Dropout1d(0.3), (600, 8, 5)),
    "rows": (StochasticDepth(0.3, "row"), (600, 8, 4, 4)),
}
SAMPLES = torch.arange(600) * 1_000_003


def dropped(
    layer: nn.Module, shape: tuple[int, ...], samples: Tensor = SAMPLES, seed: int = 0, step: int = 0
) -> Tensor:
    model = dropout.convert(nn.Sequential(layer)).train()
    dropout.begin(model.modules(), samples, seed, step)
    return model(torch.ones(shape))


@pytest.mark.not_quick
@pytest.mark.parametrize("kind", LAYERS)
def test_what_is_dropped_together_and_how_often(kind: str) -> None:
    layer, shape = LAYERS[kind]
    result = dropped(layer, shape)
    assert torch.allclose(result.unique(), torch.tensor([0, 1 / 0.7]))
    if kind != "elements":
        together = result.flatten(1 if kind == "rows" else 2)
        assert (together.amin(dim=-1) == together.amax(dim=-1)).all()
    assert (result == 0).float().mean() == pytest.approx(0.3, abs=0.06)


@pytest.mark.not_quick
@pytest.mark.parametrize("kind", LAYERS)
def test_a_sample_is_treated_alike_in_any_batch(kind: str) -> None:
    layer, shape = LAYERS[kind]
    whole = dropped(layer, shape)
    pieces = [dropped(layer, (len(part), *shape[1:]), part) for part in SAMPLES.split([1, 250, 349])]
    assert (torch.cat(pieces) == whole).all()
    for other in ({"seed": 1}, {"step": 1}, {"samples": SAMPLES + 1}):
        assert (dropped(layer, shape, **other) != whole).any()  # pyright: ignore[reportArgumentType]


@pytest.mark.not_quick
def test_layers_draw_different_numbers() -> None:
    layers = nn.ModuleList([nn.Dropout(0.5), nn.Dropout(0.5)])
    dropout.begin(dropout.convert(layers).modules(), SAMPLES, 0, 0)
    first, second = (layer(torch.ones(600, 64)) for layer in layers)
    assert ((first == 0) & (second == 0)).float().mean() == pytest.approx(0.25, abs=0.02)


def test_each_call_for_the_same_samples_draws_other_numbers_which_are_those_of_any_batch() -> None:
    layer = dropout.convert(nn.Dropout(0.5)).train()
    dropout.begin([layer], SAMPLES, 0, 0)
    first, second, third = (layer(torch.ones(600, 64)) for _ in range(3))
    for one, other in ((first, second), (first, third), (second, third)):
        assert ((one == 0) & (other == 0)).float().mean() == pytest.approx(0.25, abs=0.02)
    dropout.begin([layer], SAMPLES[100:], 0, 0)
    assert (layer(torch.ones(500, 64)) == first[100:]).all() and (layer(torch.ones(500, 64)) == second[100:]).all()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_repeats_the_numbers_of_any_call(use_reentrant: bool) -> None:
    layer = dropout.convert(nn.Dropout(0.5)).train()
    dropout.begin([layer], SAMPLES, 0, 0)
    once, again = (torch.ones(600, 8, requires_grad=True) for _ in range(2))
    results = [
        layer(layer(once)) ** 2,
        *(checkpoint(lambda x: layer(x) ** 2, again, use_reentrant=use_reentrant) for _ in range(2)),
    ]
    torch.stack(results).sum().backward()
    assert once.grad is not None and again.grad is not None
    assert (once.grad == 2 * results[0]).all() and (again.grad == 2 * (results[1] + results[2])).all()


def test_a_copy_draws_from_torchs_generator_and_not_for_the_samples_of_the_network() -> None:
    model = dropout.convert(nn.Sequential(nn.Dropout(0.3))).train()
    dropout.begin(model.modules(), SAMPLES, seed=0, step=0)
    twin, rows = copy.deepcopy(model), torch.ones(600, 8)
    torch.manual_seed(1)
    first = twin(rows)
    torch.manual_seed(2)
    of_network = model(rows)
    assert not torch.equal(first, of_network)
    assert not torch.equal(first, copy.deepcopy(model)(rows))
    dropout.begin(twin.modules(), SAMPLES, seed=0, step=0)
    assert torch.equal(twin(rows), of_network)


def test_windows_of_an_image_belong_to_its_sample() -> None:
    model = dropout.convert(nn.Dropout(0.5)).train()
    dropout.begin(model.modules(), SAMPLES[:6], 0, 0)
    whole = model(torch.ones(6 * 4, 10)).view(6, 4, 10)
    dropout.begin(model.modules(), SAMPLES[4:6], 0, 0)
    assert (model(torch.ones(2 * 4, 10)).view(2, 4, 10) == whole[4:]).all()


@pytest.mark.parametrize("layer", [nn.Dropout(0.3), nn.Dropout(0.0), nn.Dropout(1.0)], ids=str)
def test_rates_and_modes_are_those_of_pytorch(layer: Any) -> None:
    model = dropout.convert(layer)
    dropout.begin(model.modules(), SAMPLES, 0, 0)
    ones = torch.ones(600, 5, requires_grad=True)
    assert (model.eval()(ones) == 1).all()
    kept = model.train()(ones)
    kept.sum().backward()
    assert ones.grad is not None and (ones.grad == kept).all()
    assert (kept > 0).float().mean() == pytest.approx(1 - layer.p, abs=0.05)


def test_the_names_of_the_weights_stay() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    names = list(model.state_dict())
    assert list(dropout.convert(model).state_dict()) == names
