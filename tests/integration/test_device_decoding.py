"""Runs and loaders whose training images are decoded by the workers' devices, here by torchcodec on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import raytrain
from raytrain import ImageLoader
from raytrain.datasets.pack import pack
from raytrain.errors import UsageError
from tests.helpers.attached_runs import attached_run
from tests.helpers.folder_runs import FolderRun, folder_run, largest_difference, train_here, train_runs
from tests.helpers.image_files import encoded
from tests.helpers.photographs import as_jpeg, draw
from tests.helpers.small_runs import assert_same_weights, config, weights
from tests.helpers.torchcodec_here import needs_torchcodec

pytestmark = [pytest.mark.not_quick, needs_torchcodec]

NUM_OTHERS = {"progressive JPEG": 2, "PNG": 2}  # of the training images, beside a broken one
CROPPED = {"random_resized_crop": True, "flip": "random", "max_bad_fraction": 0.1, "decoder": "gpu"}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write 44 images of several sizes in two class folders, of which some are for the CPU, and one is broken."""
    folder, random = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for number in range(44):
        height, width = (int(side) for side in random.integers(20, 60, 2))
        pixels = draw(height, width, number)
        part, name = ("test", "train")[number >= 8], f"{number:02}.jpg"
        content = {
            40: encoded(pixels, "JPEG", progressive=True),
            41: encoded(pixels, "JPEG", progressive=True),
            42: encoded(pixels, "PNG"),
            43: encoded(pixels, "PNG"),
        }.get(number, as_jpeg(pixels))
        path = folder / part / "ab"[number % 2] / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content[:-30] if number == 30 else content)
    return folder


@pytest.fixture
def any_device_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("launch.prepare", "launch.attach", "loader.image_loader"):
        monkeypatch.setattr(f"raytrain.{module}.gpu_decoder_problem", lambda device: None)


# Crops of images that were kept are those of test_crops, and a loader keeps those of a device below.
@pytest.mark.parametrize("cache_side", [None, pytest.param(1.25, marks=pytest.mark.slow)])
def test_weights_are_the_same_on_any_number_of_workers_and_after_a_resume(
    cache_side: float | None, photos: Path, tmp_path: Path
) -> None:
    def run(name: str, stop_after: int | None = None) -> FolderRun:
        options = {**CROPPED, "cache_side": cache_side, "batch_size": 7}  # with cache_side, they are kept
        return folder_run(photos, tmp_path, name, stop_after=stop_after, **options)

    alone, recorder = train_here(run("alone"))
    assert recorder.on_cpu == {kind: 2 * count for kind, count in NUM_OTHERS.items()}
    assert {image.key for image in recorder.skipped} == {"train/a/30.jpg"}
    train_runs(3, run("stopped", stop_after=7))  # in the middle of an epoch
    (resumed,) = train_runs(2, run("stopped"))
    assert largest_difference(alone, resumed) < 1e-10


@pytest.mark.parametrize("packed", [False, True])
def test_a_loader_gives_the_same_pixels_in_any_number_of_processes(
    packed: bool, photos: Path, tmp_path: Path, any_device_decodes: None, caplog: pytest.LogCaptureFixture
) -> None:
    data, parts = photos, dict[str, str]()
    if packed:
        pack(str(photos / "train"), str(tmp_path / "packed"))
        data, parts = tmp_path / "packed", {"test_data": str(photos / "test")}

    def pixels(world_size: int, **options: Any) -> list[torch.Tensor]:
        """Pixels of each sample in both epochs, in the order of the samples."""
        by_sample: dict[tuple[int, int], torch.Tensor] = {}
        for rank in range(world_size):
            chosen = {**CROPPED, "image_size": 16, "mean": (0.4,) * 3, "std": (0.2,) * 3, "epochs": 2, **options}
            given: dict[str, Any] = {"batch_size": 7, "rank": rank, "world_size": world_size, **parts, **chosen}
            with ImageLoader(data, **given) as loader:
                for epoch in range(2):
                    for batch in loader:
                        used = batch.samples[: batch.num_used].tolist()
                        by_sample |= {(epoch, each): image for each, image in zip(used, batch.images, strict=False)}
        return [image for _, image in sorted(by_sample.items(), key=lambda item: item[0])]

    alone = pixels(1, cache="none")
    assert len(alone) == 2 * 35
    assert "Images decoded on the CPU so far: 4" in caplog.text or "so far: 8" in caplog.text
    for other in (pixels(3, cache="memory"), pixels(2, cache="none")):
        assert all(torch.equal(one, same) for one, same in zip(alone, other, strict=True))

    # Nearly what the CPU decodes, which does so at half the size for some crops: a level of 255 is 0.02 here.
    on_cpu = pixels(1, decoder="cpu", resizer="pillow")
    differences = torch.stack([(one - same).abs().mean() for one, same in zip(alone, on_cpu, strict=True)])
    assert differences.median() < 0.002 and differences.max() < 0.4


