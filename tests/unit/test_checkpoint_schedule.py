"""When a checkpoint is due: after steps, epochs or seconds."""

from __future__ import annotations

import time
from typing import Any

import pytest

from raytrain.config import TrainConfig
from raytrain.training.checkpoint import CheckpointSchedule

STEPS_PER_EPOCH = 10


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    return clock


def schedule(**options: Any) -> CheckpointSchedule:
    return CheckpointSchedule(TrainConfig(batch_size=1, learning_rate=0.1, **options), STEPS_PER_EPOCH, None)


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, [10, 20, 30]),
        ({"checkpoint_every": ("2ep",)}, [20]),
        ({"checkpoint_every": ()}, []),
        ({"checkpoint_every": ("8st",)}, [8, 16, 24]),
        ({"checkpoint_every": ("1ep", "15st")}, [10, 15, 20, 30]),
    ],
)
def test_steps_and_epochs(options: dict[str, Any], steps: list[int]) -> None:
    found = schedule(**options)
    assert [step for step in range(1, 31) if found.due_at(step)] == steps


def test_seconds_count_from_the_start_and_from_the_last_checkpoint(clock: Clock) -> None:
    found = schedule(checkpoint_every=("1ep", "60s"))
    clock.now_s += 59
    assert not found.due_by_time()
    clock.now_s += 1
    assert found.due_by_time()
    found.note_checkpoint(7)
    assert found.saved_step == 7 and not found.due_by_time()
    clock.now_s += 60
    assert found.due_by_time()


def test_zero_seconds_means_never(clock: Clock) -> None:
    found = schedule(checkpoint_every=("1ep",))
    clock.now_s += 1e6
    assert not found.due_by_time()
