"""Packed data sets contain the same images, and any number of workers can read them shard by shard."""

from __future__ import annotations

import io
import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from raytrain.cli.main import main
from raytrain.config import TrainConfig
from raytrain.data import shards as shard_files
from raytrain.data.blocks import LocalBatch, batches_from_stream, to_block
from raytrain.data.dataset import open_dataset
from raytrain.data.images.crop_box import STRETCHED
from raytrain.data.images.fetch_and_decode import ImageReader, read_contents
from raytrain.data.images.image_format import ImageFormat, ImageShape
from raytrain.data.labels.folders import build_manifest
from raytrain.data.labels.hold_out import hold_out
from raytrain.data.labels.manifest import PACKED_INDEX, UNLABELLED, Manifest, list_images
from raytrain.data.plan.batch_plan import BatchPlan
from raytrain.data.plan.partition import CacheOrder, Partition, WorkerOrder
from raytrain.datasets import sources
from raytrain.datasets.pack import PackResult, pack
from raytrain.errors import StorageError, UsageError
from raytrain.launch.predict_blocks import BlockPredictor, PredictRequest, predict_blocks
from raytrain.launch.ray.feed import ingest
from raytrain.runs.metric_row import SkippedImage
from raytrain.storage.folder import FolderStore
from raytrain.storage.open import open_store
from raytrain.storage.store import Store

SHAPE = ImageShape(8, 8, 3)


def quietly(source: str | Path, destination: str | Path) -> PackResult:
    return pack(str(source), str(destination), console=Console(file=io.StringIO()))


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use shards of about ten images, and an empty shard cache."""
    monkeypatch.setattr(shard_files, "SHARD_BYTES", 5_000)
    monkeypatch.setattr(shard_files, "shard_cache", shard_files.ShardCache())


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """150 images of 3 classes, each with its own file size and shade of grey."""
    from PIL import Image

    for number in range(150):
        file = tmp_path / "images" / f"{['cat', 'dog', 'owl'][number % 3]}" / f"{number:03d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8 + number % 5, 3), number, np.uint8)).save(file)
        file.write_bytes(file.read_bytes() + b"\0" * (3 * number))
    return tmp_path / "images"


@pytest.fixture
def shards(images: Path, tmp_path: Path) -> Path:
    quietly(images, tmp_path / "packed")
    return tmp_path / "packed"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The number of reads of each local file."""
    counted: Counter[str] = Counter()
    get = FolderStore.get

    def count(self: FolderStore, path: str, etag: str = "") -> bytes:
        counted[path] += 1
        return get(self, path, etag)

    monkeypatch.setattr(FolderStore, "get", count)
    return counted


def labelled_contents(manifest: Manifest) -> dict[str, tuple[str, bytes | Exception]]:
    keys: list[str] = manifest.keys.to_pylist()
    contents = read_contents(open_store(manifest.url), manifest)
    return {
        key: (manifest.classes[label], data) for key, label, data in zip(keys, manifest.labels, contents, strict=True)
    }


def test_a_packed_data_set_has_the_same_images(images: Path, shards: Path) -> None:
    manifest = build_manifest(open_store(str(shards)))
    assert labelled_contents(manifest) == labelled_contents(build_manifest(open_store(str(images))))
    assert manifest.packing is not None and len(manifest.packing.shards) > 5
    assert max(Counter(manifest.packing.shard.tolist()).values()) < 40


def test_real_images_are_packed_from_s3_into_s3(cifar10_folder: Path, s3_url: str) -> None:
    folder, bucket = open_store(str(cifar10_folder / "train")), open_store(f"{s3_url}/images")
    for found in folder.list():
        bucket.put(found.path, folder.get(found.path))
    result = quietly(f"{s3_url}/images", f"{s3_url}/packed")
    manifest = build_manifest(open_store(f"{s3_url}/packed"))
    assert labelled_contents(manifest) == labelled_contents(build_manifest(folder))
    assert result.num_images == 300 and result.num_classes == 10 and result.num_written == result.num_shards
    assert result.digest == manifest.digest
    pixels, bad = ImageReader(open_store(f"{s3_url}/packed"), ImageShape(32, 32, 3)).read(manifest)
    assert not bad
    alone, _ = ImageReader(bucket, ImageShape(32, 32, 3)).read(build_manifest(bucket))
    keys: list[str] = manifest.keys.to_pylist()
    assert (pixels[np.argsort(keys)] == alone).all()