def test_a_loader_whose_device_is_a_cpu_decodes_there(photos: Path) -> None:
    options = {"batch_size": 7, "image_size": 16, "max_bad_fraction": 0.1, "device": "cpu"}
    with ImageLoader(photos, **options) as loader:
        assert next(iter(loader)).num_used
    with (
        ImageLoader(photos, **options, decoder="gpu") as loader,
        pytest.raises(UsageError, match=r"^decoder is gpu, and the device is a CPU; omit decoder\.$"),
    ):
        next(iter(loader))


def test_a_run_says_what_the_cpu_has_decoded(photos: Path, tmp_path: Path, any_device_decodes: None) -> None:
    options = {**CROPPED, "image_size": (12, 12), "batch_size": 7, "epochs": 2, "backend": "local", "max_failures": 0}
    results = [
        raytrain.train(config(photos, tmp_path, name=cache, cache=cache, **options)) for cache in ("none", "memory")
    ]
    for result in results:
        assert (result.status, result.num_skipped) == ("finished", 1)
        assert result.num_decoded_on_cpu == 2 * sum(NUM_OTHERS.values())
        run_dir = Path(result.run_dir)
        assert json.loads((run_dir / "config.json").read_text())["decoder"] == "gpu"
        assert json.loads((run_dir / "summary.json").read_text())["num_decoded_on_cpu"] == result.num_decoded_on_cpu
        assert "the GPU cannot" not in (run_dir / "skipped.jsonl").read_text()
    assert_same_weights(*results)

    # In a process that somebody else has started.
    attached = attached_run(photos, tmp_path / "attached", **{**options, "backend": "ray", "max_failures": 3})
    assert (attached.status, attached.num_decoded_on_cpu) == ("finished", results[0].num_decoded_on_cpu)
    ours, theirs = weights(attached), weights(results[0])
    assert max((ours[name] - theirs[name]).abs().max().item() for name in theirs) < 1e-10


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("cache", ["none", "memory"])
def test_a_run_on_ray_gives_its_workers_files(
    cache: str, photos: Path, tmp_path: Path, any_device_decodes: None
) -> None:
    options = {**CROPPED, "image_size": (12, 12), "batch_size": 7, "epochs": 2, "cache": cache}
    result = raytrain.train(config(photos, tmp_path, **options))
    alone = raytrain.train(config(photos, tmp_path, **options, name="alone", workers=1, backend="local"))
    assert (result.status, result.num_skipped, result.num_decoded_on_cpu) == ("finished", 1, alone.num_decoded_on_cpu)
    assert_same_weights(result, alone)


def test_images_are_looked_at_as_a_cpu_decodes_them(photos: Path) -> None:
    options = {"data": str(photos), "batch_size": 7, "image_size": (16, 16), "max_bad_fraction": 0.1}
    shown = [raytrain.look(raytrain.recipes.custom(**options, decoder=decoder)) for decoder in ("gpu", "cpu")]
    assert (shown[0].first_images.pixels == shown[1].first_images.pixels).all()
