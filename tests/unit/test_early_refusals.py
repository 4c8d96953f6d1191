"""What is refused before torch is imported and before a cluster starts."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import raytrain
from raytrain.display import train as display_train
from raytrain.errors import UsageError
from raytrain.launch.option_checks import check_options, hardly_meant
from raytrain.launch.placement import Hardware, place
from raytrain.launch.prepare import settle_options
from raytrain.recipes import cifar10_fast, custom, digits
from raytrain.runs.documents import CONFIG, STATUS, run_store, write_config, write_json
from raytrain.runs.ownership import machine_id
from raytrain.runs.status import RunStatus, write_status
from raytrain.training.model_names import check_model_name
from tests.helpers.small_runs import config as small_config

REFUSED = """
import sys
import raytrain
for options in {options}:
    try:
        raytrain.train(raytrain.recipes.custom(storage={storage!r}, **{{"data": "images", **options}}))
    except (raytrain.UsageError, raytrain.StorageError) as error:
        print(error)
assert not {{"torch", "torchvision", "ray"}} & sys.modules.keys()
"""


def refusals(tmp_path: Path, *options: dict[str, object]) -> list[str]:
    code = REFUSED.format(options=options, storage=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.not_quick
def test_what_does_not_exist_is_refused_without_torch_and_without_a_cluster(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.json").touch()
    (tmp_path / "notes.txt").touch()
    (tmp_path / "loop.py").touch()
    sentences = refusals(
        tmp_path,
        {"model": "resnet19"},
        {"model": "timm:resnet10x"},
        {"model": "no_such_package.nets:net"},
        {"loop": "no_such_file.py:train"},
        {"loop": "my_loop.py"},
        {"loop": "my_loop.py::train"},
        {"loop": f"{tmp_path}/notes.txt:train"},
        {"loop": f"{tmp_path}/loop:train"},
        {"loop": "json.trian:train"},
        {"transforms": "random-crop"},
        {"weights": "no-such-file.pt"},
        {"weights": str(tmp_path / "old")},
        {"weights": str(tmp_path / "notes.txt")},
        {"until": "accuracy=95"},
        {"compile": "reduce-overhead", "device": "cpu"},
        {"gradient_dtype": "bfloat16", "precision": "float64"},
        {"workers": 10_000, "device": "cpu", "address": "local", "data": "."},
        {"workers": 10_000, "device": "cpu", "backend": "local", "data": "."},
        {"address": "local"},
        {"address": "local", "name": "old"},
    )
    begins = [
        "--model resnet19 is no classifier",
        "--model timm:resnet10x is no network of timm (did you mean resnet10t",
        "--model no_such_package.nets:net: there is no module",
        "--loop: there",
        "--loop my_loop.py names no function",
        "--loop my_loop.py::train names no function",
        f"--loop {tmp_path}/notes.txt:train: {tmp_path}/notes.txt is no file of Python",
        f"--loop {tmp_path}/loop:train names no function; write {tmp_path}/loop.py:train",
        "--loop json.trian:train: there is no module json.trian",
        "--transforms random-crop names no function",
    ]
    begins += [
        "--weights no-such-file.pt: there is no such file",
        f"--weights {tmp_path / 'old'}: that is a folder; give DEFAULT, a file",
        f"--weights {tmp_path / 'notes.txt'} holds no state_dict",
        "--until is accuracy=95, which no evaluation",
        "--compile is reduce-overhead, which records CUDA",
    ]
    begins += ["--gradient-dtype is bfloat16, which keeps 8 of the 53", "--workers is 10000", "--workers is 10000"]
    begins += ["There is no folder", "A run called 'old' is in"]
    assert all(sentence.startswith(begin) for sentence, begin in zip(sentences, begins, strict=True)), sentences


def test_every_classifier_of_torchvision_is_known() -> None:
    from torchvision import models

    for name in models.list_models(module=models):
        check_model_name(name)


def test_every_network_of_timm_is_known() -> None:
    import timm

    for name in timm.list_models():
        check_model_name(f"timm:{name}")
    check_model_name("timm:resnet10t.c3_in1k")


@pytest.mark.not_quick
def test_names_of_networks_are_known_whatever_the_encoding_of_the_locale_is() -> None:
    script = "from raytrain.training.model_names import check_model_name as check; check('timm:resnet10t')"
    ascii_only = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", script], env=ascii_only, check=True)


def test_without_timm_a_sentence_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"timm:resnet10t needs timm, .* install raytrain\[timm\]"):
        check_model_name("timm:resnet10t")


def test_a_run_that_cannot_start_is_refused_before_a_notebook_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def shown(**_: object) -> None:
        raise AssertionError("a widget is shown")

    # Where they are used: a module that is first imported here would otherwise keep what stands in for them.
    monkeypatch.setattr(display_train, "is_notebook", lambda: True)
    monkeypatch.setattr(display_train, "NotebookView", shown)
    for options, sentence in (({}, "--data is missing"), ({"data": "images", "model": "resnet19"}, "--model resnet19")):
        with pytest.raises(UsageError, match=sentence):
            raytrain.start(custom(**options))


def test_workers_may_share_the_cores_of_one_machine_but_not_of_a_cluster_or_gpus() -> None:
    laptop = Hardware(num_nodes=1, cpus=2.0, gpus=0.0, object_store_bytes=10**9)
    shared = place(digits(workers=3), laptop)
    assert (shared.num_workers, shared.min_workers, shared.threads) == (3, 3, 1)
    assert 3 * (shared.cpus + shared.data_cpus) <= 2
    for found in (Hardware(2, 2.0, 0.0, 10**9), Hardware(1, 2.0, 2.0, 10**9)):
        with pytest.raises(UsageError, match="ask for at most 2"):
            place(custom(workers=3), found)
    with pytest.raises(UsageError, match="ask for at most 8"):
        place(digits(workers=9), laptop)


def test_a_run_that_ended_before_its_first_step_frees_its_name(
    images: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = small_config(images, tmp_path / "runs", name="first")
    store = run_store(config.storage, "first")
    write_config(store, config)
    for status in (RunStatus(status="failed", step=3), RunStatus(status="finished"), RunStatus(status="running")):
        write_status(store, status)
        with pytest.raises(UsageError, match=r"A run called 'first' is in .* already; resume it"):
            settle_options(config)
    for status in ("failed", "stopped", "interrupted"):
        write_config(store, config)
        write_status(store, RunStatus(status=status))
        assert settle_options(config).name == "first" and not store.exists(CONFIG) and not list(store.list())
    write_config(store, config)
    write_json(store, STATUS, {"status": "running", "pid": 0, "machine": machine_id(), "host": socket.gethostname()})
    assert settle_options(config).name == "first" and not store.exists(CONFIG)  # its process was killed
    assert "Run 'first' has ended before its first step; a new one takes its place." in caplog.text


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"warmup_epochs": 5, "epochs": 3}, "--warmup-epochs is 5 and --epochs 3: the learning rate would never be"),
        ({"warmup_epochs": 2.5, "epochs": 3, "head_epochs": 1}, "of which --head-epochs takes 1: .* has at most 2"),
        ({"warmup_epochs": 2, "epochs": 1, "loop": "my_loop.py:train"}, "--warmup-epochs is 2 and --epochs 1"),
    ],
)
def test_a_warmup_that_is_longer_than_the_run_is_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        check_options(custom(data="images", batch_size=8, learning_rate=0.1, **options))


def test_a_warmup_as_long_as_the_run_and_that_of_a_recipe_are_taken() -> None:
    check_options(custom(data="images", batch_size=8, learning_rate=0.1, warmup_epochs=3, epochs=3))
    check_options(cifar10_fast(data="images", epochs=2))
    assert hardly_meant(cifar10_fast(epochs=2))[0].startswith("--warmup-epochs is 3.7 and --epochs 2: the learning")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"patience": 3}, "--patience is 3, and the run is evaluated 3 times (--epochs 3, --evaluate-every 1)"),
        ({"patience": 2, "evaluate_every": 2}, "--patience is 2, and the run is evaluated 2 times"),
        ({"evaluate_every": 4}, "--evaluate-every is 4 and --epochs 3: the run is evaluated at its end alone."),
        ({"checkpoint_every": ("5ep", "10m")}, "--checkpoint-every is 5ep 10m and --epochs 3: no epoch but the last"),
        ({"schedule": "piecewise:0.1/3ep"}, "--schedule is piecewise:0.1/3ep and --epochs 3: the learning rate never"),
        ({"freeze": ("all",)}, "--freeze without --weights: the layers that are held keep random weights; give"),
        ({"freeze": ("conv1",), "head_epochs": 1}, "--freeze and --head-epochs without --weights: the layers"),
        ({"sampling": "balanced", "class_weights": "balanced"}, "--sampling balanced and --class-weights balanced:"),
    ],
)
def test_what_is_allowed_and_hardly_meant_is_said(options: dict[str, Any], sentence: str) -> None:
    (said,) = hardly_meant(custom(batch_size=8, epochs=3, **options))
    assert said.startswith(sentence)


def test_nothing_is_said_of_lengths_that_fit() -> None:
    fitting = {"patience": 2, "evaluate_every": 1, "checkpoint_every": ("3ep",), "schedule": "piecewise:0.1/2ep"}
    assert hardly_meant(custom(batch_size=8, epochs=3, warmup_epochs=1, **fitting)) == []
    assert hardly_meant(custom(batch_size=8, epochs=1, evaluate_every=0)) == []
    for weights in ({"weights": "DEFAULT"}, {"model": "net.py:pretrained"}):
        assert hardly_meant(custom(batch_size=8, epochs=2, freeze=("all",), head_epochs=1, **weights)) == []
