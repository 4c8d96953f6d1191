"""Transfer learning: which head is found, which weights are loaded or refused, what stays frozen, on any workers."""

from __future__ import annotations

import dataclasses
import pickle
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from huggingface_hub.errors import EntryNotFoundError
from torch import Tensor, nn

from raytrain.cli.main import main
from raytrain.config import TrainConfig
from raytrain.errors import StorageError, UsageError
from raytrain.launch.prepare import prepare, settle_options
from raytrain.recipes import custom
from raytrain.runs.documents import read_config, run_store
from raytrain.runs.outcome import Progress
from raytrain.runs.stored_checkpoints import Identity, newest_checkpoint
from raytrain.storage.open import open_store
from raytrain.training.checkpoint import Checkpoint, Checkpoints, read_checkpoint
from raytrain.training.exact.batchnorm import FrozenBatchNorm
from raytrain.training.networks.model import build_model
from raytrain.training.networks.transfer import find_heads, freeze, initial_model, initial_weights, notes_on_weights
from raytrain.training.optimisation import learning_rate_factor, parameter_groups
from raytrain.training.weights_source import check_weights_source, to_safetensors
from tests.helpers import stored_runs
from tests.helpers.folder_runs import folder_run, train_here
from tests.helpers.gloo_processes import run_in_processes
from tests.helpers.memory_runs import Recorder, config, images, make_run, plain_batches, trained, weights_of

HEADS = {
    "alexnet": "classifier.6",
    "convnext_tiny": "classifier.2",
    "densenet121": "classifier",
    "efficientnet_b0": "classifier.1",
    "googlenet": "fc",
    "inception_v3": "fc",
    "maxvit_t": "classifier.5",
    "mnasnet0_5": "classifier.1",
    "mobilenet_v2": "classifier.1",
    "mobilenet_v3_small": "classifier.3",
    "regnet_y_400mf": "fc",
    "resnet18": "fc",
    "shufflenet_v2_x0_5": "fc",
    "squeezenet1_1": "classifier.1",
    "swin_t": "head",
    "vgg11": "classifier.6",
    "vit_b_16": "heads.head",
}


@pytest.mark.parametrize("name", HEADS)
def test_the_head_of_every_family_is_found(name: str) -> None:
    # The meta device needs no memory for weights; regnet cannot use it because it computes its widths with tensors.
    with torch.device("cpu" if name.startswith("regnet") else "meta"):
        model = build_model(name, 7, 3, seed=0)
    assert find_heads(model, 7) == [HEADS[name]]


def test_no_head_is_found_in_a_network_without_one() -> None:
    assert find_heads(nn.Sequential(nn.Linear(3, 7), nn.ReLU()), 5) == []


# Loading weights.


def options(**values: Any) -> TrainConfig:
    return TrainConfig(**{"model": "squeezenet1_1", "batch_size": 4, "learning_rate": 0.1, **values})


def save(state: Any, path: Path) -> str:
    torch.save(state, path)
    return str(path)


def loaded(settings: TrainConfig, num_classes: int) -> dict[str, Tensor]:
    return initial_model(
        settings, num_classes, initial_weights(settings, [str(number) for number in range(num_classes)], first_step=0)
    ).state_dict()


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def of_head(state: dict[str, Tensor], *, inside: bool = True) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if name.startswith("classifier.") == inside}


def save_safetensors(state: dict[str, Tensor], path: Path, classes: Sequence[str]) -> str:
    path.write_bytes(to_safetensors(state, classes))
    return str(path)


@pytest.mark.parametrize("classes", [("0", "1", "2"), ("0", "1", "other")])
def test_safetensors_hold_weights_and_classes(tmp_path: Path, classes: tuple[str, ...]) -> None:
    before = build_model("squeezenet1_1", 3, 3, seed=1).state_dict()
    state = loaded(options(weights=save_safetensors(before, tmp_path / "weights.safetensors", classes)), 3)
    fresh = build_model("squeezenet1_1", 3, 3, seed=0).state_dict()
    assert_equal(of_head(state, inside=False), of_head(before, inside=False))
    assert_equal(of_head(state), of_head(fresh if "other" in classes else before))


SORTED = ("0", "1", "10", "2")  # as the names of folders are


