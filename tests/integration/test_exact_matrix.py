"""With all kinds of options, N workers compute what one computes, and a repeated run is bitwise the same."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch

from tests.integration.test_exact import Case, Seen, alone, assert_same, config, measured, together

# A row is a run. Every pair of values of two columns occurs in some row: 17 runs out of a million combinations. The
# table was built greedily, always adding the random row with the most new pairs; of 60 such tables it is the shortest.
ROWS = """
batch images accumulate norm      optimizer loads  precision smoothing augment unreadable schedule  order
1     3      1          aggregate momentum  even   float64   0.1       cropped some       cosine    plain
1     3      2          none      momentum  uneven float64   0         none    none       constant  channels_last
1     36     2          sync      adamw     idle   float32   0.1       cropped none       piecewise plain
1     40     3          sync      sgd       idle   float64   0         moved   some       cosine    channels_last
7     3      2          none      sgd       uneven float64   0         none    none       piecewise plain
7     36     1          none      adamw     uneven float32   0         none    some       cosine    plain
7     40     1          aggregate momentum  idle   float32   0.1       none    some       constant  channels_last
7     40     2          sync      sgd       uneven float64   0         cropped some       piecewise channels_last
7     40     3          none      sgd       even   float32   0.1       moved   none       cosine    plain
32    3      3          aggregate sgd       uneven float32   0.1       none    some       piecewise plain
32    36     1          aggregate sgd       idle   float64   0.1       moved   none       constant  channels_last
32    36     3          none      adamw     even   float64   0         cropped some       cosine    channels_last
32    40     2          sync      momentum  even   float32   0         moved   some       piecewise plain
37    3      1          sync      sgd       uneven float64   0         moved   none       piecewise plain
37    3      3          none      adamw     idle   float64   0.1       cropped none       constant  channels_last
37    36     3          sync      momentum  even   float64   0.1       none    some       constant  plain
37    40     2          aggregate adamw     idle   float32   0         moved   some       cosine    channels_last
"""
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "batch": {size: {"batch_size": int(size)} for size in ("1", "7", "32", "37")},
    "images": {"3": {}, "36": {}, "40": {}},
    "accumulate": {parts: {"accumulate": int(parts)} for parts in ("1", "2", "3")},
    "norm": {
        "sync": {},
        "aggregate": {"batch_norm": "aggregate"},
        "none": {"model": "tests.integration.test_exact:network_without_norm"},
    },
    "optimizer": {
        "sgd": {"momentum": 0.0, "weight_decay": 0.01},
        "momentum": {},
        "adamw": {"optimizer": "adamw", "learning_rate": 0.01, "weight_decay": 0.1},
    },
    "loads": {"even": {}, "idle": {}, "uneven": {}},
    "precision": {name: {"precision": name} for name in ("float64", "float32")},
    "smoothing": {"0": {}, "0.1": {"label_smoothing": 0.1}},
    "augment": {
        "none": {"flip": "none", "translate": 0},
        "moved": {"flip": "random", "translate": 2},
        "cropped": {"flip": "random", "translate": 0, "random_resized_crop": True, "cache_side": 1.0},
    },
    "unreadable": {"none": {}, "some": {}},
    "schedule": {
        "constant": {},
        "piecewise": {"schedule": "piecewise:0.1/1ep"},
        "cosine": {"schedule": "cosine"},
    },
    "order": {"plain": {}, "channels_last": {"channels_last": True}},
}
LOADS: dict[str, dict[int, tuple[float, ...]]] = {
    "even": {},
    "idle": {2: (1, 0), 3: (1, 0, 2), 5: (0, 1, 0, 3, 1)},
    "uneven": {2: (1, 3), 3: (0.5, 3, 1), 5: (1, 2, 0.5, 1, 3)},
}
FIVE = pytest.param(5, marks=pytest.mark.slow)  # more workers than most machines that run the tests have cores
NUM_STEPS = 7
"""Of each run. All runs but those of single images start another epoch, after a shorter last batch."""

COLUMNS, *RUNS = [row.split() for row in ROWS.strip().splitlines()]


def cases(world_size: int) -> dict[str, Case]:
    return {" ".join(row): case(dict(zip(COLUMNS, row, strict=True)), world_size) for row in RUNS}


def case(row: dict[str, str], world_size: int) -> Case:
    chosen: dict[str, Any] = {
        "epochs": NUM_STEPS,
        "max_steps": NUM_STEPS,
        "evaluate_every": 0,
        "checkpoint_every": (),
    }
    for column, value in row.items():
        chosen |= OPTIONS[column][value]
    num_samples = int(row["images"])
    bad = tuple(range(0, num_samples, 4)) if row["unreadable"] == "some" else ()
    return Case(config(**chosen, worker_load=LOADS[row["loads"]].get(world_size)), num_samples, bad)


@functools.cache
def results(world_size: int) -> list[dict[str, dict[str, Any]]]:
    """Return the results of all runs, by rank. They share their processes, which take seconds to start."""
    return together(cases(world_size), world_size)


def test_every_pair_of_option_values_occurs_in_a_run() -> None:
    covered = {pair for row in RUNS for pair in itertools.combinations(zip(COLUMNS, row, strict=True), 2)}
    for one, other in itertools.combinations(COLUMNS, 2):
        for pair in itertools.product(OPTIONS[one], OPTIONS[other]):
            assert tuple(zip((one, other), pair, strict=True)) in covered


@pytest.mark.parametrize("world_size", [1, 2, 3, FIVE])
def test_workers_compute_what_one_process_computes(world_size: int) -> None:
    for name, case in cases(world_size).items():
        model, rows = alone(case, world_size)
        for rank, by_name in enumerate(results(world_size)):
            assert_same(
                f"{name}, worker {rank} of {world_size}", by_name[name], case, (model, rows), check_rows=rank == 0
            )
            progress = by_name[name]["outcome"].progress
            tolerance = 1e-4 if case.options.precision == "float32" else 1e-9
            assert (progress.test_accuracy, progress.test_loss) == pytest.approx(
                measured(model, case), rel=tolerance
            ), name


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_repeated_run_is_bitwise_the_same(world_size: int) -> None:
    again = together(dict(reversed(cases(world_size).items())), world_size)  # In other processes, after other runs.
    for first, second in zip(results(world_size), again, strict=True):
        for name in first:
            torch.testing.assert_close(
                second[name]["state"], first[name]["state"], rtol=0, atol=0, msg=f"{{}}\n{name}".format
            )
            assert [row.loss for row in second[name]["rows"]] == [row.loss for row in first[name]["rows"]]


@pytest.mark.parametrize("world_size", [2, 3, FIVE])
def test_any_number_of_workers_gets_bitwise_the_same_images(world_size: int) -> None:
    for name in cases(world_size):
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
