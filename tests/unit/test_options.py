"""Options whose values are written as text: what they mean, and which texts are refused."""

from __future__ import annotations

import copy
import json
import pickle
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raytrain import recipes
from raytrain.config import SECTIONS, ResolvedConfig, TrainConfig
from raytrain.config.checkpoints import Intervals
from raytrain.config.optimisation import Schedule
from raytrain.config.option_marks import KnownAs, Mark
from raytrain.config.option_values import hints_of
from raytrain.config.options import marks_of, options_by_call, options_with
from raytrain.errors import UsageError, flag


def config(**given: Any) -> TrainConfig:
    return TrainConfig(**{"batch_size": 8, "learning_rate": 0.1, **given})


def resolved(num_workers: int, found: str = "cpu", **given: Any) -> ResolvedConfig:
    three = (0.5, 0.5, 0.5)
    return config(**given).resolve(name="run", num_workers=num_workers, device=found, mean=three, std=three)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("lr", "did you mean learning_rate?"),
        ("bs", "did you mean batch_size?"),
        ("epoch", "did you mean epochs?"),
        ("amp", "did you mean precision?"),
        ("num_classes", "folders or labels say which classes there are"),
    ],
)
def test_an_option_that_does_not_exist_is_refused_with_the_one_that_was_meant(name: str, hint: str) -> None:
    unknown: dict[str, Any] = {name: 1}
    for make in (TrainConfig, recipes.custom, partial(replace, config())):
        with pytest.raises(UsageError, match=re.escape(f"TrainConfig has no option {name} ({hint}); ")):
            make(**unknown)
    with pytest.raises(UsageError, match=r"a value without a name, 0\.1; write learning_rate=0\.1"):
        TrainConfig(0.1)  # pyright: ignore[reportCallIssue]
    same = config(epochs=3)
    assert pickle.loads(pickle.dumps(same)) == copy.deepcopy(same) == same


def test_an_option_that_is_changed_is_refused_with_how_to_make_other_options() -> None:
    for options in (config(epochs=3), resolved(1, epochs=3)):
        with pytest.raises(UsageError, match=r"^epochs of .* config = dataclasses\.replace\(config, epochs=…\)\.$"):
            options.epochs = 5  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises(UsageError, match=r"no option lr \(did you mean learning_rate\?\)"):
            options.lr = 1  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises(UsageError, match="cannot be changed"):
            del options.epochs  # pyright: ignore[reportAttributeAccessIssue]
        assert options.epochs == 3


@pytest.mark.parametrize(("batch_size", "total"), [(128, 128), ("128/worker", 384)])
def test_a_batch_size_is_for_all_workers_or_for_each(batch_size: int | str, total: int) -> None:
    assert resolved(3, batch_size=batch_size).batch_size == total


@pytest.mark.parametrize(("rate", "total"), [(0.1, 0.1), ("0.1/worker", 0.3), ("1e-3/worker", 0.003), (None, 0.0)])
def test_a_learning_rate_is_for_all_workers_or_for_each(rate: float | str | None, total: float) -> None:
    assert resolved(3, learning_rate=rate).learning_rate == pytest.approx(total)


@pytest.mark.parametrize(
    ("text", "schedule"),
    [
        ("cosine", Schedule("cosine")),
        ("piecewise", Schedule("piecewise", 0.1, 10)),
        ("rising:1e-6..1e+1", Schedule("rising", rates=(1e-6, 10.0))),
        ("piecewise:0.5/3ep", Schedule("piecewise", 0.5, 3)),
    ],
)
def test_a_schedule_has_its_parameters_in_its_text(text: str, schedule: Schedule) -> None:
    assert config(schedule=text).learning_rate_schedule == schedule


@pytest.mark.parametrize(
    ("texts", "intervals"),
    [
        ((), Intervals()),
        (("none",), Intervals()),
        (("2ep",), Intervals(epochs=2)),
        (("500st", "1.5m"), Intervals(steps=500, seconds=90)),
        (("1ep", "7st", "2h"), Intervals(1, 7, 7200)),
    ],
)
def test_checkpoints_are_due_by_epochs_steps_and_time(texts: tuple[str, ...], intervals: Intervals) -> None:
    assert config(checkpoint_every=texts).checkpoint_intervals == intervals
    assert config().checkpoint_intervals == Intervals(epochs=1, seconds=600)


