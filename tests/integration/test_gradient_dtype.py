"""--gradient-dtype bfloat16: half the bytes, sums in float32, the same on all workers and after a resume."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from raytrain.training.exact.bfloat16_sum import Bfloat16Sum
from raytrain.training.exact.gradients import ExactGradients
from raytrain.training.protocols import Worker
from tests.helpers.gloo_processes import run_in_processes
from tests.helpers.memory_runs import Case, config, together

_EPSILON = 2.0**-8  # of bfloat16: two roundings, each by at most half of it


def summed(numbers: list[list[float]]) -> Tensor:
    """Return the sum of all workers' numbers, on this worker."""
    own = torch.tensor(numbers[dist.get_rank()])
    total = Bfloat16Sum(own, (dist.new_group(), dist.new_group()), dist.get_world_size())
    total.wait()
    return own


def test_it_adds_up_in_float32_whatever_the_number_of_workers_and_of_numbers() -> None:
    # In bfloat16, 256 + 1 is 256; and 7 numbers are not divided evenly among 3 workers.
    numbers = [[256.0, 1.0, 0.0, -3.0, 1e38, 2.0**-120, torch.inf], [1.0] * 7, [1.0] * 7]
    for sums in run_in_processes(3, summed, numbers):
        assert sums[:4].tolist() == [258.0, 3.0, 2.0, -1.0]
        assert sums[4:].tolist() == pytest.approx([1e38, 2.0, torch.inf], rel=_EPSILON)


class Counted:
    """Counts the bytes that this worker gives to collectives of torch.distributed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_bytes = 0.0
        for name, place, passes in (
            ("all_reduce", 0, 2),
            ("all_to_all_single", 1, 1),
            ("all_gather_into_tensor", 0, 1),
        ):
            monkeypatch.setattr(dist, name, self._counting(getattr(dist, name), place, passes))

    def _counting(self, call: Any, place: int, passes: int) -> Any:
        def count(*args: Any, **options: Any) -> Any:
            self.num_bytes += passes * args[place].nbytes
            return call(*args, **options)

        return count


class TwoHeads(nn.Module):
    """Three buckets of parameters, and a head that only some workers use."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 3500), nn.ReLU())
        self.first, self.second, self.unused = nn.Linear(3500, 3), nn.Linear(3500, 3), nn.Linear(2, 2)


def gradients_of_uneven_batches(in_bfloat16: bool) -> tuple[dict[str, Tensor], float]:
    """Return the gradients of 3, 1 and no images on the workers, of which one uses the second head, and bytes sent."""
    rank, sizes = dist.get_rank(), (3, 1, 0)
    torch.manual_seed(0)
    network, images = TwoHeads(), torch.randn(4, 512)
    own = images[sum(sizes[:rank]) :][: sizes[rank]] if sizes[rank] else images[:1] * torch.nan
    gradients = ExactGradients(
        Worker.here(torch.device("cpu")),
        lambda: sizes[rank] / 4,
        lambda: None,
        in_bfloat16=in_bfloat16,
    )
    with pytest.MonkeyPatch.context() as patched:
        counted = Counted(patched)
        for _ in range(2):  # the second time, gradients are added to those that are there
            gradients.follow(list(network.parameters()))
            head = network.second if rank == 1 else network.first
            head(network.body(own)).square().sum(1).mean().backward()
    return {name: each.grad for name, each in network.named_parameters() if each.grad is not None}, counted.num_bytes


def test_gradients_are_those_in_float32_but_for_two_roundings_at_half_the_bytes() -> None:
    exact = run_in_processes(3, gradients_of_uneven_batches, False)
    rounded = run_in_processes(3, gradients_of_uneven_batches, True)
    for (wanted, num_bytes), (gradients, num_halved), (first, _) in zip(exact, rounded, rounded[:1] * 3, strict=True):
        assert gradients.keys() == wanted.keys() and "unused.weight" not in gradients
        for name, gradient in gradients.items():
            assert torch.equal(gradient, first[name])
            assert not torch.equal(gradient, wanted[name])
            torch.testing.assert_close(
                gradient, wanted[name], rtol=2 * _EPSILON, atol=_EPSILON * wanted[name].abs().max()
            )
        assert num_halved / num_bytes == pytest.approx(0.5, rel=1e-4)


def test_a_run_resumes_bit_by_bit_on_as_many_workers_and_learns_as_in_float32(tmp_path: Path) -> None:
    options = config(precision="float32", batch_norm="sync", epochs=2, gradient_dtype="bfloat16")
    undisturbed = Case(options)
    plain = Case(dataclasses.replace(options, gradient_dtype=None))
    stopped = Case(options, stop_after=3, folder=str(tmp_path))
    first = together({"undisturbed": undisturbed, "plain": plain, "stopped": stopped}, 2)[0]
    resumed = together({"resumed": dataclasses.replace(stopped, stop_after=None)}, 2)[0]["resumed"]
    for name, weights in first["undisturbed"]["state"].items():
        assert torch.equal(resumed["state"][name], weights), name
        torch.testing.assert_close(weights, first["plain"]["state"][name], rtol=0.05, atol=0.05)
    assert first["stopped"]["outcome"].status == "stopped"
