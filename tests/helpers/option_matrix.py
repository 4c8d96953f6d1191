"""Runs with all kinds of options, loads and images that cannot be read, by name."""

from __future__ import annotations

from typing import Any

from tests.helpers.memory_runs import Case, config

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
    "accumulate": {number: {"accumulate": int(number)} for number in ("1", "2", "3")},
    "norm": {
        "sync": {},
        "aggregate": {"batch_norm": "aggregate"},
        "none": {"model": "tests.helpers.memory_runs:network_without_norm"},
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
