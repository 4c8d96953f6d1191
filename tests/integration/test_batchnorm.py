"""Batch norm over several processes, compared with nn.BatchNorm in one process."""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from raytrain.errors import UsageError
from raytrain.training.exact import batchnorm
from raytrain.training.exact.gather import gather_rows
from tests.helpers.gloo_processes import run_in_processes

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
NUM_STEPS = 3


@dataclasses.dataclass(frozen=True)
class Case:
    sizes: tuple[int, ...]
    """Images of each rank in the first step; each later step moves them by a rank. A rank with 0 has a placeholder."""
    mode: Literal["sync", "aggregate"] = "sync"
    dtype: torch.dtype = torch.float64
    options: tuple[tuple[str, Any], ...] = ()
    """Arguments of nn.BatchNorm2d."""
    channels_last: bool = False

    def sizes_at(self, step: int) -> tuple[int, ...]:
        moved = step % len(self.sizes)
        return self.sizes[moved:] + self.sizes[:moved]


@dataclasses.dataclass
class Outcome:
    outputs: list[Tensor]
    input_gradients: list[Tensor]
    gradients: dict[str, Tensor]
    state: dict[str, Tensor]


def network(case: Case) -> nn.Module:
    torch.manual_seed(0)
    options: dict[str, Any] = dict(case.options)
    layers = nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.BatchNorm2d(4, **options),
        nn.ReLU(),
        nn.Conv2d(4, 3, 3),
        nn.BatchNorm2d(3, **options),
        nn.Flatten(),
    )
    return layers.to(case.dtype)


def batch(case: Case, step: int) -> tuple[Tensor, Tensor]:
    """Return images with different means far from zero, so that no slice has the statistics of the whole batch."""
    generator = torch.Generator().manual_seed(step)
    n = sum(case.sizes)
    scale, shift = torch.rand(2, n, 1, 1, 1, generator=generator, dtype=torch.float64)
    images = (torch.randn(n, 2, 6, 6, generator=generator, dtype=torch.float64) * scale + 3 * shift).to(case.dtype)
    labels = torch.randint(0, 12, (n,), generator=generator)
    return images.contiguous(memory_format=torch.channels_last) if case.channels_last else images, labels


def train_slice(case: Case) -> Outcome:
    """Train this rank on its slice of each batch; without a process group it is the only rank."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    model = batchnorm.convert(network(case), case.mode)
    outputs, input_gradients = [], []
    for step in range(NUM_STEPS):
        whole, whole_labels = batch(case, step)
        sizes = case.sizes_at(step)
        images, labels = whole.split(sizes)[rank], whole_labels.split(sizes)[rank]
        used = len(images)
        if used == 0:
            images, labels = torch.full_like(whole[:2], 7.0), torch.zeros(2, dtype=torch.long)
        images = images.detach().requires_grad_()
        share = used / len(whole)
        batchnorm.set_num_used(model.modules(), used, weight=used)
        logits = model(images)
        loss = F.cross_entropy(logits, labels)  # the mean of this slice
        model.zero_grad()
        (loss if used else loss * 0).backward()
        sum_gradients(model, share)
        batchnorm.update_running_statistics(model.modules())
        descend(model)
        assert images.grad is not None
        outputs.append(logits.detach()[:used])
        input_gradients.append(images.grad[:used] * share)
        assert used or not images.grad.any()
    return outcome(model, outputs, input_gradients)


@torch.no_grad()
def descend(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter -= 0.1 * parameter.grad


def sum_gradients(model: nn.Module, share: float) -> None:
    """Make the gradients those of the whole batch, of which ``share`` is this rank's."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad *= share
        if dist.is_initialized():
            dist.all_reduce(parameter.grad)


def outcome(model: nn.Module, outputs: list[Tensor], input_gradients: list[Tensor]) -> Outcome:
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Outcome(outputs, input_gradients, gradients, copy.deepcopy(model.state_dict()))


@dataclasses.dataclass
class Recorder:
    """A forward hook that records the inputs of a layer."""

    seen: list[Tensor]

    def __call__(self, layer: nn.Module, args: tuple[Tensor]) -> None:
        self.seen.append(args[0].detach())


