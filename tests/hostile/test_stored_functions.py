"""The functions that a stored run names run only if this command names them too, or trusts the run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import raytrain
from raytrain.cli.main import main
from raytrain.errors import UsageError
from raytrain.experiments.sweep_options import SweepOptions
from raytrain.experiments.sweep_plan import plan_sweep
from raytrain.inference.predictor import Predictor
from raytrain.runs.documents import SWEEP, read_json, write_json
from raytrain.storage.store import Store
from raytrain.training.networks.model import build_model
from tests.helpers.stored_runs import add_checkpoint, make_run, options

STRANGER = """
from pathlib import Path
Path({trap!r}).touch()
from torch import nn
def net(num_classes, channels):
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(num_classes))
def loop(run):
    pass
"""


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that exists once the stranger's module has run. The current folder holds that module."""
    trap = tmp_path / "the stranger's code ran"
    (tmp_path / "stranger.py").write_text(STRANGER.format(trap=str(trap)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "stranger", raising=False)
    return trap


def strangers_run(storage: Path, model: str) -> Store:
    config = options(model=model)
    store = make_run(storage, config)
    add_checkpoint(store, nn.Sequential(nn.Flatten(), nn.Linear(20 * 12, 3)), config)
    return store


USES: dict[str, Callable[[Path], Any]] = {
    "load": lambda storage: raytrain.load("first", storage=str(storage)),
    "export": lambda storage: raytrain.export("first", str(storage / "out.pt2"), storage=str(storage)),
    "evaluate": lambda storage: raytrain.evaluate("first", str(storage), storage=str(storage)),
    "predict": lambda storage: raytrain.predict("first", str(storage), str(storage / "o.csv"), storage=str(storage)),
    "predictor": lambda storage: Predictor(raytrain_store(storage), 1, run="first", top_k=1),
}


def raytrain_store(storage: Path) -> Store:
    from raytrain.runs.documents import open_run

    return open_run(str(storage), "first")


@pytest.mark.parametrize("model", ["stranger:net", "stranger.py:net", "./stranger.py:net"])
@pytest.mark.parametrize("use", USES)
def test_a_strangers_network_does_not_run(use: str, model: str, trap: Path, tmp_path: Path) -> None:
    strangers_run(tmp_path, model)
    with pytest.raises(UsageError, match=r"would run the function net of .*stranger.*trust") as refused:
        USES[use](tmp_path)
    assert not trap.exists(), "the stranger's code ran"
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "model", ["stranger:raytrain.models:digits", "raytrain.modelsx:net", "raytrain.cli:run", "timm.models:resnet18"]
)
def test_a_name_that_looks_like_raytrains_own_is_refused(model: str, trap: Path, tmp_path: Path) -> None:
    strangers_run(tmp_path, model)
    with pytest.raises(UsageError, match="trust"):
        raytrain.load("first", storage=str(tmp_path))


def test_a_run_that_is_trusted_loads_its_network(trap: Path, tmp_path: Path) -> None:
    strangers_run(tmp_path, "stranger:net")
    assert raytrain.load("first", storage=str(tmp_path), trust=True).classes == ("cat", "dog", "fox")
    assert trap.exists()


@pytest.mark.parametrize("words", ["evaluate first --data .", "export first --output out.pt2"])
def test_the_command_line_refuses_a_strangers_network(
    words: str, trap: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    strangers_run(tmp_path, "stranger.py:net")
    assert main([*words.split(), "--storage", str(tmp_path)]) == 2
    assert "--trust" in capsys.readouterr().err
    assert not trap.exists()


def test_raytrains_own_networks_need_no_trust(tmp_path: Path) -> None:
    config = options()
    add_checkpoint(make_run(tmp_path, config), build_model(config.model, 3, 1, 0), config)
    assert raytrain.load("first", storage=str(tmp_path)).classes == ("cat", "dog", "fox")


def test_timms_networks_need_no_trust_but_only_those_in_its_list(tmp_path: Path) -> None:
    config = options(model="timm:test_resnet")
    store = make_run(tmp_path, config)
    add_checkpoint(store, build_model(config.model, 3, config.channels, 0), config)
    assert raytrain.load("first", storage=str(tmp_path)).classes == ("cat", "dog", "fox")
    make_run(tmp_path / "other", options(model="timm:local-dir:/tmp"))
    add_checkpoint(raytrain_store(tmp_path / "other"), nn.Flatten(), options(model="timm:local-dir:/tmp"))
    with pytest.raises(UsageError, match="is no network of timm"):
        raytrain.load("first", storage=str(tmp_path / "other"))


def resumed(storage: Path, words: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The options that ``raytrain train … --resume`` trains with; nothing trains."""
    seen: list[Any] = []

    def train(config: Any, **more: Any) -> Any:
        seen.append(config)
        raise UsageError("not trained here")

    monkeypatch.setattr(raytrain, "train", train)
    assert main(["train", "digits", *f"--name first --storage {storage} --resume {words}".split()]) == 2
    return seen[0] if seen else None


@pytest.mark.parametrize("option", ["model", "loop", "track"])
def test_resuming_does_not_run_what_only_the_stored_options_name(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "stranger.py:net"
    make_run(tmp_path, options(**{option: ("tensorboard", name) if option == "track" else name}))
    assert resumed(tmp_path, "", monkeypatch) is None
    assert f"--{option} stranger.py:net" in capsys.readouterr().err
    for words in (f"--{option} stranger.py:net", f"--{option}=stranger.py:net", "--trust"):
        assert name in getattr(resumed(tmp_path, words, monkeypatch), option)
    assert "mine.py:net" in getattr(resumed(tmp_path, f"--{option} mine.py:net", monkeypatch), option)


def test_resuming_with_raytrains_own_network_needs_no_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path, options(model="resnet18", epochs=3))
    assert resumed(tmp_path, "", monkeypatch).model == "resnet18"


def test_trust_is_not_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path, options(model="stranger.py:net"))
    assert "trust" not in json.loads(resumed(tmp_path, "--trust", monkeypatch).to_json())


def test_the_points_of_a_strangers_sweep_name_no_code(tmp_path: Path) -> None:
    store = make_run(tmp_path, options())
    write_json(store, SWEEP, {"vary": ["model=resnet18"], "points": [{"model": "stranger.py:net"}]})
    config = options(name="first", storage=str(tmp_path), resume=True)
    with pytest.raises(UsageError, match=r"--model stranger\.py:net.*trust"):
        plan_sweep(config, (), SweepOptions())
    assert plan_sweep(config, (), SweepOptions(), trust=True).points == ({"model": "stranger.py:net"},)
    own = options(name="first", storage=str(tmp_path), resume=True, model="stranger.py:net")
    assert plan_sweep(own, (), SweepOptions()).points[0]["model"] == own.model


@pytest.mark.parametrize("option", ["loop", "storage", "data", "name", "nonsense"])
def test_the_points_of_a_strangers_sweep_change_only_what_may_vary(option: str, tmp_path: Path) -> None:
    store = make_run(tmp_path, options())
    write_json(store, SWEEP, {"vary": ["seed=1"], "points": [{option: "../other"}]})
    assert read_json(store, SWEEP)
    with pytest.raises(UsageError, match=r"sweep\.json"):
        plan_sweep(options(name="first", storage=str(tmp_path), resume=True), (), SweepOptions())
