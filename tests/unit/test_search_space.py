"""The search space of a sweep: the syntax of --vary, the points that are tried, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytrain import TrainConfig, UsageError, recipes
from raytrain.experiments.search_space import Range, are_points, parse, points
from raytrain.experiments.sweep_options import SweepOptions
from raytrain.experiments.sweep_plan import parse_sweep, plan_sweep
from raytrain.experiments.trials import as_typed, trials_of

POSITIVE = st.floats(1e-6, 1e6)


def test_lists_give_every_combination() -> None:
    space = parse(["learning-rate=0.01,0.1", "optimizer=sgd,adamw", "nesterov=true,no"])
    assert space["learning_rate"] == (0.01, 0.1)
    tried = points(space, None, 0)
    assert len(tried) == 8
    assert tried[0] == {"learning_rate": 0.01, "optimizer": "sgd", "nesterov": True}
    assert tried[-1] == {"learning_rate": 0.1, "optimizer": "adamw", "nesterov": False}


def test_blanks_between_values_are_no_part_of_them() -> None:
    space = parse(["optimizer=sgd, lion", "batch-size=32/worker, 64/worker", "nesterov=yes, no"])
    assert space == {"optimizer": ("sgd", "lion"), "batch_size": ("32/worker", "64/worker"), "nesterov": (True, False)}


def test_none_is_a_value_of_an_option_that_may_be_none() -> None:
    plan = plan_sweep(
        recipes.cifar10(data="images"), ["weights=none,DEFAULT", "clip-norm=None,1", "flip=none"], SweepOptions()
    )
    assert parse_sweep(json.loads(json.dumps(dataclasses.asdict(plan)))) == plan  # as it is stored
    trials = trials_of(plan, recipes.cifar10(data="images"), "sweep")
    assert [trial.config.weights for trial in trials] == [None, None, "DEFAULT", "DEFAULT"]
    assert [trial.config.clip_norm for trial in trials] == [None, 1.0, None, 1.0]
    assert as_typed(trials[0].values) == "weights=none clip-norm=none flip=none"
    with pytest.raises(UsageError, match="--vary epochs: 'none' is not a whole number"):
        parse(["epochs=none,1"])


@given(
    low=POSITIVE, factor=st.floats(1.001, 1e6), log=st.booleans(), seed=st.integers(0, 2**31), count=st.integers(1, 8)
)
def test_values_stay_within_their_range(low: float, factor: float, log: bool, seed: int, count: int) -> None:
    high = low * factor
    space = parse([f"weight-decay={'log:' if log else ''}{low!r}..{high!r}"])
    generator = random.Random(seed)
    drawn = space["weight_decay"]
    assert isinstance(drawn, Range) and all(low <= float(drawn.draw(generator)) <= high for _ in range(count))


@given(low=st.integers(1, 50), more=st.integers(1, 9), log=st.booleans(), seed=st.integers(0, 2**31))
def test_whole_numbers_stay_whole_and_each_can_be_drawn(low: int, more: int, log: bool, seed: int) -> None:
    space = parse([f"epochs={'log:' if log else ''}{low}..{low + more}"])
    assert space["epochs"] == Range(low, low + more, log, whole=True)
    tried = [point["epochs"] for point in points(space, more + 1, seed)]
    assert sorted(map(str, tried)) == sorted(map(str, range(low, low + more + 1)))
    assert all(isinstance(value, int) for value in tried)


def test_a_number_that_may_also_be_a_word_varies_as_a_number() -> None:
    assert [point["accumulate"] for point in points(parse(["accumulate=1,2"]), None, seed=0)] == [1, 2]


def test_a_switch_that_may_also_be_a_word_varies_as_both() -> None:
    space = parse(["compile=no,reduce-overhead", "channels-last=auto,true", "gradient-dtype=bfloat16"])
    assert space == {
        "compile": (False, "reduce-overhead"),
        "channels_last": ("auto", True),
        "gradient_dtype": ("bfloat16",),
    }
    assert are_points([{"compile": True}, {"compile": "default"}]) and not are_points([{"compile": "fast"}])
    with pytest.raises(UsageError, match=r"--vary compile: 'fast' is none of default, reduce-overhead"):
        parse(["compile=fast"])


def test_a_number_may_be_one_for_each_worker() -> None:
    sweep = plan_sweep(config(), ["workers=1,2", "batch-size=32/worker,64"], SweepOptions())
    assert sweep.points[0] == {"workers": 1, "batch_size": "32/worker"} and are_points(list(sweep.points))
    trials = trials_of(sweep, config(), "s")
    assert [(trial.config.workers, trial.config.batch_size) for trial in trials] == [(1, 32), (1, 64), (2, 64), (2, 64)]
    assert not are_points([{"epochs": "2/worker"}]) and not are_points([{"batch_size": "32"}])


@given(seed=st.integers(0, 2**31), count=st.integers(1, 12))
def test_points_are_different_and_depend_on_the_seed(seed: int, count: int) -> None:
    space = parse(["learning-rate=log:1e-4..1", "batch-size=64,128,256"])
    tried = points(space, count, seed)
    assert len({tuple(point.values()) for point in tried}) == count
    assert tried == points(space, count, seed)


@given(seed=st.integers(0, 2**31))
def test_no_value_of_a_list_is_drawn_again_before_all_others_were(seed: int) -> None:
    space = parse(["optimizer=sgd,adamw,lion", "learning-rate=log:1e-4..1", "nesterov=true,false"])
    tried = points(space, 6, seed)
    for first in (0, 3):
        assert {point["optimizer"] for point in tried[first : first + 3]} == {"sgd", "adamw", "lion"}
    assert [point["nesterov"] for point in tried].count(True) == 3
    assert len(points(parse(["optimizer=sgd,adamw,lion", "epochs=1,2,3", "seed=0,1,2"]), 27, seed)) == 27


def test_a_logarithmic_range_covers_all_decades_evenly() -> None:
    tried = points(parse(["learning-rate=log:1e-4..1"]), 400, seed=0)
    decades = [math.floor(math.log10(float(str(point["learning_rate"])))) for point in tried]
    assert all(60 < decades.count(decade) < 140 for decade in (-4, -3, -2, -1))


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("lerning-rate=1", "no option 'lerning-rate' (did you mean learning-rate"),
        ("lr=0.1,1", "no option 'lr' (did you mean learning-rate?)."),
        ("dropout=0.1", "no option 'dropout'; those that may vary are "),
        ("data=a,b", "data is the same for all trials"),
        ("labels=a.csv,b.csv", "labels is the same for all trials"),
        ("backend=ray,local", "backend is the same for all trials"),
        ("image-size=32,64", "image-size is the same for all trials"),
        ("learning-rate", "learning-rate has no values"),
        ("learning-rate=fast", "'fast' is not a number"),
        ("learning-rate=0.1,", "'' is not a number"),
        (
            "learning-rate=0.1-1",
            "'0.1-1' is not a number; write learning-rate=VALUE,VALUE, or learning-rate=LOW..HIGH.",
        ),
        (
            "learning-rate=0.1 0.2",
            "'0.2' is no option with values; write all values of one with commas, as in learning-",
        ),
        ("learning-rate=nan", "'nan' is not a number"),
        ("epochs=1.5", "'1.5' is not a whole number"),
        ("epochs=2/worker", "'2/worker' is not a whole number"),
        ("nesterov=maybe", "'maybe' is not true or false"),
        ("optimizer=adam", "'adam' is none of sgd, adamw"),
        ("learning-rate=1..0.1", "from a number to a larger one"),
        ("learning-rate=log:0..1", "starts above 0"),
    ],
)
def test_a_wrong_search_space_is_refused_in_one_sentence(word: str, sentence: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse(word.split())
    assert sentence in str(raised.value)


def config(**options: object) -> TrainConfig:
    return recipes.digits(name="s", data="images", **options)


@pytest.mark.parametrize(
    ("vary", "trials", "sentence"),
    [
        ([], None, "--vary is missing"),
        (["epochs=1", "epochs=2"], None, "names epochs twice"),
        (["learning-rate=0.1..1"], None, "say how many with --trials"),
        (["epochs=1,2"], 3, "2 different points only"),
        (["epochs=1,2"], 10**8, "2 different points only"),
        (["epochs=1,2"], 0, "at least 1"),
    ],
)
def test_an_invalid_sweep_is_refused(vary: list[str], trials: int | None, sentence: str) -> None:
    with pytest.raises(UsageError) as raised:
        plan_sweep(config(), vary, SweepOptions(trials=trials))
    assert sentence in str(raised.value)


def test_a_trial_is_a_run_of_one_worker_with_its_values() -> None:
    sweep = plan_sweep(config(), ["batch-size=32,64", "learning-rate=0.5"], SweepOptions())
    first, second = trials_of(sweep, config(), "s")
    assert (first.name, second.name) == ("s-00", "s-01")
    assert (second.config.batch_size, second.config.learning_rate, second.config.workers) == (64, 0.5, 1)
    assert (second.config.name, second.values) == ("s-01", {"batch_size": 64, "learning_rate": 0.5})


def test_workers_are_those_of_each_trial() -> None:
    options = config(workers=3)
    trials = trials_of(plan_sweep(options, ["batch-size=32/worker,64"], SweepOptions()), options, "s")
    assert [(trial.config.workers, trial.config.batch_size) for trial in trials] == [(3, 96), (3, 64)]


@pytest.mark.parametrize(
    ("vary", "options", "sentence"),
    [
        (["epochs=1,0"], {}, "--epochs is 0; it must be at least 1"),
        (["learning-rate=0.1,0.10"], {}, "result in the same options"),
        (["batch-size=32,32/worker"], {}, "result in the same options"),
        (["workers=1,2,2"], {}, "workers=2 and workers=2 result in the same options"),
        (["workers=2/worker"], {}, "--workers is '2/worker'"),
        (["epochs=1,2"], {"workers": "1..2"}, "--workers is how many workers each trial"),
    ],
)
def test_a_trial_with_invalid_options_is_refused(vary: list[str], options: dict[str, object], sentence: str) -> None:
    with pytest.raises(UsageError) as raised:
        trials_of(plan_sweep(config(), vary, SweepOptions()), config(**options), "s")
    assert sentence in str(raised.value)
