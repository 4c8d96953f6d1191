"""Documents of a run that were cut short, overwritten, or written by another version: what is whole is used."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import raytrain
from raytrain.cli.commands import COMMANDS
from raytrain.cli.main import main
from raytrain.cli.parser import parse
from raytrain.errors import OwnerChanged, StorageError, UsageError
from raytrain.monitor.monitor import RunMonitor
from raytrain.monitor.run_reader import RunReader
from raytrain.monitor.stop_request import read_stop_request
from raytrain.runs.documents import CLAIM, CLASSES, CONFIG, METRICS, SKIPPED, STATUS, STOP_REQUEST, SUMMARY, read_config
from raytrain.runs.metric_row import MetricRow
from raytrain.runs.metrics_history import History, read_metrics
from raytrain.runs.ownership import claim_run, machine_id
from raytrain.runs.status import read_status
from raytrain.runs.stored_checkpoints import best_checkpoint, checkpoint_path
from raytrain.storage.folder import FolderStore
from raytrain.storage.store import Store
from tests.helpers.stored_runs import add_checkpoint, make_run, options

GARBAGE: dict[str, bytes] = {
    "empty": b"",
    "zeroed": bytes(300),
    "half": b'{"kind": "step", "st',
    "a list": b"[1, 2]",
    "a number": b"7",
    "null": b"null",
    "not UTF-8": b'{"a": "\xff\xfe"}',
    "deep": b"[" * 100_000,
    "nested": b'{"a": ' + b"[" * 700 + b"]" * 700 + b"}",  # that Python's parser still reads
    "foreign": b'{"x": "fine", "step": "three", "epochs": [], "model": 5, "status": {}, "validation_accuracy": {}}',
}
garbage = pytest.mark.parametrize("data", GARBAGE.values(), ids=GARBAGE.keys())


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = make_run(tmp_path, options())
    rows = [MetricRow(kind="step", step=step, epoch=1, metrics={"loss": 1 / step}) for step in (1, 2, 3)]
    store.put(METRICS, b"".join(json.dumps(row.to_json()).encode() + b"\n" for row in rows))
    store.put(SUMMARY, b'{"steps": 3, "validation_accuracy": 0.5}')
    make_run(tmp_path, options(), "other")
    return store


def said(capsys: pytest.CaptureFixture[str], tmp_path: Path, words: str, exit_code: int = 0) -> str:
    code = main([*words.split(), "--storage", str(tmp_path)])
    out, err = capsys.readouterr()
    assert code == exit_code, err
    return " ".join((out + err).split())


@garbage
@pytest.mark.parametrize("document", [CONFIG, STATUS, SUMMARY, METRICS, SKIPPED])
def test_one_bad_run_hides_nothing(
    document: str,
    data: bytes,
    store: Store,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    store.put(document, data)
    listed = said(capsys, tmp_path, "runs")
    assert "first" in listed and "other" in listed
    shown = said(capsys, tmp_path, "show first")
    compared = said(capsys, tmp_path, "compare first other")
    assert "first" in shown and "other" in compared
    if document not in (SUMMARY, METRICS, SKIPPED) or data not in (b"", GARBAGE["foreign"]):
        assert document in shown
        assert document in compared
    if document in (CONFIG, STATUS):
        assert document in listed and "first" in listed.partition(document)[0]
    for words in ("runs", "show first", "compare first other"):
        assert main([*words.split(), "--storage", str(tmp_path), "--json"]) == 0
        json.loads(capsys.readouterr().out)


@garbage
def test_a_torn_tail_costs_its_lines_alone(data: bytes, store: Store) -> None:
    whole = store.get(METRICS)
    store.put(METRICS, whole + data)
    assert [row.step for row in read_metrics(store)] == [1, 2, 3]
    problems: list[str] = []
    read_metrics(store, problems.append)
    assert problems == ([f"1 of 4 lines of {METRICS} cannot be read"] if data else [])


@pytest.mark.parametrize(
    ("more", "steps"),
    [
        ('{"kind": "step", "step": 4, "epoch": 1, "loss": NaN}', [1, 2, 3, 4]),
        ('{"kind": "step", "step": 4, "epoch": 1, "elapsed_s": Infinity}', [1, 2, 3, 4]),
        ('{"kind": "step", "step": NaN, "epoch": 1}', [1, 2, 3]),
        ('{"kind": "step", "step": 1e999, "epoch": 1}', [1, 2, 3]),
        ('{"kind": "step", "step": 4, "epoch": 0}', [1, 2, 3]),
        ('{"kind": "step", "step": 4, "epoch": 1, "loss": "small"}', [1, 2, 3]),
        (f'{{"kind": "step", "step": 4, "epoch": 1, "loss": {10**400}}}', [1, 2, 3, 4]),
        (f'{{"kind": "step", "step": {10**400}, "epoch": 1}}', [1, 2, 3]),
        ('{"kind": "step", "step": true, "epoch": 1}', [1, 2, 3]),
        ('{"kind": "dance", "step": 4, "epoch": 1}', [1, 2, 3]),
    ],
)
def test_rows_with_other_values(
    more: str, steps: list[int], store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store.put(METRICS, store.get(METRICS) + more.encode() + b"\n")
    assert [row.step for row in read_metrics(store)] == steps
    said(capsys, tmp_path, "show first")
    said(capsys, tmp_path, f"compare first other --png {tmp_path}/x.png")  # the other has no history
    said(capsys, tmp_path, f"show first --png {tmp_path}/x.png")


def test_a_resumed_run_continues_its_history_and_says_what_is_lost(store: Store) -> None:
    store.put(METRICS, store.get(METRICS) + bytes(50) + b'\n{"kind"')
    monitor = RunMonitor("first", 10, 5, History(store))
    monitor.note_start(1, 3)
    monitor.snapshot()
    monitor.record(MetricRow(kind="step", step=4, epoch=1))
    snapshot = monitor.snapshot()
    assert any(f"2 of 5 lines of {METRICS} cannot be read" in str(event) for _, _, event in snapshot.events)
    monitor.finish("finished")
    assert [row.step for row in read_metrics(store)] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "more",
    [
        {"mood": "good", "version": 3},
        {"status": "hibernating"},
        {"heartbeat_at": "yesterday", "status": "running"},
        {"heartbeat_at": "2026-01-01T00:00:00", "status": "running"},
        {"heartbeat_at": "0001-01-01T00:00:00+10:00"},
        {"heartbeat_at": "9999-12-31T23:59:59-10:00"},
        {"machine": machine_id(), "pid": 10**30, "status": "running"},
        {"machine": machine_id(), "pid": -1, "status": "running"},
        {"step": None, "num_steps": "many", "epoch": 1.5},
        {"status": 7},
        {"step": 10**400, "num_steps": 10**400, "dollars": 10**400, "gpu_kwh": 10**400},
    ],
)
def test_a_status_of_another_version(
    more: dict[str, Any], store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = json.loads(store.get(STATUS))
    store.put(STATUS, json.dumps({**document, **more}).encode())
    status = read_status(store)
    assert status.num_epochs == 2
    if "status" in more and more["status"] != 7:
        assert status.status in ("hibernating", "interrupted")
    for words in ("runs", "show first", "compare first other"):
        assert "first" in said(capsys, tmp_path, words)
    assert RunReader(store, "first").snapshot().num_epochs >= 1


@garbage
def test_a_run_whose_options_are_lost_is_not_resumed(
    data: bytes, store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store.put(CONFIG, data)
    sentence = said(capsys, tmp_path, "train digits --name first --resume", exit_code=2)
    assert f"{CONFIG} cannot be used (" in sentence
    with pytest.raises(UsageError, match=r"config\.json cannot be used \("):
        raytrain.load("first", storage=str(tmp_path))


def test_options_of_another_version_are_named_and_left_out(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    known = json.loads(store.get(CONFIG))
    store.put(CONFIG, json.dumps({**known, "quantum": True, "a\x1b[2Jb": 1}).encode())
    sentence = r"does not know and ignores: 'a\x1b[2Jb', 'quantum'"
    config = read_config(store)
    assert (config.name, config.epochs) == (known["name"], known["epochs"])
    assert read_config(store) == config and [sentence in each for each in caplog.messages] == [True]  # once
    for words in ("runs", "show first"):
        assert sentence in " ".join(said(capsys, tmp_path, words).split())
    command = parse(["train", config.recipe, "--name", "first", "--storage", str(tmp_path), "--resume"], COMMANDS)
    assert command.keywords["config"].epochs == known["epochs"]


def test_an_option_that_is_missing_has_its_default(store: Store) -> None:
    known = json.loads(store.get(CONFIG))
    store.put(CONFIG, json.dumps({name: value for name, value in known.items() if name != "translate"}).encode())
    assert read_config(store).translate == 0


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("flip", "sideways", "--flip is 'sideways'; give none, random, alternating"),
        ("schedule", "stairs", "--schedule is 'stairs'"),
        ("clip_norm", float("inf"), "--clip-norm is inf; give a finite number"),
    ],
)
def test_an_option_whose_value_is_not_valid_is_named(option: str, value: Any, reason: str, store: Store) -> None:
    store.put(CONFIG, json.dumps({**json.loads(store.get(CONFIG)), option: value}).encode())
    with pytest.raises(UsageError, match=rf"config\.json cannot be used \({reason}.*; repair it"):
        read_config(store)


READS: dict[str, Callable[[Store], Any]] = {STOP_REQUEST: read_stop_request, STATUS: read_status}


@garbage
@pytest.mark.parametrize("document", READS)
def test_a_run_that_trains_survives_a_broken_document(document: str, data: bytes, store: Store) -> None:
    store.put(document, data)
    READS[document](store)


DAMAGED_CLAIMS = {
    "without an owner": b'{"fence": 1}',
    "with a text as a number": b'{"token": "a", "fence": "one"}',
    "with a huge process": b'{"token": "a", "fence": 1, "pid": 1000000000000000000000000}',
    "with another field": b'{"token": "a", "fence": 1, "mood": "good"}',
}


@pytest.mark.parametrize(
    "data", [*GARBAGE.values(), *DAMAGED_CLAIMS.values()], ids=[*GARBAGE.keys(), *DAMAGED_CLAIMS.keys()]
)
def test_a_claim_that_is_broken_is_one_sentence_for_its_owner_and_for_the_next(data: bytes, store: Store) -> None:
    with claim_run(store, "first") as owner:
        store.put(CLAIM, data)
        with pytest.raises(OwnerChanged, match=r"claim\.json is damaged, so this process .* delete that file"):
            owner.owned_store.put(STATUS, b"{}")
        assert not owner.renew()
    with pytest.raises(UsageError, match=r"claim\.json is damaged; make sure that nobody trains the run"):
        claim_run(store, "first")


@garbage
def test_a_note_beside_a_checkpoint_may_be_broken(data: bytes, store: Store) -> None:
    for step, note in ((1, b'{"score": 0.5}'), (2, data)):
        store.put(checkpoint_path(step), b"")
        store.put(f"{checkpoint_path(step)}.json", note)
    assert best_checkpoint(store) == checkpoint_path(1)


@garbage
def test_classes_that_are_broken_are_refused(data: bytes, store: Store, tmp_path: Path) -> None:
    from raytrain.training.networks.model import build_model

    add_checkpoint(store, build_model("raytrain.models:digits", 3, 1, 0), options())
    store.put(CLASSES, data)
    with pytest.raises(UsageError, match=r"classes\.json cannot be used"):
        raytrain.evaluate("first", str(tmp_path), storage=str(tmp_path))


def test_a_document_that_may_not_be_read_hides_no_other_run(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    get = FolderStore.get

    def refuse(self: FolderStore, path: str, etag: str = "") -> bytes:
        if path == f"other/{STATUS}":
            raise StorageError("This user has no permission.")
        return get(self, path, etag)

    monkeypatch.setattr(FolderStore, "get", refuse)
    listed = said(capsys, tmp_path, "runs")
    assert "first" in listed and f"! other: {STATUS} cannot be used (This user has no permission)" in listed