def test_classes_are_mixed_over_the_shards(shards: Path) -> None:
    manifest = build_manifest(open_store(str(shards)))
    assert manifest.packing is not None
    assert all(
        len(set(manifest.labels[manifest.packing.shard == number])) == 3
        for number in range(len(manifest.packing.shards) - 1)
    )


def test_a_packed_data_set_can_be_copied(images: Path, shards: Path, tmp_path: Path) -> None:
    shards.rename(tmp_path / "elsewhere")
    manifest = build_manifest(open_store(str(tmp_path / "elsewhere")))
    assert manifest.url == str(tmp_path / "elsewhere") and len(labelled_contents(manifest)) == 150


def test_the_shards_can_be_read_by_other_programs(shards: Path) -> None:
    table = pq.read_table(next((shards / "shards").iterdir()))
    assert table.column_names == ["key", "label", "image"]
    assert json.loads((table.schema.metadata or {})[b"raytrain.shard"])["classes"] == ["cat", "dog", "owl"]


# Resuming.


def test_packing_again_writes_only_what_is_missing_or_damaged(images: Path, shards: Path) -> None:
    first, second, third = sorted((shards / "shards").iterdir())[:3]
    before = {path.name: path.read_bytes() for path in (first, second, third)}
    (shards / PACKED_INDEX).unlink()
    first.unlink()
    second.write_bytes(before[second.name][:-100])
    third.write_bytes(before[third.name].replace(b"IDAT", b"TADI", 1))
    assert quietly(images, shards).num_written == 3
    assert {path.name: path.read_bytes() for path in (first, second, third)} == before
    assert quietly(images, shards).num_written == 0


def test_a_shard_of_another_pack_is_not_taken_for_its_own(images: Path, shards: Path, tmp_path: Path) -> None:
    # The other images have the same keys, labels and sizes.
    for file in images.rglob("*.png"):
        other = tmp_path / "other" / file.relative_to(images)
        other.parent.mkdir(parents=True, exist_ok=True)
        other.write_bytes(file.read_bytes()[::-1])
        os.utime(other, ns=(0, file.stat().st_mtime_ns))
    quietly(tmp_path / "other", tmp_path / "packed-other")
    own, foreign = (sorted((folder / "shards").iterdir()) for folder in (shards, tmp_path / "packed-other"))
    before = own[2].read_bytes()
    own[2].write_bytes(foreign[2].read_bytes())

    # No image has the pixels of another one: those of this shard cannot be read.
    manifest = build_manifest(open_store(str(shards)))
    assert manifest.packing is not None
    contents = labelled_contents(manifest)
    in_shard = {key for key, number in zip(contents, manifest.packing.shard.tolist(), strict=True) if number == 2}
    assert in_shard
    for key, (_, data) in contents.items():
        assert (
            str(data) == "its shard is damaged; pack the images again"
            if key in in_shard
            else data == (images / key).read_bytes()
        )

    # Nor does packing again keep it.
    assert quietly(images, shards).num_written == 1
    assert own[2].read_bytes() == before


@pytest.mark.parametrize("length", [0, 100, -1])
def test_a_shard_that_is_cut_off_is_damaged(length: int, shards: Path) -> None:
    first, second, *_ = sorted((shards / "shards").iterdir())
    for shard in (first, second):
        shard.write_bytes(shard.read_bytes()[:length] if shard is first else first.read_bytes())
    manifest = build_manifest(open_store(str(shards)))
    assert manifest.packing is not None
    damaged = [isinstance(data, shard_files.DamagedShard) for _, data in labelled_contents(manifest).values()]
    assert damaged == (manifest.packing.shard <= 1).tolist()