def train_whole(case: Case) -> Outcome:
    """The reference: nn.BatchNorm2d in one process; for "aggregate" it gets one slice after another."""
    model = network(case)
    outputs, input_gradients = [], []
    for step in range(NUM_STEPS):
        whole, labels = batch(case, step)
        whole.requires_grad_()
        pieces = [len(whole)] if case.mode == "sync" else [size for size in case.sizes_at(step) if size]
        before = copy.deepcopy(model)
        inputs: dict[str, list[Tensor]] = {
            name: [] for name, layer in model.named_modules() if isinstance(layer, nn.BatchNorm2d)
        }
        hooks = [model.get_submodule(name).register_forward_pre_hook(Recorder(seen)) for name, seen in inputs.items()]
        logits = torch.cat([model(piece) for piece in whole.split(pieces)])
        for hook in hooks:
            hook.remove()
        model.zero_grad()
        F.cross_entropy(logits, labels).backward()
        for name, seen in inputs.items():  # The running statistics are those of all values together.
            model.get_submodule(name).load_state_dict(before.get_submodule(name).state_dict())
            model.get_submodule(name)(torch.cat(seen))
        descend(model)
        assert whole.grad is not None
        outputs.append(logits.detach())
        input_gradients.append(whole.grad)
    return outcome(model, outputs, input_gradients)


MODES: tuple[Literal["sync", "aggregate"], ...] = ("sync", "aggregate")
OPTIONS = ({}, {"momentum": None, "eps": 1e-3}, {"affine": False}, {"track_running_stats": False})
SLICE_SIZES = {1: [(7,)], 2: [(4, 3), (1, 6), (0, 7), (5, 0)], 3: [(3, 2, 2), (4, 0, 3), (0, 0, 5), (1, 1, 1)]}
CASES = {
    n: [Case(sizes, mode, dtype) for sizes in SLICE_SIZES[n] for mode in MODES for dtype in TOLERANCE]
    + [Case(SLICE_SIZES[n][0], mode, options=tuple(options.items())) for mode in MODES for options in OPTIONS]
    + [Case(SLICE_SIZES[n][-1], mode, channels_last=True) for mode in MODES]
    for n in SLICE_SIZES
}


def run_rank(cases: list[Case]) -> tuple[list[Outcome], dict[str, Any]]:
    return [train_slice(case) for case in cases], run_corners() if dist.get_world_size() == 2 else {}


@pytest.fixture(scope="module")
def two_ranks() -> list[tuple[list[Outcome], dict[str, Any]]]:
    """The results of all cases with two ranks. They share their processes, which take seconds to start."""
    return run_in_processes(2, run_rank, CASES[2])


@pytest.fixture
def corners(two_ranks: list[tuple[list[Outcome], dict[str, Any]]]) -> list[dict[str, Any]]:
    return [corners for _, corners in two_ranks]


def test_a_single_process_computes_what_torchs_layer_computes() -> None:
    check_all([[train_slice(case) for case in CASES[1]]], CASES[1])


def test_two_ranks_compute_what_one_process_computes(two_ranks: list[tuple[list[Outcome], dict[str, Any]]]) -> None:
    check_all([outcomes for outcomes, _ in two_ranks], CASES[2])


def test_three_ranks_compute_what_one_process_computes() -> None:
    check_all([outcomes for outcomes, _ in run_in_processes(3, run_rank, CASES[3])], CASES[3])


def check_all(by_rank: list[list[Outcome]], cases: list[Case]) -> None:
    for case, *ranks in zip(cases, *by_rank, strict=True):
        wanted, tolerance = train_whole(case), TOLERANCE[case.dtype]
        joined = Outcome(
            [torch.cat(steps) for steps in zip(*(rank.outputs for rank in ranks), strict=True)],
            [torch.cat(steps) for steps in zip(*(rank.input_gradients for rank in ranks), strict=True)],
            ranks[0].gradients,
            ranks[0].state,
        )
        assert_close = functools.partial(
            torch.testing.assert_close, rtol=tolerance, atol=tolerance, msg=f"{{}}\n{case}".format
        )
        assert_close(joined.outputs, wanted.outputs)
        assert_close(joined.input_gradients, wanted.input_gradients)
        assert_close(joined.gradients, wanted.gradients)
        assert_close(joined.state, wanted.state)
        for rank in ranks[1:]:
            torch.testing.assert_close(
                (rank.gradients, rank.state), (ranks[0].gradients, ranks[0].state), rtol=0, atol=0
            )


