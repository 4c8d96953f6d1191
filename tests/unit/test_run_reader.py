"""A run as somebody elsewhere sees it, from its documents alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytrain.monitor import run_reader
from raytrain.monitor.events import StopRequested, TrainingStarted
from raytrain.monitor.monitor import RunMonitor
from raytrain.monitor.run_reader import RunReader, follow_run
from raytrain.monitor.snapshot import START, Snapshot
from raytrain.monitor.stop_request import request_stop
from raytrain.runs.documents import EVENTS, MACHINES, METRICS, read_json, write_json
from raytrain.runs.machine_history import MachineUse, write_machines
from raytrain.runs.metrics_history import History
from raytrain.runs.outcome import StopReason
from tests.helpers.stored_histories import add_events, append_rows, end_run, evaluation_row, step_row, store_run


def test_a_reader_sees_what_the_run_wrote_and_later_only_what_is_new(tmp_path: Path) -> None:
    store = store_run(tmp_path, "run", [step_row(10, loss=2.0), step_row(20, loss=1.0)])
    reader = RunReader(store, "run")
    first = reader.snapshot()
    assert (first.status, first.step, first.num_steps, first.epoch, first.num_epochs) == ("running", 20, 1000, 1, 4)
    assert [row.loss for row in first.rows] == [2.0, 1.0]
    assert first.time_left_s is not None and round(first.time_left_s) == 98  # 980 steps of 0.1 s
    append_rows(tmp_path / "run", [evaluation_row(20, accuracy=0.5), step_row(30, loss=0.5)])
    second = reader.snapshot(first.cursor)
    assert (second.first_row, [row.step for row in second.rows]) == (2, [20, 30])
    assert second.evaluation is not None and second.evaluation.accuracy == 0.5


def test_a_long_history_is_read_in_pieces_of_which_none_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_reader, "BLOCK_BYTES", 1000)
    rows = [evaluation_row(1, accuracy=0.5), *(step_row(step, loss=1.0) for step in range(2, 100))]
    store = store_run(tmp_path, "run", rows, status="finished")
    seen: list[Snapshot] = []
    follow_run(RunReader(store, "run"), seen.append, pause=lambda seconds: None)
    assert [row.step for snapshot in seen for row in snapshot.rows] == list(range(1, 100))
    assert [snapshot.first_row for snapshot in seen[:2]] == [0, len(seen[0].rows)]
    assert max(len(snapshot.rows) for snapshot in seen) <= 10
    assert (seen[-1].step, seen[-1].evaluation) == (99, rows[0])


def test_a_line_that_is_still_being_written_is_read_when_it_is_whole(tmp_path: Path) -> None:
    store = store_run(tmp_path, "run", [step_row(10, loss=2.0)])
    reader = RunReader(store, "run")
    with (tmp_path / "run" / METRICS).open("a") as file:
        file.write('{"kind": "step", "step": 20, "ep')
        file.flush()
        assert [row.step for row in reader.snapshot().rows] == [10]
        file.write('och": 1}\n')
    assert [row.step for row in reader.snapshot().rows] == [10, 20]


def test_a_history_that_a_resume_has_cut_is_read_anew(tmp_path: Path) -> None:
    store = store_run(tmp_path, "run", [step_row(step, loss=1.0) for step in (10, 20, 30)])
    reader = RunReader(store, "run")
    seen = reader.snapshot().cursor
    store_run(tmp_path, "run", [step_row(10, loss=1.0), step_row(20, loss=5.0), step_row(40, loss=6.0)])
    again = reader.snapshot(seen)
    assert again.first_row == 0
    assert [row.step for row in again.rows] == [10, 20, 40]


def test_the_events_of_a_run_are_in_its_storage_also_those_before_a_resume(tmp_path: Path) -> None:
    store = store_run(tmp_path, "run", [])
    for reason in ("first", "second"):
        monitor = RunMonitor("run", 1000, 250, History(store))
        monitor.request_stop(StopReason("caller", reason))
        monitor.finish("stopped")
    assert [event for _, _, event in RunReader(store, "run").snapshot().events] == [
        StopRequested(StopReason("caller", "first")),
        StopRequested(StopReason("caller", "second")),
    ]


def test_a_stop_request_and_the_end_of_the_run_are_seen(tmp_path: Path) -> None:
    store = store_run(tmp_path, "run", [step_row(10, loss=1.0)])
    reader = RunReader(store, "run")
    request_stop(str(tmp_path), "run", StopReason("caller", "somebody"))
    asked = reader.snapshot()
    assert asked.stop_request == StopReason("caller", "somebody")
    assert asked.result is None and not asked.over
    end_run(store, "stopped", 11, "checkpoints/step-000000011.pt")
    over = reader.snapshot(asked.cursor)
    assert over.over and over.result is not None
    assert (over.step, over.result.checkpoint) == (11, "checkpoints/step-000000011.pt")


def test_the_machines_of_a_run_that_trains_are_seen_and_damaged_lines_about_them_left_out(tmp_path: Path) -> None:
    store = store_run(tmp_path, "run", [step_row(10, loss=1.0)])
    assert RunReader(store, "run").snapshot().machines == ()
    uses = tuple(
        MachineUse(rank=rank, node="n", images_per_s=10.0, data_wait_fraction=0.5, memory_bytes=1) for rank in range(2)
    )
    write_machines(store, uses)
    assert RunReader(store, "run").snapshot().machines == uses
    document = read_json(store, MACHINES)
    document["workers"] += ["a word", {"rank": 2}, {**document["workers"][0], "node": 7}, {"<b>": 1}]
    write_json(store, MACHINES, document)
    assert RunReader(store, "run").snapshot().machines == uses
    write_json(store, MACHINES, {"workers": "many"})
    assert RunReader(store, "run").snapshot().machines == ()
    write_machines(store, uses)
    end_run(store, "finished", 11, "checkpoints/step-000000011.pt")
    assert RunReader(store, "run").snapshot().machines == ()


def test_damaged_documents_hide_only_themselves(tmp_path: Path) -> None:
    store = store_run(tmp_path, "run", [step_row(10, loss=1.0)], status="finished")
    add_events(store, TrainingStarted(2))
    with (tmp_path / "run" / EVENTS).open("a") as file:
        file.write('{"at_s": 1, "kind": "unheard_of"}\n{"at_s": 1, "kind": "note", "text": 7}\n')
    with (tmp_path / "run" / METRICS).open("a") as file:
        file.write('garbage\n[1]\n{"kind": "step", "step": 20, "epoch": 1, "loss": 1e999}\n')
    store.put("summary.json", b'{"steps": "many"}')
    snapshot = RunReader(store, "run").snapshot(START)
    assert [(row.step, row.loss) for row in snapshot.rows] == [(10, 1.0), (20, None)]
    assert [event for _, _, event in snapshot.events] == [TrainingStarted(2)]
    assert (snapshot.status, snapshot.result) == ("finished", None)
