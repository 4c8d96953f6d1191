"""With all kinds of options, N workers compute what one computes, and a repeated run is bitwise the same."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch

from tests.helpers.memory_runs import Case, Seen, alone, assert_same, measured, together
from tests.helpers.option_matrix import COLUMNS, NUM_STEPS, OPTIONS, RUNS, cases

FIVE = pytest.param(5, marks=pytest.mark.slow)  # more workers than most machines that run the tests have cores


def chosen_cases(world_size: int) -> dict[str, Case]:
    """Return all runs, but for three workers every second one: what two do, and five among the slow tests, is all."""
    named = cases(world_size)
    return {name: named[name] for name in [*named][:: 2 if world_size == 3 else 1]}


@functools.cache
def results(world_size: int) -> list[dict[str, dict[str, Any]]]:
    """Return the results of the chosen runs, by rank. They share their processes, which take seconds to start."""
    return together(chosen_cases(world_size), world_size)


def test_every_pair_of_option_values_occurs_in_a_run() -> None:
    covered = {pair for row in RUNS for pair in itertools.combinations(zip(COLUMNS, row, strict=True), 2)}
    for one, other in itertools.combinations(COLUMNS, 2):
        for pair in itertools.product(OPTIONS[one], OPTIONS[other]):
            assert tuple(zip((one, other), pair, strict=True)) in covered


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(3, marks=pytest.mark.slow), FIVE])
def test_workers_compute_what_one_process_computes(world_size: int) -> None:
    for name, case in chosen_cases(world_size).items():
        model, rows = alone(case, world_size)
        for rank, by_name in enumerate(results(world_size)):
            assert_same(
                f"{name}, worker {rank} of {world_size}", by_name[name], case, (model, rows), check_rows=rank == 0
            )
            progress = by_name[name]["outcome"].progress
            tolerance = 1e-4 if case.options.precision == "float32" else 1e-9
            assert (progress.validation_accuracy, progress.validation_loss) == pytest.approx(
                measured(model, case), rel=tolerance
            ), name


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_repeated_run_is_bitwise_the_same(world_size: int) -> None:
    # In other processes, after other runs: every second one, which together have all values of all columns.
    again = together(dict([*reversed(cases(world_size).items())][::2]), world_size)
    for first, second in zip(results(world_size), again, strict=True):
        for name in second:
            torch.testing.assert_close(
                second[name]["state"], first[name]["state"], rtol=0, atol=0, msg=f"{{}}\n{name}".format
            )
            assert [row.loss for row in second[name]["rows"]] == [row.loss for row in first[name]["rows"]]


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow), FIVE])
def test_any_number_of_workers_gets_bitwise_the_same_images(world_size: int) -> None:
    for name in chosen_cases(world_size):
        by_rank = [by_name[name]["seen"] for by_name in results(world_size)]
        one = results(1)[0][name]["seen"]
        assert {step for step, _, _ in one} == set(range(NUM_STEPS))
        for whole, *parts in zip(one, *by_rank, strict=True):
            assert_same_images(name, whole, parts)


def assert_same_images(name: str, whole: Seen, parts: list[Seen]) -> None:
    step, samples, pixels = whole
    assert {step} == {step for step, _, _ in parts}
    assert torch.cat([samples for _, samples, _ in parts]).tolist() == samples.tolist(), f"{name}, step {step}"
    assert torch.equal(torch.cat([pixels for _, _, pixels in parts]), pixels), f"{name}, step {step}"
