"""The loops in docs/your-own-loop.md train, and end with the same weights on one and on two workers."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from raytrain.errors import UsageError
from raytrain.monitor.events import Note
from raytrain.training.assembly import train_run
from raytrain.training.run import Run
from tests.helpers.gloo_processes import run_in_processes
from tests.helpers.memory_runs import Recorder, config, images, make_run, make_spec

PAGE = Path(__file__).parents[2] / "docs" / "your-own-loop.md"
OPTIONS = {"microbatches": {"accumulate": 2}}  # of loops that need some
_OF_UNUSED_OPTIONS = "which the loop does not call"


def recipes() -> dict[str, Callable[[Run], None]]:
    """The functions on the page that need nothing but a run, and return nothing, by their names."""
    names: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(compile(code, str(PAGE), "exec", dont_inherit=True), names)
    return {name: value for name, value in names.items() if inspect.isfunction(value) and _is_loop(value)}


def _is_loop(function: Callable[..., Any]) -> bool:
    signature = inspect.signature(function)
    needed = [each.name for each in signature.parameters.values() if each.default is each.empty]
    return needed == ["run"] and signature.return_annotation is None


def train_all(folder: str) -> dict[str, list[Tensor]]:
    """The weights of all networks that a recipe trains, by its name."""
    found: dict[str, list[Tensor]] = {}
    for name, loop in recipes().items():
        options, place, recorder = config(batch_size=7, **OPTIONS.get(name, {})), f"{folder}/{name}", Recorder()
        run = make_run(options, images(38), place, recorder)
        spec = dataclasses.replace(make_spec(options, images(38), place), loop=loop)
        assert train_run(spec, run).status == "finished"
        measured = [row.step for row in recorder.rows if row.kind == "evaluation"]
        assert measured == ([6, 12] if run.rank == 0 else []), name
        notes = [event.text for event in recorder.events if isinstance(event, Note)]
        assert [note for note in notes if _OF_UNUSED_OPTIONS not in note] == [], name
        found[name] = [value.detach().clone() for model in run.models.trained for value in model.state_dict().values()]
    return found


def test_the_recipes_end_with_the_same_weights_on_two_workers_as_on_one(tmp_path: Path) -> None:
    alone = train_all(str(tmp_path / "one"))
    assert PAGE.read_text().count("in run.epochs(") == len(alone), "a loop of the page is not found"
    for together in run_in_processes(2, train_all, str(tmp_path / "two")):
        assert together.keys() == alone.keys()
        for name, weights in alone.items():
            torch.testing.assert_close(
                together[name], weights, rtol=1e-7, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}"
            )


def penalise_with_batch_norm(folder: str) -> str:
    run = make_run(config(batch_size=7), images(38), folder, Recorder())
    model = run.prepare(run.build_model())
    for epoch in run.epochs():
        for batch in epoch:
            pixels = batch.images.requires_grad_()
            try:
                torch.autograd.grad(model(pixels).sum(), pixels, create_graph=True)
            except UsageError as error:
                return str(error)
            return ""
    raise AssertionError("there was no batch")


def test_a_gradient_of_gradients_through_joined_batch_norm_is_refused(tmp_path: Path) -> None:
    assert penalise_with_batch_norm(str(tmp_path / "one")) == ""
    for told in run_in_processes(2, penalise_with_batch_norm, str(tmp_path / "two")):
        assert "cannot pass batch norm that is joined over the workers" in told
