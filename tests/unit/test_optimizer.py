"""Optimizers of timm, as ``--optimizer`` names them."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn

from raytrain import TrainConfig, UsageError
from raytrain.training.model_names import check_optimizer_name
from raytrain.training.optimisation import build_optimizer
from tests.helpers.folder_runs import folder_run, largest_difference, train_here, train_runs
from tests.helpers.memory_runs import config

CHECKED = """
import sys
from pathlib import Path
from raytrain.training.assembly import load_initial_weights
from raytrain.training.run_spec import RunSpec
from raytrain.data.dataset import open_dataset
from raytrain.runs.documents import run_store
from tests.helpers.small_runs import config

here = Path(sys.argv[1])
options = config(sys.argv[2], here / "runs", head_learning_rate_factor=2.0, decay_norms_and_biases=False)
store = run_store(options.storage, "run")
data = open_dataset(options, store)
resolved = options.resolve(name="run", num_workers=1, device="cpu", mean=data.mean, std=data.std)
load_initial_weights(RunSpec.of(resolved, data, store, None, 1), 0)
assert "torch._dynamo" not in sys.modules
"""


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_complex_weights_step_as_in_plain_pytorch(name: Literal["sgd", "adamw"]) -> None:
    given = TrainConfig(batch_size=1, learning_rate=0.5, weight_decay=0.02, momentum=0.9, optimizer=name)
    config = given.resolve(name="run", num_workers=1, device="cpu", mean=(0.0,) * 3, std=(1.0,) * 3)
    ours, theirs = (nn.Linear(3, 2, dtype=torch.complex64) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    plain = {"sgd": partial(torch.optim.SGD, momentum=0.9, nesterov=config.nesterov), "adamw": torch.optim.AdamW}[name]
    optimizers = build_optimizer(config, ours, 2), plain(theirs.parameters(), lr=0.5, weight_decay=0.02)
    for _ in range(2):
        for network, optimizer in zip((ours, theirs), optimizers, strict=True):
            network(torch.ones(1, 3, dtype=torch.complex64)).abs().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(list(ours.parameters()), list(theirs.parameters()))


@pytest.mark.parametrize(("name", "theirs"), [("lamb", "Lamb"), ("lion", "Lion")])
def test_it_is_timms_own_with_the_rate_and_decay_of_the_run(name: str, theirs: str) -> None:
    import timm.optim  # deferred: each process of the tests collects this module

    given = TrainConfig(batch_size=1, learning_rate=0.5, weight_decay=0.02, optimizer=name)  # type: ignore[arg-type]
    config = given.resolve(name="run", num_workers=1, device="cpu", mean=(0.0,) * 3, std=(1.0,) * 3)
    made = build_optimizer(config, nn.Linear(3, 2), 2)
    assert type(made) is getattr(timm.optim, theirs)
    (group,) = made.param_groups
    assert (group["lr"], group["weight_decay"], group.get("max_grad_norm")) == (0.5, 0.02, None)


@pytest.mark.not_quick
def test_the_weights_are_the_same_on_any_number_of_workers_and_after_a_resume(images: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"optimizer": "lamb", "learning_rate": 0.01, "weight_decay": 0.05}
    alone, _ = train_here(folder_run(images, tmp_path, "alone", **options))
    train_runs(3, folder_run(images, tmp_path, "stopped", stop_after=7, **options))
    resumed, _ = train_here(folder_run(images, tmp_path, "stopped", **options))
    assert largest_difference(alone, resumed) < 1e-10


@pytest.mark.not_quick
def test_the_driver_checks_what_learns_at_which_rate_without_torchs_compiler(images: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", CHECKED, str(tmp_path), str(images)], check=True, timeout=250)


def test_without_timm_it_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"--optimizer lion needs timm, .* install raytrain\[timm\]"):
        check_optimizer_name("lion")
    check_optimizer_name("adamw")


def test_nesterovs_momentum_is_torchs_and_refused_without_momentum() -> None:
    given = TrainConfig(batch_size=1, learning_rate=0.5, momentum=0.8, nesterov=True)
    config = given.resolve(name="run", num_workers=1, device="cpu", mean=(0.0,) * 3, std=(1.0,) * 3)
    (group,) = build_optimizer(config, nn.Linear(3, 2), 2).param_groups
    assert (group["momentum"], group["nesterov"]) == (0.8, True)
    for other in ({"momentum": 0.0}, {"optimizer": "adamw"}):
        with pytest.raises(UsageError, match="--nesterov is for SGD with momentum"):
            TrainConfig(batch_size=1, learning_rate=0.5, nesterov=True, **other)  # type: ignore[arg-type]


def test_momentum_begins_with_the_first_finite_gradients_of_each_weight() -> None:
    ours, plain = nn.Linear(300, 300), nn.Linear(300, 300)
    plain.load_state_dict(ours.state_dict())
    options = config(learning_rate=0.1, momentum=0.9, weight_decay=0.0)
    torch.full((400, 300), float("nan"))  # memory that is not initialised has the content of what was freed
    for model, optimizer in (
        (ours, build_optimizer(options, ours, 300)),
        (plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9, nesterov=options.nesterov, fused=False)),
    ):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)  # pyright: ignore[reportPrivateImportUsage]
        for step, factor in enumerate((float("inf"), 1.0, 1.0)):
            scaler.scale((model.weight.square() * factor).sum()).backward()
            model.bias.grad = torch.ones_like(model.bias) if step == 2 else None
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    torch.testing.assert_close(ours.state_dict(), plain.state_dict())


def test_a_network_without_a_parameter_to_train_is_refused() -> None:
    frozen = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(UsageError, match="has no parameter to train: it has none, or all are frozen"):
        build_optimizer(config(), frozen, 2)