@pytest.mark.parametrize(
    "texts", [("1ep", "5ep"), ("90s", "10m"), ("5st", "1ep", "5st"), ("none", "1ep"), ("1ep", "none")]
)
def test_two_intervals_of_which_one_would_have_no_effect_are_refused(texts: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match=f"^--checkpoint-every is {' '.join(texts)}; give at most one interval of ep"):
        config(checkpoint_every=texts)


def test_two_prices_of_a_gpu_are_refused() -> None:
    with pytest.raises(UsageError, match="--price is 'A100=1 L4=1 a100=2', which has two prices of a100; give one"):
        config(price=("A100=1", "L4=1", "a100=2"))


@pytest.mark.parametrize(
    ("device", "kind", "gpus", "accelerator"),
    [
        ("auto", "auto", None, None),
        ("cpu", "cpu", None, None),
        ("cuda:0,2", "cuda", "0,2", None),
        ("cuda:A100", "cuda", None, "A100"),
        ("cuda:AMD-Instinct-MI300X", "cuda", None, "AMD-Instinct-MI300X"),
    ],
)
def test_a_device_may_have_numbers_or_a_type(device: str, kind: str, gpus: str | None, accelerator: str | None) -> None:
    given = config(device=device)
    assert (given.device_type, given.gpus, given.accelerator_type) == (kind, gpus, accelerator)


@pytest.mark.parametrize(("device", "found", "trains_on"), [("auto", "cuda", "cuda"), ("cuda:0,2", "cuda", "cuda:0,2")])
def test_a_run_that_starts_keeps_the_gpus_that_were_chosen(device: str, found: str, trains_on: str) -> None:
    assert resolved(2, found, device=device).device == trains_on


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"batch_size": None}, "--batch-size is not given; give 128 for all workers together, or 32/worker."),
        ({"batch_size": "0/worker"}, "--batch-size is '0/worker'; give a number of images, such as 128 or 32/worker."),
        ({"batch_size": "32/gpu"}, "--batch-size is '32/gpu'; give"),
        ({"learning_rate": "x"}, "--learning-rate is 'x'; give a number of at least 0, such as 0.1 or 0.05/worker."),
        ({"learning_rate": "-1/worker"}, "--learning-rate is '-1/worker'; give"),
        ({"schedule": "cosin"}, "--schedule is 'cosin' (did you mean cosine?); give constant, cosine, linear, or"),
        ({"auto_augment": "randaugmnt"}, "--auto-augment is 'randaugmnt' (did you mean randaugment?); give rand"),
        ({"schedule": "piecewise:0.1/0ep"}, "piecewise:0.1/10ep, which multiplies the learning rate by 0.1 every 10"),
        ({"schedule": "rising:1..1"}, "find-rate takes rising:1e-6..10"),
        ({"checkpoint_every": ("1 ep",)}, "--checkpoint-every is '1 ep'; give epochs, steps or a time, such as 1ep,"),
        ({"checkpoint_every": ("0s",)}, "--checkpoint-every is '0s'; give"),
        ({"max_time": "2"}, "--max-time is '2'; give a number and s, m, h or d, such as 90s or 2h."),
        ({"device": "gpu"}, "--device is 'gpu'; give auto, cpu, cuda, numbers of GPUs, each once, such as cuda:0,2"),
        ({"device": "cpu:0"}, "--device is 'cpu:0'; give"),
        ({"device": "cuda:A100", "backend": "local"}, "--device is cuda:A100, which is for a Ray cluster"),
        (
            {"workers": "1..4", "backend": "local"},
            "--workers is 1..4, which is for a Ray cluster",
        ),
    ],
)
def test_a_text_that_is_malformed_is_refused(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError) as refused:
        config(**given)
    assert sentence in str(refused.value)


class Table:
    """Has a text of several lines, and compares its cells, as a DataFrame does."""

    def __repr__(self) -> str:
        return "a table  of\ntwo lines"

    def __eq__(self, other: object) -> Any:
        return np.array([True, False])

    __hash__ = None  # pyright: ignore