@pytest.mark.parametrize(
    ("beside", "is_kept"),
    [
        ({"classes": list(SORTED)}, True),
        ({"classes": ["0", "1", "2", "10"]}, False),
        ({"class_to_idx": {"2": 3, "10": 2, "1": 1, "0": 0}}, True),
        ({"class_to_idx": {"0": 0, "1": 1, "2": 2, "10": 3}}, False),
        ({"class_names": ("0", "1", "2", "10")}, False),
    ],
)
def test_a_head_is_kept_only_if_its_classes_are_in_the_same_order(
    beside: dict[str, Any], is_kept: bool, tmp_path: Path
) -> None:
    before = build_model("squeezenet1_1", 4, 3, seed=1).state_dict()
    settings = options(weights=save({"state_dict": before, **beside}, tmp_path / "weights.pt"))
    weights = initial_weights(settings, SORTED, first_step=0)
    fresh = build_model("squeezenet1_1", 4, 3, seed=0).state_dict()
    state = initial_model(settings, 4, weights).state_dict()
    assert_equal(of_head(state), of_head(before if is_kept else fresh))
    assert_equal(of_head(state, inside=False), of_head(before, inside=False))
    assert notes_on_weights(settings, SORTED, weights) == []


def test_a_note_says_in_which_order_the_outputs_of_a_head_without_names_are_taken(tmp_path: Path) -> None:
    before = build_model("squeezenet1_1", 4, 3, seed=1).state_dict()
    settings = options(weights=save(before, tmp_path / "weights.pt"))
    weights = initial_weights(settings, SORTED, first_step=0)
    (note,) = notes_on_weights(settings, SORTED, pickle.loads(pickle.dumps(weights)))  # as Ray sends them to workers
    assert "the outputs are taken in this order: 0, 1, 10, 2. If" in note
    assert notes_on_weights(settings, SORTED, None) == []
    # A new head needs no note.
    assert notes_on_weights(settings, SORTED[:3], initial_weights(settings, SORTED[:3], first_step=0)) == []


def test_a_run_says_that_it_keeps_a_head_without_names(images: Path, tmp_path: Path) -> None:
    network = "tests.helpers.memory_runs:network"
    weights = save(build_model(network, 3, 3, seed=1).state_dict(), tmp_path / "weights.pt")
    run = folder_run(images, tmp_path, "run", weights=weights, epochs=1)
    notes = [event for event in train_here(run)[1].events if "the head is kept" in str(event)]
    assert len(notes) == 1 and "in this order: blue, green, red." in str(notes[0])


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}, {"classes": "[" * 100_000}, {"classes": "[1]"}])
def test_safetensors_of_others_may_lack_classes(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    before = build_model("squeezenet1_1", 3, 3, seed=1).state_dict()
    safetensors.torch.save_file(before, tmp_path / "weights.safetensors", metadata)
    assert_equal(loaded(options(weights=str(tmp_path / "weights.safetensors")), 3), before)


@pytest.mark.parametrize("change", [lambda data: b"", lambda data: data[:100], lambda data: b"\xff" * 8 + data[8:]])
def test_damaged_safetensors_are_refused(tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
    data = to_safetensors({"weight": torch.zeros(100)}, ())
    (tmp_path / "broken.safetensors").write_bytes(change(data))
    with pytest.raises(UsageError, match=r"broken\.safetensors holds no state_dict"):
        initial_weights(options(weights=str(tmp_path / "broken.safetensors")), (), first_step=0)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "other/weights.pt"])