def run_corners() -> dict[str, Any]:
    """Run batches without variance, compiled layers, frozen layers and mixed precision on this rank."""
    found: dict[str, Any] = {}
    for mode in MODES:
        layer = batchnorm.convert(nn.BatchNorm1d(2), mode)
        for name, used in (("nothing used", 0), ("one value", int(dist.get_rank() == 0))):
            batchnorm.set_num_used(layer.modules(), used)
            images = torch.full((1, 2), 5.0, requires_grad=True)
            output = layer(images)
            output.sum().backward()
            batchnorm.update_running_statistics(layer.modules())
            found[f"{mode}, {name}"] = (output.detach(), images.grad, copy.deepcopy(layer.state_dict()))
        compiled = batchnorm.convert(network(Case(())), mode)
        model = torch.compile(compiled, backend="aot_eager")
        batchnorm.set_num_used(compiled.modules(), 1)
        images, _ = batch(Case((6,)), 0)
        own = images[dist.get_rank() * 3 :][:3]
        output = model(own)
        output.square().sum().backward()
        batchnorm.update_running_statistics(compiled.modules())
        found[f"{mode}, compiled"] = (output.detach(), copy.deepcopy(compiled.state_dict()))
        frozen = batchnorm.convert(nn.BatchNorm2d(2), mode).eval()
        found[f"{mode}, frozen"] = (frozen(own.float()).detach(), own.float(), copy.deepcopy(frozen.state_dict()))
    found["mixed"] = {dtype: run_mixed_precision(dtype) for dtype in (torch.float32, torch.bfloat16)}
    found["placeholder"] = input_gradients()
    found["unequal"] = called_unequally()
    found["copied"] = copied()
    found["gathered"] = {mode: of_gathered_rows(mode) for mode in MODES}
    found["twice"] = [called_twice(updates) for updates in (False, True)]
    return found


def input_gradients() -> Tensor:
    """Of a backward of a loop's own, for rank 0's images; rank 1 has a placeholder, which its loss counts."""
    layer = batchnorm.convert(nn.BatchNorm2d(2), "sync").double()
    batchnorm.set_num_used(layer.modules(), 0 if dist.get_rank() else 3)
    images = batch(Case((6,)), 0)[0][: 1 if dist.get_rank() else 3].double().requires_grad_()
    (gradients,) = torch.autograd.grad(layer(images).pow(3).sum(), images)
    return gradients


def called_twice(updates_between: bool) -> dict[str, Tensor]:
    """The state of aggregated layers after two steps of two forwards each; rank 1 has a placeholder in the second."""
    model = batchnorm.convert(network(Case(())), "aggregate")
    for step in range(2):
        batchnorm.set_num_used(model.modules(), 0 if step and dist.get_rank() else 3)
        for view in (1, -2):
            model(view * batch(Case((6,)), step)[0][dist.get_rank() * 3 :][:3])
            if updates_between:
                batchnorm.update_running_statistics(model.modules())
        batchnorm.update_running_statistics(model.modules())
    return copy.deepcopy(model.state_dict())


def of_gathered_rows(mode: Literal["sync", "aggregate"]) -> dict[str, Tensor]:
    """The state of a layer that gets the gathered rows on each rank; in the second step rank 1 has no image."""
    model = batchnorm.convert(network(Case(())), mode)
    images = batch(Case((5,)), 0)[0]
    for own in ((images[:2], images[2:]), (images, images[:0])):
        batchnorm.set_num_used(model.modules(), len(own[dist.get_rank()]))
        model(gather_rows(own[dist.get_rank()].contiguous(), lambda: 1.0))
        batchnorm.update_running_statistics(model.modules())
    return copy.deepcopy(model.state_dict())


def called_unequally() -> str:
    """The error of layers that are called once on rank 0 and twice on rank 1."""
    model = batchnorm.convert(network(Case(())), "aggregate")
    for _ in range(1 + dist.get_rank()):
        model(batch(Case((6,)), 0)[0][:3])
    with pytest.raises(UsageError) as error:
        batchnorm.update_running_statistics(model.modules())
    return str(error.value)


