"""Runs whose images and documents are in Azure or Google's cloud: every command on this machine, and a run on Ray."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import raytrain
from raytrain.cli.main import main
from raytrain.demo.demo import render_digits
from raytrain.errors import UsageError
from raytrain.storage.open import open_store
from tests.helpers.small_runs import assert_same_weights, config, put_images


@pytest.fixture(params=["azure", pytest.param("google", marks=pytest.mark.slow)])
def url(request: pytest.FixtureRequest) -> str:
    """An empty prefix in each cloud."""
    return request.getfixturevalue(f"{request.param}_url")


@pytest.mark.timeout(600)
def test_every_command_works_without_ray(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(*words: str) -> dict[str, object]:
        capsys.readouterr()
        code = main([*words, "--storage", f"{url}/runs", "--json"])
        out, err = capsys.readouterr()
        assert code == 0, err
        return json.loads(out.splitlines()[-1])  # below what a run shows

    monkeypatch.chdir(tmp_path)
    assert main(["upload", str(render_digits(tmp_path / "digits", num_images=200)), url]) == 0
    images = ["--data", f"{url}/train", "--test-data", f"{url}/test"]
    cache = ["--cache", "disk", "--cache-folder", str(tmp_path / "cache")]
    train = ["train", "digits", "--name", "first", *images, *cache, "--backend", "local", "--device", "cpu"]
    started = command(*train, "--workers", "2", "--max-steps", "3")
    assert started["steps"] == 3 and any((tmp_path / "cache").iterdir())
    assert command(*train, "--workers", "1", "--max-steps", "5", "--resume")["steps"] == 5
    assert command("show", "first")["name"] == "first" and command("runs")
    evaluated = command("evaluate", "first", "--data", f"{url}/test")
    assert main(["pack", f"{url}/test", f"{url}/packed"]) == 0
    assert command("evaluate", "first", "--data", f"{url}/packed")["accuracy"] == evaluated["accuracy"]
    command("predict", "first", "--data", f"{url}/test", "--output", f"{url}/out/predictions.csv")
    command("export", "first", "--output", f"{url}/out/first.safetensors")
    written = [found.path for found in open_store(f"{url}/out").list()]
    assert {"predictions.csv", "first.safetensors"} <= set(written)
    assert len(raytrain.load("first", storage=f"{url}/runs").classes) == 10


@pytest.mark.slow
def test_nodes_without_credentials_are_lent_those_of_the_driver(
    ray_cluster: None, url: str, images: Path, undisturbed: raytrain.TrainResult, request: pytest.FixtureRequest
) -> None:
    put_images(images, open_store(f"{url}/images"))
    result = raytrain.train(config(f"{url}/images", f"{url}/runs"))
    assert_same_weights(result, undisturbed)
    assert raytrain.evaluate("run", f"{url}/images", storage=f"{url}/runs", trust=True).skipped == 0
    if url.startswith("az://"):
        store, key = open_store(f"{url}/runs"), request.getfixturevalue("azure").key
        assert not any(key.encode() in store.get(found.path) for found in store.list())
    with pytest.raises(UsageError, match=r"--scope-keys limits keys with AWS STS, and ..://.* is not in S3"):
        raytrain.train(config(f"{url}/images", f"{url}/runs", name="scoped", scope_keys=True))
