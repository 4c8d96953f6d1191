"""Runs whose images and documents are in Azure Blob Storage: every command on this machine, and a run on Ray."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import raytrain
from raytrain.cli.main import main
from raytrain.demo.digits import render_digits
from raytrain.errors import UsageError
from raytrain.storage.open import open_store
from tests.helpers.azurite import Azurite
from tests.helpers.small_runs import assert_same_weights, config, put_images


@pytest.fixture
def storage(azure_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A prefix with 200 images of digits below ``train`` and ``test``, which the command has uploaded."""
    monkeypatch.chdir(tmp_path)
    assert main(["upload", str(render_digits(tmp_path / "digits", num_images=200)), azure_url, "--json"]) == 0
    return azure_url


def test_every_command_works_without_ray(storage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def command(*words: str) -> dict[str, object]:
        capsys.readouterr()
        code = main([*words, "--storage", f"{storage}/runs", "--json"])
        out, err = capsys.readouterr()
        assert code == 0, err
        return json.loads(out.splitlines()[-1])  # below what a run shows

    images = ["--data", f"{storage}/train", "--test-data", f"{storage}/test"]
    cache = ["--cache", "disk", "--cache-folder", str(tmp_path / "cache")]
    train = ["train", "digits", "--name", "first", *images, *cache, "--backend", "local", "--device", "cpu"]
    started = command(*train, "--workers", "2", "--max-steps", "3")
    assert started["steps"] == 3 and any((tmp_path / "cache").iterdir())
    assert command(*train, "--workers", "1", "--max-steps", "5", "--resume")["steps"] == 5
    assert command("show", "first")["name"] == "first" and command("runs")
    evaluated = command("evaluate", "first", "--data", f"{storage}/test")
    assert main(["pack", f"{storage}/test", f"{storage}/packed"]) == 0
    assert command("evaluate", "first", "--data", f"{storage}/packed")["accuracy"] == evaluated["accuracy"]
    command("predict", "first", "--data", f"{storage}/test", "--output", f"{storage}/out/predictions.csv")
    command("export", "first", "--output", f"{storage}/out/first.safetensors")
    written = [found.path for found in open_store(f"{storage}/out").list()]
    assert {"predictions.csv", "first.safetensors"} <= set(written)
    assert len(raytrain.load("first", storage=f"{storage}/runs").classes) == 10


@pytest.mark.slow
def test_nodes_without_credentials_are_lent_those_of_the_driver(
    ray_cluster: None, azure: Azurite, azure_url: str, images: Path, undisturbed: raytrain.TrainResult
) -> None:
    put_images(images, open_store(f"{azure_url}/images"))
    result = raytrain.train(config(f"{azure_url}/images", f"{azure_url}/runs"))
    assert_same_weights(result, undisturbed)
    assert raytrain.evaluate("run", f"{azure_url}/images", storage=f"{azure_url}/runs", trust=True).skipped == 0
    store = open_store(f"{azure_url}/runs")
    assert not any(azure.key.encode() in store.get(found.path) for found in store.list())
    with pytest.raises(UsageError, match=r"--scope-keys limits keys with AWS STS, and az://.* is not in S3"):
        raytrain.train(config(f"{azure_url}/images", f"{azure_url}/runs", name="scoped", scope_keys=True))