def test_weights_can_be_loaded_from_hugging_face(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = build_model("squeezenet1_1", 5, 3, seed=1).state_dict()
    files = {name: tmp_path / name}
    files[name].parent.mkdir(exist_ok=True)
    (safetensors.torch.save_file if name.endswith("safetensors") else save)(before, files[name])

    def download(repository: str, wanted: str) -> str:
        assert repository == "owner/net.v1"
        if wanted not in files:
            raise EntryNotFoundError(wanted)
        return str(files[wanted])

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    place = "hf://owner/net.v1" + (f"/{name}" if "/" in name else "")
    assert_equal(loaded(options(weights=place), 5), before)
    with pytest.raises(StorageError, match=r"hf://owner/net\.v1/none\.pt cannot be downloaded \(none\.pt\)"):
        initial_weights(options(weights="hf://owner/net.v1/none.pt"), (), first_step=0)


def test_hugging_face_out_of_reach_is_told_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(StorageError, match=r"--weights hf://owner/net cannot be downloaded .*check the name"):
        initial_weights(options(weights="hf://owner/net"), (), first_step=0)


@pytest.mark.parametrize("place", ["hf://owner", "hf://user:secret@owner/net", "hf://owner/net?token=secret", "hf://"])
def test_other_names_of_hugging_face_are_refused_before_a_run_starts(place: str) -> None:
    with pytest.raises(UsageError, match="write hf://owner/name or hf://owner/name/file") as refused:
        check_weights_source(place)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("num_classes", [5, 7])
def test_all_weights_are_loaded_except_a_head_of_another_shape(tmp_path: Path, num_classes: int) -> None:
    before = build_model("squeezenet1_1", 5, 3, seed=1).state_dict()
    state = loaded(options(weights=save(before, tmp_path / "weights.pt")), num_classes)
    fresh = build_model("squeezenet1_1", num_classes, 3, seed=0).state_dict()
    assert_equal(of_head(state, inside=False), of_head(before, inside=False))
    assert_equal(of_head(state), of_head(before if num_classes == 5 else fresh))


@pytest.mark.parametrize("classes", [("0", "1", "2"), ("0", "1", "other")])
def test_the_head_of_a_run_is_kept_only_for_the_same_classes(tmp_path: Path, classes: tuple[str, ...]) -> None:
    before = build_model("squeezenet1_1", 3, 3, seed=1).state_dict()
    checkpoints = Checkpoints(open_store(str(tmp_path)), Identity("squeezenet1_1", classes, "", 4, 0), 1)
    checkpoints.save({"model": before}, Progress())
    checkpoints.close()
    state = loaded(options(weights=str(next(tmp_path.rglob("*.pt")))), 3)
    fresh = build_model("squeezenet1_1", 3, 3, seed=0).state_dict()
    assert_equal(of_head(state, inside=False), of_head(before, inside=False))
    assert_equal(of_head(state), of_head(fresh if "other" in classes else before))


def test_weights_may_lack_the_head(tmp_path: Path) -> None:
    before = of_head(build_model("squeezenet1_1", 5, 3, seed=1).state_dict(), inside=False)
    state = loaded(options(weights=save(before, tmp_path / "weights.pt")), 5)
    assert_equal(of_head(state, inside=False), before)


def test_weights_can_be_loaded_from_s3(s3_url: str, tmp_path: Path) -> None:
    before = build_model("squeezenet1_1", 5, 3, seed=1).state_dict()
    save(before, tmp_path / "weights.pt")
    open_store(s3_url).put("all/weights.pt", (tmp_path / "weights.pt").read_bytes())
    assert_equal(loaded(options(weights=f"{s3_url}/all/weights.pt"), 5), before)


def test_default_weights_are_those_of_torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision.models import SqueezeNet1_1_Weights

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    kept = tmp_path / "hub" / "checkpoints"
    kept.mkdir(parents=True)
    before = build_model("squeezenet1_1", 1000, 3, seed=1).state_dict()
    save(before, kept / SqueezeNet1_1_Weights.DEFAULT.url.rpartition("/")[2])
    state = loaded(options(weights="DEFAULT"), 7)
    assert_equal(of_head(state, inside=False), of_head(before, inside=False))
    assert_equal(of_head(state), of_head(build_model("squeezenet1_1", 7, 3, seed=0).state_dict()))


def test_a_failed_download_of_default_weights_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # A port on which nothing listens.
    with pytest.raises(StorageError, match=r"squeezenet1_1 cannot be downloaded .*give --weights FILE"):
        initial_weights(options(weights="DEFAULT"), (), first_step=0)


class Code:
    """An object that creates a file when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return Path.touch, (self.trace,)


@pytest.mark.parametrize("num_bytes", [0, 100])
def test_a_file_without_weights_is_refused(tmp_path: Path, num_bytes: int) -> None:
    whole = tmp_path / "whole.pt"
    save({"weight": torch.zeros(100)}, whole)
    (tmp_path / "broken.pt").write_bytes(whole.read_bytes()[:num_bytes])
    with pytest.raises(UsageError, match=r"broken\.pt (holds no state_dict|is not read, .* damaged archive)"):
        initial_weights(options(weights=str(tmp_path / "broken.pt")), (), first_step=0)


def test_code_in_weights_is_not_run(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    place = save({"conv1.weight": torch.zeros(1), "code": Code(trace)}, tmp_path / "weights.pt")
    with pytest.raises(UsageError, match="was saved with code in it, which is never run"):
        initial_weights(options(weights=place), (), first_step=0)
    assert not trace.exists()
    torch.load(place, weights_only=False)
    assert trace.exists()  # The file does contain code.


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda state: state.pop("features.0.bias"), r"they have no features\.0\.bias \(64\);"),
        (lambda state: state.update({"more": torch.zeros(1)}), r"they have more \(1\), which the network lacks"),
        (
            lambda state: [state.pop(name) for name in list(state)[:5]],
            r"they have no features\.0\.weight \(64×3×3×3\), features\.0\.bias \(64\), .* and 2 more;",
        ),
        (
            lambda state: state.update({f"features.{each}": torch.zeros(2) for each in ("0.weight", "0.bias")}),
            r"their features\.0\.weight is 2, .* network's is 64×3×3×3; the shapes of features\.0\.bias differ, too;",
        ),
        (
            lambda state: state.update({"features.0.weight": torch.zeros(2, 3)}),
            r"their features\.0\.weight is 2×3, .* is 64×3×3×3",
        ),
    ],
)
def test_weights_of_another_network_are_refused(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], Any], sentence: str
) -> None:
    state = build_model("squeezenet1_1", 5, 3, seed=1).state_dict()
    change(state)
    with pytest.raises(UsageError, match=f"do not fit --model squeezenet1_1: {sentence}"):
        loaded(options(weights=save(state, tmp_path / "weights.pt")), 5)


def test_missing_weights_are_reported() -> None:
    with pytest.raises(UsageError, match=r"--weights nowhere\.pt: there is no such file"):
        initial_weights(options(weights="nowhere.pt"), (), first_step=0)
    with pytest.raises(UsageError, match="--weights DEFAULT are torchvision's or timm's"):
        initial_weights(options(weights="DEFAULT", model="raytrain.models:digits"), (), first_step=0)


# Frozen layers, and the learning rate of the head.


def small() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 6 * 6, 5))


def test_frozen_layers_stay_in_eval_mode() -> None:
    model = small()
    freeze(model, ["0", "1"], 5)
    model.train()
    before = {name: value.clone() for name, value in model[:2].state_dict().items()}  # type: ignore[index]
    model(torch.randn(8, 3, 8, 8) + 3).sum().backward()
    assert isinstance(model[1], FrozenBatchNorm) and not model[1].training and model[3].training  # type: ignore[index]
    assert_equal(model[:2].state_dict(), before)  # type: ignore[index]
    assert [name for name, parameter in model.named_parameters() if parameter.grad is not None] == [
        "3.weight",
        "3.bias",
    ]


@pytest.mark.parametrize("name", ["resnet18", "timm:test_efficientnet", "timm:levit_128s", "timm:test_vit"])
def test_only_the_head_learns_if_all_is_frozen(name: str) -> None:
    model = build_model(name, 5, 3, seed=0, image_size=(224, 224))
    heads = tuple(find_heads(model, 5))
    freeze(model, ["all"], 5)
    model.train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    F.cross_entropy(model(torch.randn(2, 3, 224, 224) + 3), torch.tensor([0, 1])).backward()
    learning = {key for key, parameter in model.named_parameters() if parameter.grad is not None}
    assert learning == {key for key, _ in model.named_parameters() if key.startswith(heads)} != set()
    after = {key: value for key, value in model.state_dict().items() if not key.startswith(heads)}
    assert_equal(after, {key: before[key] for key in after})
    with pytest.raises(UsageError, match="--freeze all leaves the head to train, and the network has no fully conn"):
        freeze(nn.Sequential(nn.Linear(3, 4)), ["all"], 5)


def test_unknown_layers_and_freezing_everything_are_refused() -> None:
    with pytest.raises(
        UsageError, match=r"--freeze laier1: the network has no such layer \(did you mean layer1.*conv1, bn1, relu"
    ):
        freeze(build_model("resnet18", 5, 3, 0), ["laier1"], 5)
    with pytest.raises(UsageError, match="leaves no layer to train"):
        freeze(small(), ["0", "1", "3"], 5)


def test_the_head_has_a_learning_rate_of_its_own() -> None:
    model, options = small(), config(learning_rate=0.5, head_learning_rate_factor=20.0)
    freeze(model, ["0"], 5)
    body, head = parameter_groups(options, model, 5)
    assert (len(body["params"]), body["lr"]) == (2, 0.5)
    assert (len(head["params"]), head["lr"]) == (2, 10)
    assert head["params"][0] is model[3].weight  # type: ignore[index]
    freeze(model, ["1"], 5)
    assert [group["lr"] for group in parameter_groups(options, model, 5)] == [10]
    with pytest.raises(UsageError, match="no fully connected layer or convolution with 9 outputs"):
        parameter_groups(options, model, 9)


TRANSFER = config(
    batch_size=7, head_learning_rate_factor=20.0, learning_rate=0.01, freeze=("0", "1"), weight_decay=0.01
)


def given_weights() -> dict[str, Tensor]:
    """Return weights of a network for other classes, with batch norm statistics."""
    from tests.helpers.reference_loop import small_net

    torch.manual_seed(3)
    model = small_net(nn.BatchNorm2d, num_classes=6).double()
    model(torch.randn(20, 3, 8, 8, dtype=torch.float64) + 1)
    return {name: value.float() if value.is_floating_point() else value for name, value in model.state_dict().items()}


def transferred(folder: str) -> dict[str, Tensor]:
    run = make_run(TRANSFER, images(70), folder, Recorder(), given_weights())
    trained(run)
    return {name.removeprefix("module."): value.clone() for name, value in weights_of(run).items()}


def transferred_alone(folder: str) -> dict[str, Tensor]:
    """Do the same as ``transferred`` in plain PyTorch."""
    run = make_run(TRANSFER, images(70), folder, Recorder())
    model = run.build_model().double()  # Its fresh head is used below.
    model.load_state_dict(
        {**given_weights(), **{name: value for name, value in model.state_dict().items() if name.startswith("9.")}}
    )
    learning = [p for name, p in model.named_parameters() if name.split(".")[0] not in ("0", "1", "9")]
    groups = [{"params": learning}, {"params": model.get_submodule("9").parameters(), "lr": 0.2}]
    optimizer = torch.optim.SGD(groups, lr=0.01, momentum=0.9, weight_decay=0.01)
    for [[(batch, labels)]] in plain_batches(run, images(70), (1.0,)):
        model.train()
        model.get_submodule("1").eval()
        optimizer.zero_grad()
        F.cross_entropy(model(batch), labels).backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("world_size", [1, 3])
def test_workers_compute_the_same_transfer_as_one_process(tmp_path: Path, world_size: int) -> None:
    with tempfile.TemporaryDirectory() as fresh:
        results = run_in_processes(world_size, transferred, fresh) if world_size > 1 else [transferred(fresh)]
    expected = transferred_alone(str(tmp_path))
    for result in results:
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-10)
    assert_equal(results[0]["1.running_mean"], given_weights()["1.running_mean"].double())  # type: ignore[arg-type]


HEAD_FIRST = config(
    batch_size=7, head_epochs=1, head_learning_rate_factor=5.0, learning_rate=0.01, schedule="cosine", warmup_epochs=0.5
)


def head_first(folder: str, batch_norm: str) -> dict[str, Tensor]:
    """Train a head alone for an epoch, and then all layers."""
    options = dataclasses.replace(HEAD_FIRST, batch_norm=batch_norm)
    run = make_run(options, images(70), folder, Recorder(), given_weights())
    trained(run)
    return {name.removeprefix("module."): value.clone() for name, value in weights_of(run).items()}


def head_first_alone(folder: str, batch_norm: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Do the same as ``head_first`` in plain PyTorch; return also the weights after the epoch of the head."""
    run = make_run(HEAD_FIRST, images(70), folder, Recorder())
    model = run.build_model()
    head = {name: 0.01 * value for name, value in model.state_dict().items() if name.startswith("9.")}
    model.load_state_dict({**given_weights(), **head})
    model.double()
    body = [parameter for name, parameter in model.named_parameters() if not name.startswith("9.")]
    groups = [{"params": body}, {"params": model.get_submodule("9").parameters(), "lr": 0.05}]
    optimizer = torch.optim.SGD(groups, lr=0.01, momentum=0.9)
    rates = [group["lr"] for group in optimizer.param_groups]
    plan, after_head = run.plan, dict[str, Tensor]()
    for step, [[(batch, labels)]] in enumerate(plain_batches(run, images(70), (1.0,))):
        is_head_alone = step < plan.steps_per_epoch
        for name, layer in model.named_modules():
            is_norm = isinstance(layer, nn.BatchNorm2d)
            layer.train(name == "9" or not (is_head_alone or (is_norm and batch_norm == "frozen")))
        model.requires_grad_(not is_head_alone).get_submodule("9").requires_grad_(True)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * learning_rate_factor(HEAD_FIRST, step, plan.steps_per_epoch, plan.num_steps)
        optimizer.zero_grad()
        F.cross_entropy(model(batch), labels).backward()
        optimizer.step()
        if step == plan.steps_per_epoch - 1:
            after_head = {name: value.clone() for name, value in model.state_dict().items()}
    return model.state_dict(), after_head


@pytest.mark.parametrize(("world_size", "batch_norm"), [(1, "frozen"), (1, "sync"), (3, "sync")])
def test_the_head_learns_alone_at_first(tmp_path: Path, world_size: int, batch_norm: str) -> None:
    with tempfile.TemporaryDirectory() as fresh:
        if world_size > 1:
            results = run_in_processes(world_size, head_first, fresh, batch_norm)
        else:
            results = [head_first(fresh, batch_norm)]
    expected, after_head = head_first_alone(str(tmp_path), batch_norm)
    for result in results:
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-10)
    body = [name for name in after_head if not name.startswith("9.")]
    assert all(torch.equal(after_head[name].double(), given_weights()[name].double()) for name in body)
    is_kept = torch.equal(expected["1.running_mean"], after_head["1.running_mean"])
    assert is_kept == (batch_norm == "frozen") and not torch.equal(expected["0.weight"], after_head["0.weight"])