def copied() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The states of a prepared layer and of its copy, which nobody converts, after two batches; rank 1 gets less."""
    layer = batchnorm.convert(nn.BatchNorm2d(2), "aggregate")
    copy_of_layer = copy.deepcopy(layer)
    for step in range(2):
        for called in (layer, copy_of_layer):
            called(batch(Case((6,)), step)[0].float()[dist.get_rank() * 4 :][:4])
        batchnorm.update_running_statistics(layer.modules())
    return layer.state_dict(), copy_of_layer.state_dict()


def test_a_copy_of_aggregated_layers_joins_its_statistics_by_itself(corners: list[dict[str, Any]]) -> None:
    for found in corners:
        of_layer, of_copy = found["copied"]
        assert of_layer["num_batches_tracked"] == 2
        torch.testing.assert_close(of_copy, of_layer, rtol=0, atol=0)


def test_a_placeholder_counts_as_nothing_in_a_backward_of_the_loops_own(corners: list[dict[str, Any]]) -> None:
    images = batch(Case((6,)), 0)[0][:3].double().requires_grad_()
    (wanted,) = torch.autograd.grad(nn.BatchNorm2d(2).double()(images).pow(3).sum(), images)
    torch.testing.assert_close(corners[0]["placeholder"], wanted)
    assert not corners[1]["placeholder"].any()


@pytest.mark.parametrize("mode", MODES)
def test_rows_that_each_worker_has_gathered_count_once(corners: list[dict[str, Any]], mode: str) -> None:
    alone = network(Case(()))
    for _ in range(2):
        alone(batch(Case((5,)), 0)[0])
    for found in corners:
        torch.testing.assert_close(found["gathered"][mode], alone.state_dict(), rtol=1e-10, atol=0)


def test_a_layer_that_gets_no_image_learns_nothing() -> None:
    layer = batchnorm.convert(nn.BatchNorm2d(2), "sync")
    images = torch.zeros(0, 2, 3, 3, requires_grad=True)
    layer(images).sum().backward()
    assert not any(each.grad.any() for each in (images, *layer.parameters()) if each.grad is not None)
    torch.testing.assert_close(layer.state_dict(), nn.BatchNorm2d(2).state_dict())


def test_calls_that_differ_in_number_between_workers_are_refused(corners: list[dict[str, Any]]) -> None:
    for found in corners:
        assert "different numbers of times in a step; call it equally often" in found["unequal"]


@pytest.mark.parametrize("mode", MODES)
def test_torchs_update_bn_measures_the_layers_anew(mode: Literal["sync", "aggregate"]) -> None:
    theirs = nn.Sequential(nn.BatchNorm2d(2))
    ours = batchnorm.convert(copy.deepcopy(theirs), mode)
    views = [factor * batch(Case((6,)), 0)[0].float() for factor in (1, -3, 2)]
    for model in (ours, theirs):
        update_bn(views, model)
    batchnorm.update_running_statistics(ours.modules())
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())


def test_each_of_several_calls_before_an_update_counts(corners: list[dict[str, Any]]) -> None:
    for found in corners:
        at_once, one_by_one = found["twice"]
        assert at_once["1.num_batches_tracked"] == 4
        torch.testing.assert_close(at_once, one_by_one, rtol=0, atol=0)


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("mode", MODES)
def test_two_calls_in_a_step_count_as_in_torch(mode: Literal["sync", "aggregate"], momentum: float | None) -> None:
    theirs = nn.BatchNorm2d(2, momentum=momentum)
    ours = batchnorm.convert(copy.deepcopy(theirs), mode)
    images, _ = batch(Case((6,)), 0)
    for step in range(2):
        for view in (images.float() + step, images.float() * -3):
            torch.testing.assert_close(ours(view), theirs(view))
        batchnorm.update_running_statistics(ours.modules())
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())


@pytest.mark.parametrize("name", ["nothing used", "one value"])
@pytest.mark.parametrize("mode", MODES)
def test_a_batch_without_variance_does_not_change_the_running_statistics(
    corners: list[dict[str, Any]], mode: str, name: str
) -> None:
    for found in corners:
        output, gradient, state = found[f"{mode}, {name}"]
        assert output.isfinite().all() and gradient.isfinite().all()
        assert state["running_mean"].tolist() == [0, 0] and state["running_var"].tolist() == [1, 1]
        assert state["num_batches_tracked"] == 0  # With momentum None, this is the weight of the next batch.


@pytest.mark.parametrize("mode", MODES)
def test_compiled_layers_compute_the_same(corners: list[dict[str, Any]], mode: Literal["sync", "aggregate"]) -> None:
    reference = network(Case(()))
    images, _ = batch(Case((6,)), 0)
    pieces = images.split(6 if mode == "sync" else 3)
    wanted = torch.cat([copy.deepcopy(reference)(piece) for piece in pieces])
    torch.testing.assert_close(torch.cat([found[f"{mode}, compiled"][0] for found in corners]), wanted)
    reference[:2](images)  # type: ignore[index]
    for found in corners:
        state = found[f"{mode}, compiled"][1]
        torch.testing.assert_close(state["1.running_var"], reference.state_dict()["1.running_var"])


@pytest.mark.parametrize("mode", MODES)
def test_a_frozen_layer_keeps_and_uses_its_running_statistics(corners: list[dict[str, Any]], mode: str) -> None:
    for found in corners:
        output, images, state = found[f"{mode}, frozen"]
        torch.testing.assert_close(output, images / (1 + 1e-5) ** 0.5)
        assert state["num_batches_tracked"] == 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mixed_precision_keeps_the_statistics_in_float32(
    mode: Literal["sync", "aggregate"], dtype: torch.dtype
) -> None:
    images = (torch.randn(64, 3, 4, 4, generator=torch.Generator().manual_seed(0)) + 10).to(dtype)
    plain, ours = nn.BatchNorm2d(3), batchnorm.convert(nn.BatchNorm2d(3), mode)
    torch.testing.assert_close(ours(images), plain(images))
    batchnorm.update_running_statistics(ours.modules())
    torch.testing.assert_close(ours.state_dict(), plain.state_dict())
    assert ours.state_dict()["running_mean"].dtype == torch.float32


def run_mixed_precision(dtype: torch.dtype) -> tuple[Tensor, Tensor | None, Tensor]:
    """The output of a layer of this type for bfloat16 images, their gradient, and the running means."""
    layer = batchnorm.convert(nn.BatchNorm2d(3).to(dtype), "sync")
    images, weights = mixed_batch()
    own = images.chunk(2)[dist.get_rank()].requires_grad_()
    output = layer(own)
    (output * weights.chunk(2)[dist.get_rank()]).sum().backward()
    return output.detach(), own.grad, layer.state_dict()["running_mean"]


def mixed_batch() -> tuple[Tensor, Tensor]:
    images, weights = torch.randn(2, 8, 3, 4, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    return images + 10, weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mixed_precision_between_ranks_is_as_exact_as_bfloat16(
    corners: list[dict[str, Any]], dtype: torch.dtype
) -> None:
    images, weights = mixed_batch()
    images.requires_grad_()
    layer = nn.BatchNorm2d(3)
    output = layer(images)
    (output * weights).sum().backward()
    outputs, gradients, running_means = zip(*(found["mixed"][dtype] for found in corners), strict=True)
    torch.testing.assert_close(running_means, (layer.state_dict()["running_mean"].to(dtype),) * 2)
    torch.testing.assert_close(torch.cat(outputs), output)
    torch.testing.assert_close(torch.cat(gradients), images.grad, rtol=0.05, atol=0.05)


def test_a_wrong_shape_is_refused_as_by_torchs_layer() -> None:
    with pytest.raises(ValueError, match="expected 4D input"):
        batchnorm.convert(nn.BatchNorm2d(2), "aggregate")(torch.randn(3, 2))


def test_a_compiled_placeholder_takes_part_in_the_sums_of_the_backward() -> None:
    """One process compiles as if there were another, and looks at the graph: a real one would wait for ever."""
    from torch._dynamo.backends.common import aot_autograd
    from torch.testing._internal.distributed.fake_pg import FakeStore

    graphs: list[str] = []

    def keep(graph: Any, _: object) -> Any:
        graphs.append(graph.code)
        return graph.forward

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        model = batchnorm.convert(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), "sync")
        batchnorm.set_num_used(model.modules(), 0, weight=0)
        compiled = torch.compile(
            model, backend=aot_autograd(fw_compiler=lambda graph, _: graph.forward, bw_compiler=keep)
        )
        compiled(torch.ones(1, 3, 6, 6)).sum().backward()
    finally:
        dist.destroy_process_group()
    assert "all_reduce" in graphs[0]
