"""Learning rates and losses that a loop computes with the number of workers, as scripts for torch's DDP do."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.optim import SGD

from raytrain.training.loop_checks.number_of_workers import notes_on_number_of_workers
from tests.helpers.plain_loops import Loop, mlp


def a_rate_by_name(run: Any) -> None:
    run.prepare(SGD(mlp().parameters(), lr=0.1 * run.world_size))


def a_rate_by_place(run: Any) -> None:
    num_workers = dist.get_world_size()
    scaled = 0.1 * math.sqrt(num_workers)
    run.prepare(torch.optim.SGD(mlp().parameters(), scaled))


def a_rate_of_settings(run: Any) -> None:
    settings = run.settings
    settings.lr = settings.lr * run.world_size


def rates_of_groups(run: Any) -> None:
    for group in run.optimizer.param_groups:
        group["lr"] *= run.world_size


def a_loss(run: Any) -> None:
    for images, labels in run.epoch:
        loss = F.cross_entropy(run.model(images), labels) / run.world_size
        loss.backward()


def descend(loss: Any, world_size: int) -> None:
    (loss / world_size).backward()


def a_loss_in_a_function(run: Any) -> None:
    descend(F.cross_entropy(run.model(run.images), run.labels), run.world_size)


def harmless(run: Any) -> None:
    if run.world_size > 1:
        print(run.rank, run.world_size)
    for images, labels in run.epoch:
        loss = F.cross_entropy(run.model(images), labels)
        loss.backward()
        loss = loss.detach() / run.world_size
        run.log(loss=loss, speed=len(images) * run.world_size)


RATES = (a_rate_by_name, a_rate_by_place, a_rate_of_settings, rates_of_groups)


@pytest.mark.parametrize("loop", [*RATES, a_loss, a_loss_in_a_function])
def test_it_is_reported_with_its_line(loop: Loop) -> None:
    kind = "a learning rate" if loop in RATES else "a loss"
    [note] = notes_on_number_of_workers(loop)
    assert note.startswith(f"{kind} is computed with the number of workers (test_number_of_workers.py, line ")


def test_what_is_only_logged_is_not_reported() -> None:
    assert [*notes_on_number_of_workers(harmless)] == []
