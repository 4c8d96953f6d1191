"""A mistake in a user's loop is told apart from what another start may do without, and has its line."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from ray.exceptions import RayActorError

from raytrain.training.loop_error import describe, may_pass


@pytest.mark.parametrize("error", [RayActorError(), ConnectionResetError(), EOFError(), dist.DistBackendError("NCCL")])
def test_a_loss_of_something_else_may_pass(error: Exception) -> None:
    assert may_pass(error)


@pytest.mark.parametrize("error", [TypeError("x"), RuntimeError("shapes differ"), KeyError("a"), ValueError()])
def test_a_mistake_does_not_pass(error: Exception) -> None:
    assert not may_pass(error)


def test_the_line_and_the_first_line_of_the_message_are_named() -> None:
    with pytest.raises(RuntimeError) as raised:
        raise RuntimeError("shapes differ.\nsee elsewhere")
    assert describe(raised.value).startswith("RuntimeError: shapes differ (test_loop_error.py, line ")