def test_a_changed_image_replaces_one_shard(images: Path, shards: Path) -> None:
    file = images / "dog" / "001.png"
    file.write_bytes(file.read_bytes()[::-1])
    assert quietly(images, shards).num_written == 1
    assert labelled_contents(build_manifest(open_store(str(shards))))["dog/001.png"] == ("dog", file.read_bytes())


def test_an_interrupted_packing_leaves_no_usable_data_set(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = FolderStore.put

    def full(self: FolderStore, path: str, data: bytes) -> None:
        if "000004" in path:
            raise StorageError("The disk is full.")
        put(self, path, data)

    monkeypatch.setattr(FolderStore, "put", full)
    with pytest.raises(StorageError, match="The disk is full"):
        quietly(images, tmp_path / "packed")
    monkeypatch.setattr(FolderStore, "put", put)
    with pytest.raises(UsageError, match="no images below"):
        build_manifest(open_store(str(tmp_path / "packed")))
    result = quietly(images, tmp_path / "packed")
    assert 0 < result.num_written < result.num_shards


# Errors.


def test_an_image_deleted_during_packing_is_an_error(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = build_manifest(open_store(str(images)))
    # Nothing outside waits between listing and reading, so what is listed is what was there before.
    monkeypatch.setattr(sources, "build_manifest", lambda _: listed)
    (images / "owl" / "002.png").unlink()
    with pytest.raises(
        StorageError, match=r"owl/002.png was changed or deleted since the images were listed; run the command again\."
    ):
        quietly(images, tmp_path / "packed")


def test_a_store_that_returns_other_bytes_is_an_error(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = FolderStore.put
    monkeypatch.setattr(
        FolderStore, "put", lambda self, path, data: put(self, path, data[:-1] if "000002" in path else data)
    )
    with pytest.raises(StorageError, match=r"000002-\w+.parquet is not what was written to it"):
        quietly(images, tmp_path / "packed")


def test_data_that_cannot_be_packed_is_refused(images: Path, shards: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="packed already"):
        quietly(shards, tmp_path / "again")
    with pytest.raises(UsageError, match="cannot be packed into itself"):
        quietly(images, images)


def test_a_damaged_index_is_an_error(shards: Path) -> None:
    (shards / PACKED_INDEX).write_bytes(b"no index")
    with pytest.raises(StorageError, match=f"{PACKED_INDEX}, is damaged; delete it, and pack the images again"):
        build_manifest(open_store(str(shards)))


# Manifests.


def test_test_images_have_the_labels_of_the_training_images(shards: Path) -> None:
    store = open_store(str(shards))
    assert {
        name for name, _ in labelled_contents(build_manifest(store, classes=("owl", "elk", "dog", "cat"))).values()
    } == {
        "cat",
        "dog",
        "owl",
    }
    one = build_manifest(store, classes=("owl", "elk", "dog", "cat"))
    assert labelled_contents(one) == labelled_contents(build_manifest(store))
    with pytest.raises(UsageError, match="1 class that the training images lack: owl"):
        build_manifest(store, classes=("cat", "dog"))
    assert set(list_images(store).labels.tolist()) == {UNLABELLED}


def test_parquet_restores_a_packed_manifest_and_its_digest_depends_on_the_shards(
    images: Path, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = build_manifest(open_store(str(shards))).select(np.arange(0, 150, 2))
    again = Manifest.from_parquet(manifest.to_parquet())
    assert again.digest == manifest.digest and labelled_contents(again) == labelled_contents(manifest)
    monkeypatch.setattr(shard_files, "SHARD_BYTES", 7_000)
    others = [build_manifest(open_store(str(images))).digest, quietly(images, tmp_path / "others").digest]
    assert len({build_manifest(open_store(str(shards))).digest, *others}) == 3


@pytest.mark.not_quick
def test_a_run_opens_a_packed_data_set_and_stores_its_manifests(shards: Path, tmp_path: Path) -> None:
    config = TrainConfig(data=str(shards), image_size=(8, 8), batch_size=16, learning_rate=0.1)
    run_store = open_store(str(tmp_path / "run"))
    data = open_dataset(config, run_store)
    data.write(run_store)
    (shards / PACKED_INDEX).unlink()  # A resumed run has its own.
    again = open_dataset(config, run_store)
    for one, other in ((data.train, again.train), (data.validation, again.validation)):
        assert (
            one.digest == other.digest
            and one.shard_shuffle is not None
            and int(one.shard_shuffle.shard_sizes.sum()) == len(one)
        )
    assert len(data.train) + len(data.validation) == 150
    assert 0.2 < data.mean[0] < 0.4  # The greys are 0 to 149 of 255.


# Reading.


@pytest.fixture
def image_set(monkeypatch: pytest.MonkeyPatch) -> Callable[[Manifest], ingest.ImageSet]:
    """Make the input of a data task without Ray's object store; ``coordinator.skipped`` records skipped images."""
    monkeypatch.setattr(ingest.ray, "get", lambda manifest: manifest)

    def make(manifest: Manifest) -> ingest.ImageSet:
        skipped: list[SkippedImage] = []
        coordinator: Any = SimpleNamespace(
            skipped=skipped,
            note_skipped=SimpleNamespace(remote=skipped.extend),
            note_retries=SimpleNamespace(remote=lambda count: None),  # by what else this process has fetched
        )
        rows = manifest.rows_per_block(SHAPE)
        return ingest.ImageSet(open_store(manifest.url), ImageFormat(SHAPE), manifest, rows, coordinator)

    return make


def read_local_batches(
    images: ingest.ImageSet, plan: BatchPlan, num_workers: int, rows_per_block: int, first_step: int = 0
) -> list[list[LocalBatch]]:
    """Read the local batches of all workers, in the same way as the data tasks, one after the other."""

    def read(rank: int) -> list[LocalBatch]:
        partition = Partition(plan, rank, [1.0] * num_workers)
        order = WorkerOrder(partition, first_step, rows_per_block)
        tables = (ingest.read_block(images, order, number) for number in range(len(order)))
        return list(batches_from_stream(partition, (to_block(table, SHAPE) for table in tables), first_step))

    return [read(rank) for rank in range(num_workers)]


@pytest.mark.not_quick
@pytest.mark.parametrize("first_step", [0, 4])
def test_any_number_of_workers_reads_the_same_batches_and_pixels(
    shards: Path, image_set: Callable[[Manifest], ingest.ImageSet], first_step: int
) -> None:
    manifest = build_manifest(open_store(str(shards)))
    plan = BatchPlan(len(manifest), 32, 2, 5, shard_shuffle=manifest.shard_shuffle)
    seen: list[Any] = []
    for num_workers in (1, 3):
        by_rank = read_local_batches(image_set(manifest), plan, num_workers, 20, first_step)
        batches = [
            {
                name: np.concatenate([getattr(part, name) for part in parts]).tolist()
                for name in ("samples", "labels", "images")
            }
            for parts in zip(*by_rank, strict=True)
        ]
        seen.append(batches)
    assert seen[0] == seen[1]
    greys = [int(key[-7:-4]) for key in manifest.keys.to_pylist()]
    for batch in seen[0]:
        assert [np.max(image) for image in batch["images"]] == [greys[sample] for sample in batch["samples"]]
        assert batch["labels"] == manifest.labels[batch["samples"]].tolist()
    last_epoch = [sample for batch in seen[0][-plan.steps_per_epoch :] for sample in batch["samples"]]
    assert sorted(last_epoch) == list(range(150))


def test_an_epoch_reads_each_shard_once(
    shards: Path, image_set: Callable[[Manifest], ingest.ImageSet], reads: Counter[str]
) -> None:
    manifest = build_manifest(open_store(str(shards)))
    assert manifest.packing is not None
    read_local_batches(image_set(manifest), BatchPlan(150, 32, 1, 0, shard_shuffle=manifest.shard_shuffle), 2, 20)
    assert {path: reads[path] for path in manifest.packing.shards} == dict.fromkeys(manifest.packing.shards, 1)


def test_the_shard_cache_is_bounded_and_holds_all_shards_of_a_block(
    shards: Path, reads: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = build_manifest(open_store(str(shards)))
    assert manifest.packing is not None
    of = manifest.packing.shard
    monkeypatch.setattr(shard_files, "shard_cache", shard_files.ShardCache(3 * 5_700))
    store = open_store(str(shards))
    for numbers in ([0, 1], [2], [0], [3], [1], [0]):  # Shard 1 is the least recently used one when 3 is read.
        read_contents(store, manifest.select(np.flatnonzero(np.isin(of, numbers))))
    assert [reads[manifest.packing.shards[number]] for number in range(4)] == [1, 2, 1, 1]
    read_contents(store, manifest)
    read_contents(store, manifest)
    assert [reads[path] for path in manifest.packing.shards[4:]] == [1] * (len(manifest.packing.shards) - 4)


def test_images_of_a_damaged_or_missing_shard_are_skipped_and_listed(
    shards: Path, image_set: Callable[[Manifest], ingest.ImageSet]
) -> None:
    manifest = build_manifest(open_store(str(shards)))
    assert manifest.packing is not None
    damaged, missing = (shards / path for path in manifest.packing.shards[:2])
    damaged.write_bytes(damaged.read_bytes().replace(b"IDAT", b"TADI", 1))
    missing.unlink()
    images = image_set(manifest)
    table = ingest.read_block(images, CacheOrder(BatchPlan(150, 32, 1, 0, shuffle=False), 0, 150), 0)
    lost = np.isin(manifest.packing.shard, [0, 1])
    assert ((table["label"].to_numpy() < 0) == lost).all()
    coordinator: Any = images.coordinator
    reasons = {image.key: image.reason for image in coordinator.skipped}
    assert set(reasons) == set(np.array(manifest.keys.to_pylist())[lost])
    assert set(reasons.values()) == {"its shard is damaged; pack the images again", "the object is gone"}


def test_packed_test_images_are_read(shards: Path, image_set: Callable[[Manifest], ingest.ImageSet]) -> None:
    train, test = hold_out(build_manifest(open_store(str(shards))), 0.2, seed=1)
    plan = BatchPlan(len(test), 8, 1, 0, shuffle=False, shard_shuffle=test.shard_shuffle)
    by_rank = read_local_batches(image_set(test), plan, 2, 7)
    samples = np.concatenate([local.samples for worker in by_rank for local in worker])
    assert sorted(samples.tolist()) == list(range(len(test))) and len(train) + len(test) == 150
    keys: list[str] = test.keys.to_pylist()
    greys = [int(local.images[i].max()) for worker in by_rank for local in worker for i in range(len(local.samples))]
    assert greys == [int(keys[sample][-7:-4]) for sample in samples]


@pytest.mark.not_quick
def test_predictions_of_packed_images_are_in_the_order_of_the_manifest(shards: Path) -> None:
    def load_predictor(store: Store, num_threads: int, gpu: int) -> BlockPredictor:
        return lambda images, labels: pa.table({"label": labels})

    store = open_store(str(shards))
    manifest = list_images(store)
    request = PredictRequest(store, manifest, ImageFormat(ImageShape(8, 8, 3), STRETCHED), store, load_predictor)
    (table,) = predict_blocks(request, num_threads=1, num_readers=1)
    assert table["key"].to_pylist() == manifest.keys.to_pylist()
    assert table["error"].null_count == 150


def test_the_command_reports_the_result(images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pack", str(images), str(tmp_path / "packed"), "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["num_images"] == 150
    assert "Packing into" in err
