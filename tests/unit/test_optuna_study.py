"""The study of a sweep in Optuna: its points, what it keeps over a kill, and what it does not take from storage."""

from __future__ import annotations

import math
import random
import sys
from pathlib import Path
from typing import get_args

import pytest

from raytrain import UsageError
from raytrain.experiments.optuna_study import SweepStudy, check_optuna
from raytrain.experiments.search_space import Point, parse
from raytrain.experiments.sweep_options import Pruner, Sampler
from raytrain.runs.documents import STUDY
from raytrain.storage.folder import FolderStore
from raytrain.storage.store import Store

SPACE = ["learning-rate=log:1e-4..1", "weight-decay=log:1e-6..1e-2", "optimizer=sgd,adamw"]
EPOCHS = 8


def study(store: Store, sampler: Sampler | None, pruner: Pruner | None = None, *, resumes: bool = False) -> SweepStudy:
    return SweepStudy(
        store,
        parse(SPACE),
        sampler=sampler,
        pruner=pruner,
        seed=3,
        is_lower_better=False,
        num_epochs=EPOCHS,
        is_resumed=resumes,
    )


def rate_of(point: Point) -> float:
    rate = point["learning_rate"]
    assert isinstance(rate, float)
    return rate


def value_of(point: Point) -> float:
    """The best rate is 0.02, the best optimizer sgd."""
    return -abs(math.log10(rate_of(point)) + 1.7) - (0.5 if point["optimizer"] == "adamw" else 0.0)


def train(study: SweepStudy, number: int) -> bool:
    """Measure a trial after each epoch until it ends; return whether it was pruned."""
    value = value_of(study.points[number])
    for epoch in range(1, EPOCHS + 1):
        if study.judge_value(number, epoch, value * (EPOCHS + 1 - epoch)):
            study.end(number, value, is_pruned=True)
            return True
    study.end(number, value, is_pruned=False)
    return False


def swept(folder: Path, sampler: Sampler, pruner: Pruner | None, *, is_killed: bool) -> tuple[list[Point], list[bool]]:
    """Sweep with two trials at a time; killed again and again, it goes on with what storage has."""
    store, pruned = FolderStore(str(folder)), list[bool]()
    tried = study(store, sampler, pruner)
    for number in range(14):
        assert tried.choose(lambda point: True) == tried.points[-1]
        if number:
            pruned.append(train(tried, number - 1))
        if is_killed and number % 5 == 4:
            tried.write()
            tried = study(store, sampler, pruner, resumes=True)
    return tried.points, pruned


@pytest.mark.parametrize(
    ("sampler", "pruner"),
    [("tpe", None), ("tpe", "hyperband"), ("cmaes", "median"), ("cmaes", None), ("qmc", "successive-halving")],
)
def test_a_killed_sweep_goes_on_as_if_nothing_had_happened(
    sampler: Sampler, pruner: Pruner | None, tmp_path: Path
) -> None:
    at_once = swept(tmp_path / "at-once" / "rates", sampler, pruner, is_killed=False)
    in_parts = swept(tmp_path / "in-parts" / "rates", sampler, pruner, is_killed=True)
    assert in_parts == at_once
    assert any(at_once[1]) is (pruner is not None)


def test_tpe_learns_from_what_was_measured(tmp_path: Path) -> None:
    tried = study(FolderStore(str(tmp_path)), "tpe")
    for number in range(24):
        tried.choose(lambda point: True)
        train(tried, number)
    values = [value_of(point) for point in tried.points]
    assert sum(values[14:]) > sum(values[:10])


def test_the_sampler_of_gaussian_processes_chooses_points_of_the_space(tmp_path: Path) -> None:
    tried = study(FolderStore(str(tmp_path)), "gp")
    for number in range(3):
        point = tried.choose(lambda point: True)
        assert point is not None and 1e-4 <= rate_of(point) <= 1
        train(tried, number)


