"""Runs are found again: filtered, sorted, tagged, deleted, written as tables, and followed from elsewhere."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet
import pytest

import raytrain
from raytrain.cli.main import main
from raytrain.data.table_file import export_history
from raytrain.display.console import PlainConsole
from raytrain.display.run_tables import comparison_page, runs_table
from raytrain.errors import UsageError, shell_command
from raytrain.experiments.compare import sort_runs
from raytrain.monitor.events import Note, TimedEvent, TrainingStarted
from raytrain.monitor.run_reader import RunReader, follow_run
from raytrain.monitor.snapshot import Snapshot
from raytrain.runs import line_file, stored_rows
from raytrain.runs.documents import (
    EVENTS,
    METRICS,
    SUMMARY,
    SWEEP,
    UNUSED_OPTIONS,
    encode_lines,
    open_run,
    read_config,
    run_store,
    write_config,
    write_json,
)
from raytrain.runs.metric_row import MetricRow
from raytrain.runs.ownership import claim_run
from raytrain.runs.records import list_runs, read_run, select_runs
from raytrain.runs.status import RunStatus, write_status
from raytrain.storage.store import Store
from tests.helpers.tracked_runs import evaluation_row, options, step_rows


def stored(storage: Path, name: str, status: str = "finished", **more: Any) -> Store:
    store = run_store(str(storage), name)
    write_config(store, options(**more))
    write_status(store, RunStatus(status=status, step=9, num_steps=9))
    store.put("checkpoints/step-000000009.pt", b"weights")
    return store


def put_rows(store: Store, rows: list[MetricRow]) -> None:
    store.put(METRICS, b"".join(json.dumps(row.to_json()).encode() + b"\n" for row in rows))


def test_the_history_of_a_run_is_rows_for_a_table(tmp_path: Path) -> None:
    store = stored(tmp_path, "a")
    assert raytrain.history("a", storage=tmp_path) == []
    rows = [*step_rows(1, 1500), evaluation_row(1500)]
    put_rows(store, rows)
    table = raytrain.history("a", storage=tmp_path)
    assert table == [row.to_json() for row in rows]
    assert (table[-1]["kind"], table[-1]["step"], table[-1]["accuracy"]) == ("evaluation", 1500, 0.5)
    with pytest.raises(UsageError, match="There is no run 'b'"):
        raytrain.history("b", storage=tmp_path)


@pytest.mark.parametrize(
    ("conditions", "found"),
    [
        ([], ["a", "b", "c"]),
        (["status=finished"], ["a", "c"]),
        (["learning-rate=0.10"], ["b"]),
        (["tag=good"], ["b", "c"]),
        (["tag=good", "status=finished"], ["c"]),
        (["recipe=digits", "weights=none"], ["a", "b", "c"]),
        (["recipe=cifar10"], []),
    ],
)
def test_runs_are_filtered_and_sorted(conditions: list[str], found: list[str], tmp_path: Path) -> None:
    stored(tmp_path, "c", tag=("good", "late"))
    stored(tmp_path, "a")
    stored(tmp_path, "b", status="stopped", learning_rate=0.1, tag=("good",))
    assert [run.name for run in sort_runs(select_runs(list_runs(str(tmp_path)), conditions), "name")] == found


def test_a_filter_that_is_not_understood_is_one_sentence() -> None:
    with pytest.raises(UsageError, match="has no ="):
        select_runs([], ["finished"])
    with pytest.raises(UsageError, match=r"did you mean learning-rate"):
        select_runs([], ["learning-rat=1"])
    with pytest.raises(UsageError, match=r"'finish' is no status \(did you mean finished\?\); it is one of starting, "):
        select_runs([], ["status=finish"])


@pytest.mark.parametrize(
    ("key", "order"),
    [
        ("name", ["a", "b", "c", "d", "e"]),
        ("best", ["b", "a", "d", "c", "e"]),  # two of the accuracy, then two of the loss, the smaller the better
        ("time", ["a", "d", "c", "b", "e"]),
        ("cost", ["c", "a", "b", "d", "e"]),
    ],
)
def test_runs_are_sorted_by_each_column(
    key: str, order: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, best, value, seconds, dollars in (
        ("a", "accuracy", 0.5, 40.0, 2.0),
        ("b", "accuracy", 0.75, 10.0, 1.0),
        ("c", "loss", 0.5, 20.0, 11.0),
        ("d", "loss", 0.125, 30.0, 0.5),
    ):
        store = stored(tmp_path, name, best=best)
        write_status(store, RunStatus(status="finished", dollars=dollars))
        write_json(store, SUMMARY, {"best_value": value, "seconds": seconds})
    stored(tmp_path, "e", status="running")  # has no summary yet
    assert main(["runs", "--storage", str(tmp_path), "--sort", key]) == 0
    text = capsys.readouterr().out
    assert [line.split()[0] for line in text.splitlines() if re.match(" [a-e] ", line)] == order
    assert ("several metrics of --best, which do not compare: accuracy, loss." in text) == (key == "best")
    assert f" {key}" in text or key in ("name", "best")  # the column is shown on 80 columns, too


@pytest.mark.parametrize(
    ("storage", "name", "hint"),
    [
        ("./runs", "elsewhere/first", "(a run in elsewhere is named first, with --storage elsewhere)"),
        ("s3://bucket", "runs/first", "(a run in s3://bucket/runs is named first, with --storage s3://bucket/runs)"),
        ("s3://", "first", "has no bucket; write s3://bucket/prefix"),
    ],
)
def test_a_path_in_place_of_a_name_is_told_how_to_write_it(storage: str, name: str, hint: str) -> None:
    with pytest.raises(UsageError, match=re.escape(hint)):
        run_store(storage, name)


def test_a_wrong_word_to_sort_by_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "--storage", str(tmp_path), "--sort", "bset"]) == 2
    assert "--sort is 'bset' (did you mean best?); it must be one of heartbeat" in capsys.readouterr().err


def test_tags_and_a_note_are_added_and_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = stored(tmp_path, "first", tag=("old",))
    words = ["tag", "first", "--storage", str(tmp_path), "--json"]
    assert main([*words, "--add", "new", "\x1b[2Jodd", "--remove", "old", "--note", "drops late"]) == 0
    assert (read_config(store).tag, read_config(store).note) == (("new", "\x1b[2Jodd"), "drops late")
    assert main(["runs", "--storage", str(tmp_path)]) == 0
    assert main(["tag", "first", "--storage", str(tmp_path), "--note", ""]) == 0
    assert read_config(store).note is None
    assert "\x1b[2J" not in capsys.readouterr().out
    assert main(["tag", "first", "--storage", str(tmp_path), "--remove", *read_config(store).tag]) == 0
    assert capsys.readouterr().out.split() == ["name", "first", "tags", "none", "note", "none"]


@pytest.mark.parametrize(
    ("tags", "hint"),
    [(("good", "old"), " (did you mean good?); its tags are good, old."), ((), "; it has no tags.")],
)
def test_a_tag_that_a_run_does_not_have_is_not_removed_in_silence(
    tags: tuple[str, ...], hint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = stored(tmp_path, "first", tag=tags)
    assert main(["tag", "first", "--storage", str(tmp_path), "--add", "new", "--remove", "goood"]) == 2
    assert f"first has no tag 'goood'{hint}" in capsys.readouterr().err
    assert read_config(store).tag == tags


def test_a_run_is_deleted_when_that_is_confirmed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stored(tmp_path, "first")
    stored(tmp_path, "second")
    words = ["rm", "first", "--storage", str(tmp_path)]
    assert main(words) == 2  # nobody can be asked
    capsys.readouterr()
    for answer in ("n\n", ""):  # Ctrl-D gives none
        monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True, readline=io.StringIO(answer).readline))
        assert main([*words, "--json"]) == 1
        printed = capsys.readouterr()
        assert "Delete first from" in printed.err
        assert json.loads(printed.out) == {"deleted": []}  # standard output may be a file
    assert len(list_runs(str(tmp_path))) == 2
    assert main(["rm", "first", *words[1:], "--yes"]) == 0  # whose name is given twice
    assert [run.name for run in list_runs(str(tmp_path))] == ["second"]
    assert not (tmp_path / "first").exists()


def test_the_trials_of_a_sweep_that_is_deleted_stay_and_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    points = [{"seed": number} for number in range(3)]
    write_json(stored(tmp_path, "rates"), SWEEP, {"vary": ["seed=0,1,2"], "points": points})
    for number in range(2):  # the third has not started
        stored(tmp_path, f"rates-0{number}", seed=number)
    assert main(["rm", "rates", "--yes", "--storage", str(tmp_path)]) == 0
    again = shell_command("rm", "rates-00", "rates-01", storage=str(tmp_path))
    assert f"stay: {again} deletes them" in capsys.readouterr().out
    assert [run.name for run in sort_runs(list_runs(str(tmp_path)), "name")] == ["rates-00", "rates-01"]


@pytest.mark.parametrize(
    "words", ["audit rates", "export-history rates --output rates.csv", "watch rates --terminal", "evaluate rates"]
)
def test_what_needs_one_run_takes_no_sweep(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_json(stored(tmp_path, "rates"), SWEEP, {"vary": ["seed=0,1"], "points": [{"seed": 0}, {"seed": 1}]})
    assert main([*words.split(), "--storage", str(tmp_path)]) == 2
    listing = shell_command("runs", storage=str(tmp_path))
    assert f"rates is a sweep; name one of its trials, which `{listing}` lists." in capsys.readouterr().err


@pytest.mark.not_quick
def test_a_run_that_trains_is_not_deleted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = stored(tmp_path, "first", status="running")
    with claim_run(store, "first"):
        assert main(["rm", "first", "--yes", "--storage", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "is training at this moment" in error
    assert re.search(rf"`(uv run )?raytrain stop first --storage {tmp_path}` stops it", error)
    assert store.exists("checkpoints/step-000000009.pt")


def test_a_history_is_written_as_a_table(tmp_path: Path) -> None:
    store = stored(tmp_path, "first")
    put_rows(store, [*step_rows(1, 3, **{"=evil()": 1.0}), evaluation_row(3)])
    for name in ("out.csv", "out.parquet"):
        words = ["export-history", "first", "--storage", str(tmp_path), "--output", str(tmp_path / name)]
        assert main(words) == 0
    rows = list(csv.DictReader(io.StringIO((tmp_path / "out.csv").read_text())))
    assert [row["kind"] for row in rows] == ["step", "step", "step", "evaluation"]
    assert (rows[1]["loss"], rows[1]["'=evil()"], rows[3]["accuracy"], rows[0]["accuracy"]) == ("0.5", "1", "0.5", "")
    table = pyarrow.parquet.read_table(tmp_path / "out.parquet")
    assert table["loss"].to_pylist() == [1.0, 0.5, pytest.approx(1 / 3), 2.0]
    assert "=evil()" in table.column_names


def test_a_long_history_is_written_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The real parts, of 16 MiB and 32,768 rows, would take a run of days.
    monkeypatch.setattr(line_file, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(stored_rows, "MAX_PART", 3)
    whole, late = step_rows(1, 40, own=1.0), MetricRow(kind="step", step=41, epoch=1, metrics={"own": 0.5, "late": 2.0})
    put_rows(stored(tmp_path, "first"), [*whole, late])
    for name in ("out.csv", "out.parquet"):
        assert export_history(str(tmp_path), "first", str(tmp_path / name)) == 41
    table = pyarrow.parquet.read_table(tmp_path / "out.parquet")
    assert table["step"].to_pylist() == list(range(1, 42))
    assert (table["own"][-1].as_py(), table["late"].to_pylist()) == (0.5, [None] * 40 + [2.0])
    assert len((tmp_path / "out.csv").read_text().splitlines()) == 42
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "out.csv", "out.parquet"]


@pytest.mark.parametrize("num_rows", [3, 3_000])
def test_a_table_has_the_same_columns_however_long_a_history_is(num_rows: int, tmp_path: Path) -> None:
    rows = step_rows(1, num_rows - 1, own=1.0)
    odd = b'{"kind": "step", "step": %d, "epoch": 1, "own": 2, "samples_seen": 7.5}\n' % num_rows
    store = stored(tmp_path, "first")
    put_rows(store, rows)
    with (tmp_path / "first" / METRICS).open("ab") as file:
        file.write(odd)
    assert export_history(str(tmp_path), "first", str(tmp_path / "out.parquet")) == num_rows
    table = pyarrow.parquet.read_table(tmp_path / "out.parquet")
    assert [str(table[name].type) for name in ("kind", "step", "own", "samples_seen")] == [
        "string",
        "int64",
        "double",
        "int64",
    ]
    assert table["own"].to_pylist() == [1.0] * (num_rows - 1) + [2.0]
    assert table["samples_seen"][-1].as_py() == 7


def test_the_log_of_a_run_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = stored(tmp_path, "first")
    events = TimedEvent(0, 0.0, TrainingStarted(2)), TimedEvent(1, 61.0, Note("bad [red]\x1b[2J"))
    store.put(EVENTS, encode_lines(event.to_json() for event in events))
    assert main(["logs", "first", "--storage", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.rstrip() for line in lines] == ["00:00:00  training on 2 workers", "00:01:01  bad [red]␛[2J"]


def test_a_run_of_another_process_is_followed_until_it_is_over(tmp_path: Path) -> None:
    store = stored(tmp_path, "first", status="running")
    put_rows(store, step_rows(1, 3))
    seen: list[Snapshot] = []

    def meanwhile(seconds: float) -> None:
        put_rows(store, step_rows(1, 5))
        write_status(store, RunStatus(status="finished", step=5, num_steps=5))

    follow_run(RunReader(open_run(str(tmp_path), "first"), "first"), seen.append, meanwhile)
    assert [(shown.status, [row.step for row in shown.rows]) for shown in seen] == [
        ("running", [1, 2, 3]),
        ("finished", [4, 5]),
    ]


def test_a_stored_run_is_watched_in_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put_rows(stored(tmp_path, "first"), step_rows(1, 5))
    assert main(["watch", "first", "--terminal", "--storage", str(tmp_path)]) == 0
    assert "step 9/9" in capsys.readouterr().out
    assert main(["watch", "first", "second", "--terminal", "--storage", str(tmp_path)]) == 2


@pytest.mark.parametrize("num_runs", [2, 3, 6])
def test_runs_with_long_names_are_compared_on_80_columns(num_runs: int, tmp_path: Path) -> None:
    names = [f"cifar10-20261122-15{number}000-ab{number}cde" for number in range(num_runs)]
    for number, name in enumerate(names):
        store = stored(tmp_path, name, status="finished", seed=number)
        put_rows(store, [*step_rows(1, 300), evaluation_row(300)])
    console = PlainConsole(file=io.StringIO(), width=80)
    console.print(comparison_page([read_run(str(tmp_path), name) for name in names]))
    file = console.file
    assert isinstance(file, io.StringIO)
    lines = file.getvalue().splitlines()
    for letter, name in zip("ABCDEF", names, strict=False):
        assert [line.split() for line in lines if name in line] == [[letter, name]]
        assert sum(f"━ {letter} " in line for line in lines) >= 1
    for words in (["status", *["finished"] * num_runs], ["last", "accuracy", *["0.5000"] * num_runs]):
        assert words in [line.split() for line in lines]
    assert max(map(len, lines)) <= 80
    axis = [line for line in lines if "┤" in line or "│" in line]
    assert {line.rstrip()[7] for line in axis} <= {"┤", "│"}


def test_the_list_of_runs_drops_columns_on_a_narrow_screen_and_cuts_no_cell(tmp_path: Path) -> None:
    for number in range(3):
        stored(tmp_path, f"a-rather-long-name-of-a-run-{number}", tag=("good", "late"))
    shown: dict[int, list[str]] = {}
    for width in (80, 120):
        console = PlainConsole(width=width, file=io.StringIO())
        console.print(runs_table(list_runs(str(tmp_path)), str(tmp_path)))
        text = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
        assert "…" not in text and all(len(line) <= width for line in text.splitlines())
        shown[width] = [word for word in ("heartbeat", "recipe", "step", "tags", "status", "accuracy") if word in text]
    assert shown[80] == ["heartbeat", "recipe", "status", "accuracy"] and len(shown[120]) == 6


def shown(page: Any) -> list[list[str]]:
    """The words of each line of a page."""
    console = PlainConsole(file=io.StringIO(), width=120)
    console.print(page)
    return [line.split() for line in console.file.getvalue().splitlines()]  # pyright: ignore[reportAttributeAccessIssue]


def test_runs_are_listed_with_the_best_value_of_what_each_is_judged_by(tmp_path: Path) -> None:
    for name, metric, value in (("a", "loss", 0.25), ("b", "MulticlassCohenKappa", -0.5)):
        write_json(stored(tmp_path, name, best=metric), SUMMARY, {"best_metric": metric, "best_value": value})
    both = list_runs(str(tmp_path))
    lines = {words[0]: words for words in shown(runs_table(both, "runs")) if words}
    assert "loss 0.2500" in " ".join(lines["a"]) and "MulticlassCohenKappa -0.5000" in " ".join(lines["b"])
    [alone] = (run for run in both if run.name == "a")
    assert ["best", "last"] in shown(runs_table([alone], "runs")), "above loss and accuracy"


def listed(storage: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    """What `raytrain runs --json` says of each run."""
    assert main(["runs", "--json", "--storage", str(storage)]) == 0
    return {run["name"]: run for run in json.loads(capsys.readouterr().out.splitlines()[-1])["runs"]}


def test_the_list_shows_what_a_run_that_trains_or_was_killed_has_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, status in (("trains", "running"), ("killed", "interrupted"), ("over", "finished")):
        store = stored(tmp_path, name, status=status)
        put_rows(store, [*step_rows(1, 5), evaluation_row(5, accuracy=0.75), evaluation_row(9, accuracy=0.5)])
        write_json(store, SUMMARY, {"validation_accuracy": 0.25, "best_value": 0.25})  # of an earlier attempt
    runs = listed(tmp_path, capsys)
    assert {name: (run["best_value"], run["validation_accuracy"]) for name, run in runs.items()} == {
        "trains": (0.75, 0.5),
        "killed": (0.75, 0.5),
        "over": (0.25, 0.25),
    }


def test_the_list_has_no_option_that_a_loop_of_ones_own_does_not_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("own", "built-in"):
        stored(tmp_path, name, learning_rate=0.1)
    write_json(run_store(str(tmp_path), "own"), UNUSED_OPTIONS, {"options": ["learning_rate", "optimizer"]})
    runs = listed(tmp_path, capsys)
    assert (runs["built-in"]["learning_rate"], runs["built-in"]["optimizer"]) == (0.1, "sgd")
    assert (runs["own"]["learning_rate"], runs["own"]["optimizer"], runs["own"]["batch_size"]) == (None, None, 256)


def test_runs_are_compared_by_the_best_value_of_what_each_is_judged_by(tmp_path: Path) -> None:
    for name, metric in (("a", "loss"), ("b", None)):
        rows = [
            MetricRow(kind="evaluation", step=step, epoch=1, metrics={"accuracy": 0.1 * step, "loss": 0.05 * step})
            for step in (4, 6, 5)
        ]
        put_rows(stored(tmp_path, name, best=metric), sorted(rows, key=lambda row: row.step))
    compared = raytrain.compare(["a", "b"], storage=str(tmp_path))
    assert [(run.best_metric, run.best_value) for run in compared] == [
        ("loss", pytest.approx(0.2)),
        ("accuracy", pytest.approx(0.6)),
    ]
    lines = shown(comparison_page([read_run(str(tmp_path), name) for name in ("a", "b")]))
    assert ["best", "loss", "0.2000", "accuracy", "0.6000"] in lines


def test_a_sweep_stands_for_its_trials_in_a_comparison(tmp_path: Path) -> None:
    points = [{"seed": number} for number in range(3)]
    write_json(run_store(str(tmp_path), "rates"), SWEEP, {"vary": ["seed=0,1,2"], "points": points})
    for number in range(2):  # the third has not started
        put_rows(stored(tmp_path, f"rates-0{number}", seed=number), step_rows(1, 2))
    stored(tmp_path, "alone")
    names = [run.name for run in raytrain.compare(["rates", "alone"], storage=str(tmp_path))]
    assert names == ["rates-00", "rates-01", "alone"]
    with pytest.raises(UsageError, match="two runs or more, or a sweep"):
        raytrain.compare(["alone"], storage=str(tmp_path))