# Whole runs on photographs.


def half(folder: Path, into: Path, wanted: slice) -> Path:
    """Link some of the class folders of ``folder`` in ``into``."""
    into.mkdir()
    for name in sorted(path.name for path in folder.iterdir())[wanted]:
        (into / name).symlink_to(folder / name)
    return into


def run_on(data: Path, storage: Path, name: str, *more: str, epochs: int = 1) -> Checkpoint:
    """Train in this process without Ray, and return the newest checkpoint."""
    words = [
        "custom",
        "--data",
        str(data),
        "--storage",
        str(storage),
        "--name",
        name,
        "--model",
        "resnet18",
        "--image-size",
        "32",
        "32",
    ]
    words += ["--backend", "local", "--workers", "1"]
    assert main(["train", *words, "--epochs", str(epochs), "--batch-size", "45", *more]) == 0
    store = run_store(str(storage), name)
    newest = newest_checkpoint(store)
    assert newest is not None
    return read_checkpoint(store, newest)


@pytest.mark.slow
def test_a_run_can_start_with_the_weights_of_another(cifar10_folder: Path, tmp_path: Path) -> None:
    first, second = (
        half(cifar10_folder / "train", tmp_path / name, part) for name, part in (("a", slice(4)), ("b", slice(4, 7)))
    )
    before = run_on(first, tmp_path, "first").state["model"]
    weights = tmp_path / "weights.pt"
    next((tmp_path / "first" / "checkpoints").glob("*.pt")).rename(weights)
    frozen = ("conv1", "bn1", "layer1")
    transfer = ["--weights", str(weights), "--freeze", *frozen, "--head-learning-rate-factor", "20"]
    checkpoint = run_on(second, tmp_path, "second", *transfer)
    after = checkpoint.state["model"]
    assert after["fc.weight"].shape == (3, 512)
    assert_equal(
        *({name: value for name, value in state.items() if name.startswith(frozen)} for state in (after, before))
    )
    assert not torch.equal(after["layer2.0.conv1.weight"], before["layer2.0.conv1.weight"])
    assert not torch.equal(after["layer2.0.bn1.running_mean"], before["layer2.0.bn1.running_mean"])
    assert [group["lr"] for group in checkpoint.state["optimizer"]["param_groups"]] == pytest.approx([0.01, 0.2])
    weights.unlink()  # A resumed run uses its own checkpoint.
    resumed = run_on(second, tmp_path, "second", "--resume", epochs=2)
    assert resumed.progress.step == 2 * checkpoint.progress.step


def test_a_run_cannot_be_resumed_with_other_frozen_layers(cifar10_folder: Path, tmp_path: Path) -> None:
    place = {"data": str(cifar10_folder / "test"), "storage": str(tmp_path), "name": "run"}
    started = custom(**place, model="resnet18", freeze=("conv1",), mean=(0.5,) * 3, std=(0.5,) * 3)
    settings = read_config(stored_runs.make_run(tmp_path, started, "run"))
    with pytest.raises(UsageError, match=r"--freeze is \('layer1',\), and the run was started with \('conv1',\)"):
        prepare(settle_options(dataclasses.replace(settings, resume=True, freeze=("layer1",))))
