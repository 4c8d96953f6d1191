"""Learning-rate schedules."""

from __future__ import annotations

from typing import Any

import pytest

from raytrain.config import TrainConfig
from raytrain.training.optimisation import learning_rate_factor

STEPS_PER_EPOCH = 10


def rates(num_steps: int = 100, **options: Any) -> list[float]:
    config = TrainConfig(batch_size=1, learning_rate=0.8, **options)
    return [0.8 * learning_rate_factor(config, step, STEPS_PER_EPOCH, num_steps) for step in range(num_steps)]


def test_the_constant_schedule_keeps_the_rate() -> None:
    assert rates() == [0.8] * 100


def test_piecewise_drops_at_the_first_step_of_every_period() -> None:
    found = rates(schedule="piecewise:0.5/3ep")
    assert found == [0.8] * 30 + [0.4] * 30 + [0.2] * 30 + [0.1] * 10


def test_cosine_falls_from_the_full_rate_to_zero() -> None:
    found = rates(schedule="cosine")
    assert found[0] == 0.8
    assert found[25] == pytest.approx(0.8 * 0.8535533905932737)
    assert found[50] == pytest.approx(0.4)
    assert 0 < found[99] < 0.001
    assert found == sorted(found, reverse=True)


def test_warm_up_rises_linearly_to_the_full_rate() -> None:
    found = rates(warmup_epochs=0.4)
    assert found[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8])
    assert found[5:] == [0.8] * 95


def test_cosine_starts_at_the_end_of_the_warm_up() -> None:
    found = rates(schedule="cosine", warmup_epochs=2)
    assert found[19] == pytest.approx(0.8)
    assert found[20] == pytest.approx(0.8)
    assert found[60] == pytest.approx(0.4)
    assert max(found) == pytest.approx(0.8)


def test_linear_falls_from_the_end_of_the_warm_up_to_zero() -> None:
    found = rates(schedule="linear", warmup_epochs=2)
    assert found[9] == pytest.approx(0.4) and max(found) == found[19] == found[20] == 0.8
    assert found[60] == pytest.approx(0.4)
    assert found[99] == pytest.approx(0.8 / 80)


def test_piecewise_counts_epochs_from_the_start_of_the_run() -> None:
    assert rates(schedule="piecewise:0.1/3ep", warmup_epochs=1)[30] == pytest.approx(0.08)


def test_warm_up_and_schedule_begin_again_after_the_epochs_of_the_head() -> None:
    found = rates(head_epochs=2, warmup_epochs=0.5, schedule="cosine")
    warmup = [0.16, 0.32, 0.48, 0.64, 0.8]
    assert found[:20] == pytest.approx(warmup + [0.8] * 15)
    assert found[20:] == pytest.approx(rates(num_steps=80, warmup_epochs=0.5, schedule="cosine"))


def test_a_run_shorter_than_its_warm_up_only_warms_up() -> None:
    assert rates(num_steps=5, schedule="cosine", warmup_epochs=1) == pytest.approx([0.08, 0.16, 0.24, 0.32, 0.4])
