"""What --precision auto stands for, how GPUs multiply, and the warning of a precision that the device lacks."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Collection
from pathlib import Path

import pytest
import torch
from torch import nn

from raytrain.launch import placement as fastest
from raytrain.launch.gpus import Gpu
from raytrain.launch.prepare import prepare, settle_options
from raytrain.launch.ray import nodes
from raytrain.launch.ray.nodes import ClusterNode, NodeResult
from raytrain.recipes import custom
from raytrain.runs.documents import run_store, write_config
from raytrain.training.networks import device_precision
from raytrain.training.networks.mixed_precision import mixed_precision, prepare_for_autocast
from tests.helpers import fake_nvml
from tests.helpers.memory_runs import Recorder, config, images, make_run
from tests.helpers.small_runs import make_images

FLAGS = {
    "AMX": {"avx512f", "amx_bf16"},
    "AVX512-BF16": {"avx512f", "avx512_bf16"},
    "AVX-512 without bfloat16": {"avx2", "avx512f"},
    "no x86": set[str](),
}
EXPECTED = {"AMX": "bfloat16", "AVX512-BF16": "bfloat16", "AVX-512 without bfloat16": "float32", "no x86": "float32"}


def have(monkeypatch: pytest.MonkeyPatch, flags: set[str]) -> None:
    """Fake the CPU of this machine."""
    for module in (device_precision, fastest):
        monkeypatch.setattr(module, "cpu_flags", lambda: frozenset(flags))


@pytest.mark.parametrize("cpu", FLAGS)
def test_a_cpu_trains_with_bfloat16_only_if_it_has_it(cpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, FLAGS[cpu])
    assert fastest.fastest_precision("cpu") == EXPECTED[cpu]


@pytest.mark.parametrize(
    ("capabilities", "expected"), [(["9.0", "8.0"], "bfloat16"), (["12.1"], "bfloat16"), (["9.0", "7.5"], "float32")]
)
def test_gpus_train_with_bfloat16_only_if_all_of_them_have_it(
    capabilities: list[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_nvml.install(monkeypatch, [Gpu("GPU", 1, "1", capability) for capability in capabilities])
    assert fastest.fastest_precision("cuda") == expected


def test_the_flags_of_a_cpu_are_those_that_linux_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_precision, "CPU_INFO", tmp_path / "cpuinfo")
    assert device_precision.cpu_flags() == frozenset()
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nflags\t\t: fpu avx512_bf16\nbugs\t\t: x\n\nprocessor\t: 1\n")
    assert device_precision.cpu_flags() == {"fpu", "avx512_bf16"}
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nFeatures\t: fp asimd\n")
    assert device_precision.cpu_flags() == frozenset()


@pytest.mark.parametrize(
    ("found", "common"),
    [
        (["bfloat16", "bfloat16"], "bfloat16"),
        (["bfloat16", "float32"], "float32"),
        (["bfloat16", None], "float32"),
        ([], "float32"),
    ],
)
def test_all_workers_train_with_what_all_of_their_machines_have(
    found: list[str | None], common: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = ClusterNode("", "", cpus=1.0, gpus=0.0, memory_bytes=0, object_store_bytes=0)
    monkeypatch.setattr(nodes, "run_on_each_node", lambda *_: [NodeResult(node, each) for each in found])
    assert nodes.fastest_on_nodes("cpu") == common


@pytest.mark.not_quick
def test_a_run_holds_the_precision_that_was_decided_and_a_resume_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "images").mkdir()
    options = {"data": str(make_images(tmp_path / "images")), "storage": str(tmp_path), "name": "run"}
    wanted = custom(**options, batch_size=8, learning_rate=0.1)
    have(monkeypatch, FLAGS["AMX"])
    with prepare(settle_options(wanted)) as prepared:
        started = prepared.resolve(1, "cpu")
        assert prepared.resolve(1, "cpu", lambda device: "float32").precision == "float32"
        chosen = dataclasses.replace(prepared, config=dataclasses.replace(wanted, precision="float64"))
        assert chosen.resolve(1, "cpu").precision == "float64"
    assert started.precision == "bfloat16"
    write_config(run_store(str(tmp_path), "run"), started)
    have(monkeypatch, FLAGS["AVX-512 without bfloat16"])
    with prepare(settle_options(dataclasses.replace(wanted, resume=True))) as prepared:
        assert prepared.resolve(1, "cpu").precision == "bfloat16"
    with prepare(settle_options(dataclasses.replace(wanted, resume=True, precision="float32"))) as prepared:
        assert prepared.resolve(1, "cpu").precision == "float32"


@pytest.mark.parametrize(
    ("name", "device", "cpu", "slowdown", "warns"),
    [
        ("bfloat16", "cpu", "AVX-512 without bfloat16", 14.2, True),
        ("float16", "cpu", "AMX", 14.2, True),
        ("bfloat16", "cpu", "AMX", 14.2, False),
        ("bfloat16", "cpu", "no x86", 0.8, False),  # whatever this is, it is fast
        ("float16", "cuda", "AVX-512 without bfloat16", 14.2, False),
        ("float32", "cpu", "AVX-512 without bfloat16", 14.2, False),
    ],
)
def test_an_emulated_precision_is_told_with_what_it_costs(
    name: str, device: str, cpu: str, slowdown: float, warns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    have(monkeypatch, FLAGS[cpu])
    monkeypatch.setattr(device_precision, "measure_slowdown", lambda precision: slowdown)
    warning = device_precision.precision_warning(name, torch.device(device))
    assert (warning is not None) == warns
    if warning:
        assert warning.startswith(f"this CPU emulates {name}: a convolution takes 14.2 times as long as in float32")


def test_a_run_tells_it_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, FLAGS["AVX-512 without bfloat16"])
    monkeypatch.setattr(device_precision, "measure_slowdown", lambda precision: 14.2)
    recorder = Recorder()
    run = make_run(config(precision="bfloat16"), images(32), str(tmp_path), recorder)
    epochs = run.epochs()
    with torch.autocast(run.device.type, enabled=False):  # a step that is left in its middle leaves autocast on
        next(iter(next(epochs)))
    assert ["emulates bfloat16" in str(event) for event in recorder.events] == [True]
    assert not recorder.started_after


@pytest.mark.parametrize(("name", "rounded"), [("float32", False), ("tf32", True), ("bfloat16", True)])
def test_gpus_compute_products_in_float32_only_if_that_is_asked_for(name: str, rounded: bool) -> None:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    device_precision.set_gpu_products(name)
    after = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
    assert after == (rounded, rounded)


@pytest.mark.parametrize(
    ("device", "capability", "lacks"),
    [("cuda", (8, 9), set()), ("cuda", (7, 5), {"tf32", "bfloat16"}), ("cpu", None, {"tf32"})],
)
def test_a_precision_that_a_device_lacks_is_told(
    device: str, capability: tuple[int, int], lacks: Collection[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    have(monkeypatch, FLAGS["AMX"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    sentences = {name: device_precision.precision_warning(name, torch.device(device)) for name in ("tf32", "bfloat16")}
    assert {name for name, sentence in sentences.items() if sentence} == set(lacks)
    assert all(f"only NVIDIA GPUs since Ampere have {name}: this " in (sentences[name] or "") for name in lacks)


def test_the_cost_is_measured_and_draws_no_random_numbers() -> None:
    before = torch.get_rng_state()
    assert device_precision.measure_slowdown("bfloat16") > 0
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(("size", "stride"), [((1, 1), 2), ((5, 2), 3), ((4, 4), 2)])
def test_gradients_of_strided_convolutions_of_small_maps_are_right_in_bfloat16(
    size: tuple[int, int], stride: int
) -> None:
    torch.manual_seed(0)
    exact = nn.Sequential(nn.Conv2d(16, 32, 3, stride, padding=1))
    mixed = copy.deepcopy(exact)
    prepare_for_autocast(mixed, "bfloat16")
    features = torch.randn(4, 16, *size)
    exact(features).square().sum().backward()
    with mixed_precision("bfloat16", features.device):
        loss = mixed(features).square().sum()
    torch.full((200_000,), float("nan"))  # what torch's kernel leaves out has the content of freed memory
    loss.backward()
    for ours, theirs in zip(mixed.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0.05, atol=0.5)