@pytest.mark.parametrize(
    ("option", "given", "value"),
    [
        ("data", Path("images"), "images"),
        ("storage", Path("runs"), "runs"),
        ("batch_size", np.int64(12), 12),
        ("learning_rate", np.float64(0.1), 0.1),
        ("learning_rate", torch.tensor(0.5), 0.5),
        ("image_size", [32, 16], (32, 16)),
        ("image_size", np.array([32, 16]), (32, 16)),
        ("image_size", np.int64(32), (32, 32)),
        ("mean", np.array([0.5, 0.25, 0.125]), (0.5, 0.25, 0.125)),
        ("track", ["tensorboard"], ("tensorboard",)),
        ("tag", "first", ("first",)),
        ("test_views", "flip", ("flip",)),
        ("test_views", {"shift", "flip"}, ("flip", "shift")),
        ("checkpoint_every", "2ep", ("2ep",)),
        ("checkpoint_every", None, ()),
        ("price", 2.5, ("2.5",)),
        ("price", 3, ("3",)),
        ("price", np.float32(2.5), ("2.5",)),
        ("price", 1e-5, ("1e-05",)),
        ("price", {"A100": np.float64(1.8), "L4": 1}, ("A100=1.8", "L4=1")),
        ("price", None, ()),
        ("tag", [2024, "first"], ("2024", "first")),
        ("model_option", None, ()),
        ("until", {"accuracy": 0.95}, "accuracy=0.95"),
        ("until", ("loss", 1e-5), "loss=1e-05"),
        ("until", {"log_likelihood": -1.5}, "log_likelihood=-1.5"),
        ("validation_fold", (2, 5), "2/5"),
        ("workers", [1, 4], "1..4"),
        ("class_weights", {"cat": np.float64(2.5), "dog": 1}, '{"cat": 2.5, "dog": 1}'),
        ("class_weights", {np.int64(0): 2.0, np.int64(1): 1}, '{"0": 2.0, "1": 1}'),
        ("tag", {"night", 2}, ("2", "night")),
    ],
)
def test_python_code_may_write_a_value_in_its_own_types(option: str, given: Any, value: Any) -> None:
    found = getattr(config(**{option: given}), option)
    assert found == value and type(found) is type(value)
    assert json.loads(config(**{option: given}).to_json())[option] == json.loads(json.dumps(value))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"epochs": "3"}, "--epochs is '3'; give a whole number."),
        ({"epochs": 1.5}, "--epochs is 1.5; give a whole number."),
        ({"epochs": None}, "--epochs is None; give a whole number."),
        ({"batch_size": True}, "--batch-size is True; give N|N/worker."),
        ({"resume": "no"}, "--resume is 'no'; give True or False."),
        ({"mixup": True}, "--mixup is True; give a number."),
        ({"note": 3}, "--note is 3; give text."),
        ({"data": ["s3://KEY:SECRET@bucket"]}, "--data is of type list; give text."),
        ({"data": b"s3://KEY:SECRET@bucket"}, "--data is of type bytes; give text."),
        ({"price": True}, "--price is True; give X|GPU=X."),
        ({"price": float("nan")}, "--price is 'nan'; give dollars per machine and hour"),
        ({"price": [1, 2]}, "--price is '1 2'; give dollars per machine and hour"),
        ({"tag": [None]}, "--tag is [None]; give text."),
        ({"until": {"loss": 1, "accuracy": 1}}, "--until is {'loss': 1, 'accuracy': 1}; give METRIC=X."),
        ({"workers": [1, 2, 4]}, "--workers is [1, 2, 4]; give N|auto|MIN..MAX."),
        ({"labels": {"a.jpg": "cat"}}, "--labels is {'a.jpg': 'cat'}; give text."),
        ({"labels": float("nan")}, "--labels is nan; give text."),
        ({"labels": Table()}, "--labels is a table of two lines; give text."),
        ({"flip": True}, "--flip is True; give none, random, alternating."),
        ({"optimizer": "AdamW"}, "--optimizer is 'AdamW' (did you mean adamw?); give sgd, adamw, lamb, lion."),
        ({"precision": torch.float16}, "--precision is torch.float16; give auto, float32, tf32, bfloat16,"),
        ({"image_size": (3, 32, 32)}, "--image-size is (3, 32, 32); give H W|SIDE|MIN..MAX."),
        ({"image_size": 32.5}, "--image-size is 32.5; give H W|SIDE|MIN..MAX."),
        ({"device": torch.device("cpu")}, "--device is device(type='cpu'); give auto|cpu|cuda"),
        ({"model": torch.nn.Linear}, "--model is a function or a class; name it, as in file.py:function."),
        ({"test_views": ["mirror"]}, "--test-views is ['mirror']; give flip, shift."),
        ({"learning_rate": float("nan")}, "--learning-rate is nan; it must be at least 0."),
        (
            {"mean": (123.0, 117.0, 104.0)},
            "--mean is (123.0, 117.0, 104.0); each number must be at least 0 and at most 1.",
        ),
        ({"std": (58.0, 57.0, 57.0)}, "--std is (58.0, 57.0, 57.0); each number must be above 0 and at most 1."),
        ({"momentum": 9.0}, "--momentum is 9.0; it must be at least 0 and below 1."),
    ],
)
def test_a_value_of_another_type_is_refused(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError) as refused:
        config(**given)
    assert sentence in str(refused.value)


