"""--compile: the whole network is compiled, once, and computes what it computes otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch.fx import GraphModule

from raytrain.errors import UsageError
from raytrain.monitor.events import Note
from raytrain.training.exact import batchnorm
from raytrain.training.networks.compiled import check_recordable
from raytrain.training.prepared_models import apply_options
from raytrain.training.run import Run
from tests.helpers.gloo_processes import run_in_processes
from tests.helpers.memory_runs import Recorder, config, images, make_run, network, trained
from tests.helpers.plain_loops import entropy, mlp, steps


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def losses(folder: Path, **chosen: Any) -> list[float | None]:
    recorder = Recorder()
    options = config(model="tests.gpu.same:network", max_steps=3, evaluate_every=0, **chosen)
    run = make_run(options, images(48), str(folder), recorder)
    trained(run)
    return [row.loss for row in recorder.rows if row.kind == "step"]


@pytest.mark.slow
def test_a_network_with_dropout_trains_as_it_does_otherwise(tmp_path: Path) -> None:
    wanted = losses(tmp_path / "plain", compile=False)
    assert losses(tmp_path / "compiled", compile=True) == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("batch_norm", ["sync", "aggregate"])
def test_it_compiles_once_to_train_and_once_to_evaluate(
    batch_norm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    losses(tmp_path, compile=True, batch_norm=batch_norm)
    assert counters["stats"]["unique_graphs"] == 2


def test_a_sequence_of_layers_is_compiled_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    network = nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.ReLU(), nn.Linear(4, 2))
    apply_options(network, config(compile=True))
    network(torch.zeros(3, 3, 2, 2))
    assert (counters["stats"]["unique_graphs"], counters["stats"]["calls_captured"]) == (1, 4)


def in_the_same_memory(graph: GraphModule, inputs: Any) -> Any:
    """Compile to a function that writes its results where it wrote those of the call before, as CUDA graphs do."""
    results: list[Any] = []

    def replay(*arguments: Any) -> list[Any]:
        computed = graph(*arguments)
        if [getattr(each, "shape", None) for each in results] != [getattr(each, "shape", None) for each in computed]:
            results[:] = [each.clone() if isinstance(each, Tensor) else each for each in computed]
        for place, each in zip(results, computed, strict=True):
            if isinstance(each, Tensor):
                place.copy_(each)
        return [place.detach() if isinstance(place, Tensor) else place for place in results]

    return make_boxed_func(replay)


@pytest.fixture
def rounds_of_graphs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Have --compile record graphs in a way of this machine's; notes each new round of them."""
    backend = aot_autograd(fw_compiler=in_the_same_memory)
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, mode: compile(function, backend=backend))
    rounds: list[str] = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: rounds.append("begun"))
    return rounds


def train_and_keep(run: Run, kept: list[tuple[Tensor, Tensor]]) -> None:
    """Keep what the network says in each step, and a copy of it that was made at once."""
    model = run.prepare(run.build_model())
    optimizer = run.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    for epoch in run.epochs():
        for batch in epoch:
            logits = model(batch.images)
            kept.append((logits.detach(), logits.detach().clone()))
            optimizer.zero_grad()
            nn.functional.cross_entropy(logits, batch.labels).backward()
            optimizer.step()
            run.log(loss=logits.mean())


def test_a_loop_may_keep_what_a_recorded_network_says(tmp_path: Path, rounds_of_graphs: list[str]) -> None:
    run = make_run(config(compile="max-autotune", max_steps=4), images(64), str(tmp_path), Recorder())
    kept: list[tuple[Tensor, Tensor]] = []
    trained(run, lambda run: train_and_keep(run, kept))
    assert len(kept) == 4
    assert all(torch.equal(logits, copy) for logits, copy in kept)
    num_batches_of_evaluation = -(-64 // 6)
    assert len(rounds_of_graphs) == 4 + num_batches_of_evaluation


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_recorded_network_learns_what_it_does_otherwise(
    accumulate: int, tmp_path: Path, rounds_of_graphs: list[str]
) -> None:
    wanted = losses(tmp_path / "plain", accumulate=accumulate, ema_decay=0.9)
    assert not rounds_of_graphs
    recorded = losses(tmp_path / "recorded", compile="max-autotune", accumulate=accumulate, ema_decay=0.9)
    assert recorded == pytest.approx(wanted, rel=1e-9)


def test_networks_that_wait_for_other_workers_are_not_recorded() -> None:
    joined = batchnorm.convert(network(3, 3), "sync")
    with pytest.raises(UsageError, match=r"--compile is reduce-overhead.*--batch-norm aggregate, or --compile default"):
        check_recordable(joined, "reduce-overhead")
    check_recordable(joined, "default")
    check_recordable(batchnorm.convert(network(3, 3), "aggregate"), "reduce-overhead")


LOSSES: dict[str, tuple[Callable[[nn.Module, Any], Tensor], str]] = {
    "mean": (entropy, ""),
    "sum": (lambda m, b: nn.functional.cross_entropy(m(b.images), b.labels, reduction="sum"), "is a sum over images"),
    "comparison": (lambda m, b: entropy(m, b) + m(b.images).T.var(1).sum(), "compares the images"),
}


def notes_of_workers(folder: str) -> tuple[dict[str, list[str]], int]:
    """Return the notes of a run for each loss, and the number of graphs that were compiled."""
    notes: dict[str, list[str]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
        for name, (loss_of, _) in LOSSES.items():
            recorder = Recorder()
            run = make_run(config(batch_size=12, compile=True), images(48), f"{folder}/{name}", recorder)
            with run.steps.optimizers.followed():
                model = run.prepare(mlp())
                steps(run, model, run.prepare(torch.optim.SGD(model.parameters(), lr=0.1)), loss_of, evaluate=None)
                run.finish()
            notes[name] = [event.text for event in recorder.events if isinstance(event, Note)]
    return notes, counters["stats"]["unique_graphs"]


def test_losses_of_compiled_networks_are_watched_and_nothing_is_compiled_for_it(tmp_path: Path) -> None:
    (notes, num_graphs), _ = run_in_processes(2, notes_of_workers, str(tmp_path))
    for name, (_, says) in LOSSES.items():
        assert len(notes[name]) == bool(says), notes[name]
        assert all(says in note for note in notes[name])
    assert num_graphs == 2  # to train and to evaluate
