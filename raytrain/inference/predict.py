"""Evaluating and predicting with a trained run, through Ray Data on as many workers as there are."""

from __future__ import annotations

import dataclasses
import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from raytrain.backends.ray.cluster import Placement, connection, hardware, place
from raytrain.config import TrainConfig
from raytrain.data.dataset import decoded_shape
from raytrain.data.manifest import Manifest, build_manifest, list_images
from raytrain.errors import UsageError
from raytrain.inference.metrics import scores
from raytrain.runs import records
from raytrain.runs.layout import CLASSES
from raytrain.storage.base import Store
from raytrain.storage.open import open_store
from raytrain.storage.output_file import check_output, write_output


def evaluate(run: str, data: str, *, storage: str = "./runs", workers: int | None = None, address: str | None = None) -> dict[str, Any]:
    """How well a run's best checkpoint answers on labelled images, each used exactly once.

    Returns:
        run, data, checkpoint, skipped (images that could not be read) and the :func:`raytrain.inference.metrics.scores` of the others:
        images, accuracy, loss (mean cross entropy), classes, per_class, confusions and confusion_matrix.

    Raises:
        UsageError, StorageError: there is no such run, or the data cannot be read or has other classes.
    """
    opened = _open(run, storage)
    data_store = open_store(data)
    manifest = build_manifest(data_store, classes=opened.classes)
    table = pa.concat_tables(_answers(opened, data_store, manifest, workers, address, top_k=1))
    used = table.filter(table["error"].is_null())
    truth, answers, losses = (used[name].to_numpy() for name in ("truth", "answer", "loss"))
    return {
        "run": run,
        "data": data_store.url,
        "checkpoint": opened.checkpoint,
        "skipped": len(table) - len(used),
        **scores(truth, answers, losses, opened.classes),
    }


def predict(
    run: str,
    data: str,
    output: str,
    *,
    top_k: int = 1,
    storage: str = "./runs",
    workers: int | None = None,
    address: str | None = None,
) -> dict[str, Any]:
    """Classify every image below ``data``, in whatever folders, and write a row for each to ``output``.

    The columns are key, label and score (of the likeliest class), error (why an image could not be read, else empty) and,
    with ``top_k`` above 1, label_2, score_2 and so on.

    Args:
        output: a file (or s3:// object) ending in .parquet or .csv.

    Returns:
        run, data, checkpoint, output, images (rows) and errors (images that could not be read).
    """
    check_output(output, (".parquet", ".csv"))
    opened = _open(run, storage)
    if not 1 <= top_k <= len(opened.classes):
        raise UsageError(f"--top-k is {top_k}, and run {run!r} knows {len(opened.classes)} classes; give 1 to {len(opened.classes)}.")
    data_store = open_store(data)
    manifest = list_images(data_store)
    answers = _answers(opened, data_store, manifest, workers, address, top_k=top_k)
    table = pa.concat_tables(part.drop_columns(["truth", "answer", "loss"]) for part in answers)
    write_output(output, _encoded(table, output))
    errors = len(table) - table["error"].null_count
    return {
        "run": run,
        "data": data_store.url,
        "checkpoint": opened.checkpoint,
        "output": output,
        "images": len(table),
        "errors": errors,
    }


@dataclass(frozen=True)
class _Opened:
    """A run that answers: where it is and what it knows."""

    name: str
    store: Store
    config: TrainConfig
    classes: tuple[str, ...]
    checkpoint: str


def _open(run: str, storage: str) -> _Opened:
    store = records.open_run(storage, run)
    classes = tuple(json.loads(store.get(CLASSES)))
    checkpoint = records.best_checkpoint(store)
    if checkpoint is None:
        raise UsageError(f"Run {run!r} has no checkpoint yet; it writes one after its first epoch, and when it is stopped.")
    return _Opened(run, store, records.read_config(store), classes, checkpoint)


def _answers(
    opened: _Opened, data_store: Store, manifest: Manifest, workers: int | None, address: str | None, *, top_k: int
) -> Iterator[pa.Table]:
    """Tables of answers in the manifest's order, as they come."""
    with connection(address) as cluster:
        cluster.connect()
        config = dataclasses.replace(opened.config, workers=workers or "auto", worker_load=None, device="auto")
        placement = place(config, hardware())
        yield from _pipeline(opened, data_store, manifest, placement, top_k)


def _pipeline(opened: _Opened, data_store: Store, manifest: Manifest, placement: Placement, top_k: int) -> Iterator[pa.Table]:
    import ray
    import ray.data

    from raytrain.backends.ray.coordinator import CredentialLender, start_coordinator, with_cluster_credentials
    from raytrain.backends.ray.ingest import ImageSet, configure
    from raytrain.inference.predictor import Predictor, read_block

    coordinator = start_coordinator(f"{opened.name}-{uuid.uuid4().hex[:8]}")
    lender = CredentialLender(coordinator)
    shape, packed = decoded_shape(opened.config), manifest.packing is not None
    images = ImageSet(with_cluster_credentials(data_store, coordinator), shape, ray.put(manifest), len(manifest), coordinator, packed)
    configure(ray.data.DataContext.get_current(), (placement.cpus + placement.data_cpus) * placement.num_workers)
    count = -(-len(manifest) // images.rows_per_block)
    answered = (
        ray.data.range(count, override_num_blocks=count)
        .map_batches(partial(read_block, images=images), batch_size=1, num_cpus=placement.task_cpus, zero_copy_batch=True)
        .map_batches(
            Predictor,
            fn_constructor_args=(with_cluster_credentials(opened.store, coordinator), opened.name, top_k, placement.threads),
            batch_size=None,
            batch_format="pyarrow",
            num_cpus=placement.cpus,
            num_gpus=1 if placement.device == "cuda" else 0,
            compute=ray.data.ActorPoolStrategy(size=placement.num_workers),
        )
    )
    for part in answered.iter_batches(batch_size=None, batch_format="pyarrow"):
        yield part
        lender.lend_if_due()
    ray.kill(coordinator)


def _encoded(table: pa.Table, output: str) -> bytes:
    """The table as a file of the kind that the name ``output`` asks for."""
    sink = pa.BufferOutputStream()
    if output.endswith(".csv"):
        pyarrow.csv.write_csv(table, sink)
    else:
        pyarrow.parquet.write_table(table, sink)
    return sink.getvalue().to_pybytes()