@pytest.mark.parametrize("option", [name for name, hint in hints_of(TrainConfig).items() if "float" in str(hint)])
@pytest.mark.parametrize("number", [float("inf"), float("-inf"), float("nan"), pytest.param(10**400, id="huge")])
def test_a_number_that_is_not_finite_is_refused(option: str, number: float) -> None:
    given = (number,) * 3 if option in ("mean", "std", "worker_load") else number
    with pytest.raises(UsageError, match=f"^{flag(option)} is .*\\.$"):
        config(**{option: given})


@pytest.mark.parametrize("option", ["epochs", "batch_size", "max_steps", "prefetch", "seed"])
@pytest.mark.parametrize("number", [pytest.param(2**63, id="2^63"), pytest.param(10**5000, id="huge")])
def test_a_whole_number_of_more_than_64_bits_is_refused(option: str, number: int) -> None:
    with pytest.raises(UsageError, match=f"^{flag(option)} is a whole number that does not fit into 64 bits; .*\\.$"):
        config(**{option: number})


@pytest.mark.parametrize(
    "given",
    [
        {"learning_rate": "1e400/worker"},
        {"schedule": "piecewise:1e400/3ep"},
        {"schedule": "rising:1e-6..1e400"},
        {"until": "loss=1e400"},
        {"price": "1e400"},
        {"max_time": f"{'9' * 308}d"},
        {"worker_load": (1e308, 1e308)},
        {"cache_limit_gb": 1e300},
    ],
)
def test_a_text_with_a_number_that_is_not_finite_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"^{flag(next(iter(given)))} is .*\\.$"):
        config(**given)


def test_a_notebook_shows_the_line_with_the_wrong_option() -> None:
    with pytest.raises(UsageError) as raised:
        TrainConfig(epochs="three")  # pyright: ignore
    sentence, line = raised.value._render_traceback_()  # which IPython calls
    assert "--epochs is 'three'" in sentence
    assert re.fullmatch(r"test_options\.py, line \d+: TrainConfig\(epochs=.*", line)


def test_each_option_is_in_one_section() -> None:
    names = [name for section in SECTIONS.values() for name in vars(section())]
    assert sorted(names) == sorted(vars(config()))


def test_a_flag_of_another_trainer_is_that_of_one_option_and_no_flag_here() -> None:
    flags = [
        flag(name)
        for hint in hints_of(TrainConfig).values()
        for mark in marks_of(hint)
        if isinstance(mark, KnownAs)
        for name in mark.flags.split()
    ]
    assert len(flags) == len(set(flags)) > 50
    assert not set(flags).intersection(flag(name) for name in hints_of(TrainConfig))


@pytest.mark.parametrize(
    ("mark", "names"),
    [
        (Mark.OWN_CODE, {"loop", "track", "model", "transforms"}),
        (Mark.DECIDED_ANEW, {"workers", "device", "backend", "address", "worker_load", "wait_for_machines_s"}),
        (
            Mark.SHARED_PLACE,
            {
                *("data", "validation_data", "test_data", "labels", "validation_labels", "test_labels"),
                *("storage", "weights"),
            },
        ),
        (Mark.DESCRIBES_RUN, {"name", "storage", "tag", "note", "price"}),
        (Mark.SECRET, {"notify"}),
    ],
)
def test_marks_that_decide_what_runs_and_what_is_compared(mark: Mark, names: set[str]) -> None:
    assert set(options_with(mark)) == names


def test_options_that_a_call_takes_are_known_by_the_call() -> None:
    assert options_by_call()["run.build_scheduler"] == ["schedule", "warmup_epochs"]
    assert options_by_call()["run.train_head_first"] == ["head_epochs"]
    assert options_by_call()["run.build_model"] == ["model", "model_option", "weights", "freeze"]


def test_no_option_is_both_decided_anew_and_kept_by_a_resume() -> None:
    assert set(options_with(Mark.DECIDED_ANEW)).isdisjoint(options_with(Mark.DECIDED_AT_START))
