"""The recipes in docs/your-own-loop.md train, and end with the same weights on one and on two workers."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from raytrain.errors import UsageError
from raytrain.training.run import Run
from tests.helpers.gloo_processes import run_in_processes
from tests.integration.test_exact import Recorder, config, images, make_run

PAGE = Path(__file__).parents[2] / "docs" / "your-own-loop.md"
NAMES = (
    "scheduler",
    "two_optimizers",
    "averaged",
    "sharpness_aware",
    "distillation",
    "unfreezing",
    "auxiliary_head",
    "gradient_penalty",
    "contrastive",
    "lbfgs",
)


def recipes() -> dict[str, Callable[[Run], None]]:
    section = PAGE.read_text().partition("## Recipes")[2].partition("\n## ")[0]
    names: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", section, re.DOTALL):
        exec(code, names)
    return {name: each for name, each in names.items() if name in NAMES}


def train_all(folder: str) -> dict[str, list[Tensor]]:
    """The weights of all networks that a recipe trains, by its name."""
    found: dict[str, list[Tensor]] = {}
    for name, loop in recipes().items():
        recorder = Recorder()
        run = make_run(config(batch_size=7), images(38), f"{folder}/{name}", recorder)
        loop(run)
        assert run.finish().status == "finished"
        measured = [row.step for row in recorder.rows if row.kind == "evaluation"]
        assert measured == ([6, 12] if run.rank == 0 else [])
        found[name] = [each.detach().clone() for model in run.models.trained for each in model.state_dict().values()]
    return found


def test_the_recipes_end_with_the_same_weights_on_two_workers_as_on_one(tmp_path: Path) -> None:
    alone = train_all(str(tmp_path / "one"))
    assert tuple(alone) == NAMES
    for together in run_in_processes(2, train_all, str(tmp_path / "two")):
        torch.testing.assert_close(together, alone, rtol=1e-7, atol=1e-7)


def penalise_with_batch_norm(folder: str) -> str:
    run = make_run(config(batch_size=7), images(38), folder, Recorder())
    model = run.prepare(run.build_model())
    batch = next(run.batches())
    pixels = batch.images.requires_grad_()
    try:
        torch.autograd.grad(run.loss(model(pixels), batch.targets), pixels, create_graph=True)
    except UsageError as error:
        return str(error)
    return ""


def test_a_gradient_of_gradients_through_joined_batch_norm_is_refused(tmp_path: Path) -> None:
    assert penalise_with_batch_norm(str(tmp_path / "one")) == ""
    for told in run_in_processes(2, penalise_with_batch_norm, str(tmp_path / "two")):
        assert "cannot pass batch norm that is joined over the workers" in told