def test_no_point_is_chosen_twice_and_none_that_is_not_allowed(tmp_path: Path) -> None:
    tried = SweepStudy(
        FolderStore(str(tmp_path)),
        parse(["optimizer=sgd,adamw", "nesterov=true,false"]),
        sampler="tpe",
        pruner=None,
        seed=0,
        is_lower_better=True,
        num_epochs=1,
    )
    while tried.choose(lambda point: point != {"optimizer": "adamw", "nesterov": True}) is not None:
        tried.end(len(tried.points) - 1, 0.0, is_pruned=False)
    assert len(tried.points) == 3 and {"optimizer": "adamw", "nesterov": True} not in tried.points
    assert len({tuple(point.values()) for point in tried.points}) == 3


@pytest.mark.parametrize("seed", [3, 11, 14])
def test_all_points_that_are_allowed_are_tried_before_a_sweep_ends(seed: int, tmp_path: Path) -> None:
    tried = SweepStudy(
        FolderStore(str(tmp_path)),
        {"optimizer": tuple("abcdef"), "epochs": (1, 2)},
        sampler="tpe",
        pruner=None,
        seed=seed,
        is_lower_better=False,
        num_epochs=4,
    )
    while (point := tried.choose(lambda point: point["optimizer"] == "a" or point["epochs"] == 1)) is not None:
        tried.end(len(tried.points) - 1, 1.0 if point["optimizer"] == "a" else 0.1, is_pruned=False)
    assert len(tried.points) == 7


def test_points_that_others_chose_are_pruned_too_and_nothing_counts_twice(tmp_path: Path) -> None:
    generator = random.Random(0)
    tried = study(FolderStore(str(tmp_path)), None, "median")
    for number in range(12):
        tried.give({"learning_rate": generator.uniform(1e-4, 1), "weight_decay": 1e-3, "optimizer": "sgd"})
        pruned = train(tried, number)
    tried.give({"learning_rate": 1e-4, "weight_decay": 1e-3, "optimizer": "sgd"})
    assert tried.judge_value(12, 1, -100.0)
    assert tried.judge_value(12, 1, 7.0), "the resumed trial measures it again"
    tried.end(12, -100.0, is_pruned=True)
    tried.end(12, 5.0, is_pruned=False)
    assert not tried.judge_value(12, 2, 5.0)
    assert isinstance(pruned, bool)


@pytest.mark.parametrize(
    "line",
    [
        '{"event": "chosen", "values": {"learning_rate": 7, "weight_decay": 0.001, "optimizer": "sgd"}}',
        '{"event": "chosen", "values": {"learning_rate": 0.1, "weight_decay": 0.001, "optimizer": "os.system"}}',
        '{"event": "given", "values": {"data": "s3://elsewhere"}}',
        '{"event": "measured", "trial": 7, "epoch": 1, "value": 1.0}',
        '{"event": "measured", "trial": "0", "epoch": [], "value": {}}',
        '{"event": "ended", "trial": 0}',
        '{"event": "__class__"}',
        "[]",
        "\\x00",
    ],
)
def test_what_a_stranger_wrote_into_the_log_is_left_out(line: str, tmp_path: Path) -> None:
    store = FolderStore(str(tmp_path))
    store.put(STUDY, f"{line}\n".encode())
    tried = study(store, "tpe", resumes=True)
    assert tried.points == []
    assert tried.choose(lambda point: True) is not None


def test_without_the_extra_a_sentence_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "optuna", None)  # so Python says that it is not installed
        with pytest.raises(UsageError, match=r"--sampler tpe needs optuna, which is not installed; install .*optuna"):
            check_optuna("tpe", None)
        with pytest.raises(UsageError, match=r"--pruner median needs optuna"):
            check_optuna(None, "median")
        check_optuna(None, None)
    monkeypatch.setitem(sys.modules, "cmaes", None)
    with pytest.raises(UsageError, match=r"--sampler cmaes needs cmaes, which is not installed"):
        check_optuna("cmaes", None)
    check_optuna("tpe", "median")


def test_all_names_are_known_to_the_command() -> None:
    assert {"tpe", "cmaes", "gp", "qmc", "random", "grid"} == set(get_args(Sampler))
    assert {"median", "successive-halving", "hyperband"} == set(get_args(Pruner))
