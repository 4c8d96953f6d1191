"""Names and messages from outside control neither the terminal nor rich nor matplotlib nor a spreadsheet."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from rich.console import Console

import raytrain
from raytrain.cli.command import CommandResult
from raytrain.cli.commands import COMMANDS
from raytrain.cli.main import main
from raytrain.data.duplicates import Duplicate, Duplicates
from raytrain.data.table_file import encode_table
from raytrain.diagnostics.audit import AuditResult, EpochAudit
from raytrain.diagnostics.look import ClassCount, FirstImages, ImageSample, LookResult
from raytrain.display.console import PlainConsole, format_option, format_value
from raytrain.display.curves import save_png
from raytrain.display.dashboard import dashboard
from raytrain.display.diagnostics_tables import audit_page
from raytrain.display.evaluation import confusion_figure, evaluation_page, label_evaluation_page
from raytrain.display.look import look_figure, look_html, look_page
from raytrain.display.notebook import as_html
from raytrain.display.terminal import TerminalView
from raytrain.errors import StorageError
from raytrain.inference.classification_metrics import EvaluationResult, score
from raytrain.monitor.events import ImageSkipped, TimedEvent
from raytrain.runs.documents import CONFIG, SKIPPED, STATUS, SUMMARY, write_json
from raytrain.runs.metric_row import SkippedImage
from raytrain.runs.redact import one_line
from tests.helpers.snapshots import snapshot
from tests.helpers.stored_evaluation import label_evaluation
from tests.helpers.stored_runs import make_run, options

HOSTILE = [
    "\x1b]52;c;aGFjaw==\x07",
    "\x1b[2J\x1b[H",
    "\x9b31m",
    "\r\x08\x7f",
    "a\nfake-run  finished",
    "a\u2028b\u202ec",
    "[/]",
    "[red]x",
    "[link=http://evil]x[/link]",
    ":skull:",
    "\udc80",
    r"$\frac{$",
    "${}$",
]
hostile = pytest.mark.parametrize("text", HOSTILE, ids=ascii)
_ALLOWED = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")  # colours and cursor movements of rich itself


def harmless(printed: str) -> None:
    """Assert that a terminal would obey nothing in ``printed`` but rich's own styles."""
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\ud800-\udfff]", _ALLOWED.sub("", printed))
    assert "]52;" not in printed or "␛]52;" in printed
    assert "\x1b[2J" not in printed
    assert not re.search(r"^\s*fake-run", printed, re.MULTILINE)


def on_a_terminal(page: Any, width: int = 200) -> str:
    console = PlainConsole(file=io.StringIO(), width=width, force_terminal=True, color_system="truecolor")
    console.print(page, highlight=False)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


@hostile
def test_a_strangers_run_is_listed_and_shown(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    store = make_run(tmp_path, options())
    write_json(store, CONFIG, {**json.loads(store.get(CONFIG)), "recipe": text, "data": text, "model": text})
    write_json(store, SUMMARY, {"stop_reason": {"kind": "caller", "detail": text}, text: 1})
    write_json(store, STATUS, {"status": text})
    store.put(SKIPPED, json.dumps({"key": text, "reason": text}).encode())
    make_run(tmp_path, options(), "other")
    for words in ("runs", "show first", "compare first other", "audit first"):
        main([*words.split(), "--storage", str(tmp_path)])
        out, err = capsys.readouterr()
        assert "unexpected" not in err
        harmless(out + err)
    main(["runs", "--storage", str(tmp_path)])
    if text.startswith("["):
        assert text in capsys.readouterr().out


@hostile
def test_an_error_is_one_harmless_line(
    text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **more: Any) -> None:
        raise StorageError(f"s3://bucket cannot be used: {text}.")

    monkeypatch.setattr(raytrain, "evaluate", fail)
    assert main(["evaluate", "first", "--data", "d"]) == 2
    err = capsys.readouterr().err
    harmless(err)
    assert err.count("\n") == 1
    assert main(["evaluate", "first", "--data", "d", "--debug"]) == 2
    harmless(capsys.readouterr().err.replace("\nfake-run", ""))


@hostile
def test_a_command_that_says_a_text(
    text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(COMMANDS, "new", lambda folder="": CommandResult(one_line(text), {}))
    assert main(["new"]) == 0
    harmless(capsys.readouterr().out)


@hostile
def test_events_of_a_run(text: str) -> None:
    shown = snapshot(num_skipped=1, events=(TimedEvent(0, 0.0, ImageSkipped(text, text)),))
    harmless(on_a_terminal(dashboard(shown, [])))
    file = io.StringIO()
    with TerminalView(Console(file=file)) as view:
        view.update(shown)
    harmless(file.getvalue())
    assert file.getvalue().count("\n") == 1
    harmless(as_html(dashboard(shown, [])))


def evaluation(names: tuple[str, ...]) -> EvaluationResult:
    truth, answers = np.array([0, 0, 1]), np.array([0, 1, 0])
    return score(truth, answers, np.full(3, 0.5), names, run="first", data="d", checkpoint="c", skipped=0)


@hostile
def test_class_names_are_shown_and_drawn(text: str, tmp_path: Path) -> None:
    result = evaluation((text, "dog", "$x$"))
    harmless(on_a_terminal(evaluation_page(result)))
    save_png(confusion_figure(result), str(tmp_path / "confusion.png"))
    assert (tmp_path / "confusion.png").stat().st_size > 0


@hostile
def test_names_of_several_classes_are_shown(text: str) -> None:
    harmless(on_a_terminal(label_evaluation_page(label_evaluation(text))))


@hostile
def test_names_in_a_data_set_are_shown_and_drawn(text: str, tmp_path: Path) -> None:
    counts = (ClassCount(text, 2, 1, 1), ClassCount("dog", 1, 1, 0))
    same = (Duplicate(text, text, text, text),)
    result = LookResult(
        title="first",
        data="d",
        validation_data="d",
        test_data="d",
        training_images=3,
        validation_images=2,
        test_images=1,
        left_out={},
        classes=counts,
        size_bytes=None,
        sample=ImageSample(5, {"PNG": 4}, None, None, (SkippedImage(text, text),)),
        shrinking=None,
        duplicates=Duplicates(5, 5, same, same),
        first_images=FirstImages(np.zeros((2, 4, 4, 3), np.uint8), (text, f"60% {text} 40% dog")),
    )
    harmless(on_a_terminal(look_page(result)))
    harmless(look_html(result))
    save_png(look_figure(result), str(tmp_path / "look.png"))


@hostile
def test_keys_of_an_audit(text: str) -> None:
    epoch = EpochAudit(1, 2, 1, 0, (text,), (text,), ())
    harmless(on_a_terminal(audit_page(AuditResult("first", 1, 2, (epoch,)))))


@hostile
def test_values_are_parts_of_a_line(text: str) -> None:
    for shown in (format_value(text), format_option((text, text)), one_line(text)):
        assert len(shown.splitlines()) == 1
        harmless(shown)


def test_usual_text_stays_as_it_is() -> None:
    assert one_line("Löwe 狮子 🦁 a/b [1] $5 …") == "Löwe 狮子 🦁 a/b [1] $5 …"
    assert on_a_terminal("first\nsecond [red] :skull:") == "first\nsecond [red] :skull:\n"


FORMULAS = ["=cmd|' /C calc'!A0", "+1", "-2+3", "@SUM(A1)", "\tx", "\rx"]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()], ids=str)
def test_predictions_are_no_formulas_in_a_spreadsheet(kind: pa.DataType) -> None:
    keys = [*FORMULAS, "a-b=c.jpg", "dog/1.jpg"]
    table = pa.table(
        {
            "key": pa.array(keys),
            "label": pa.array(keys[::-1], kind),
            "score": [-0.5] * 8,
            "error": pa.array(["-1 bytes", *[None] * 7], kind),
        }
    )
    rows = list(csv.DictReader(io.StringIO(encode_table(table, "p.csv").decode(), newline="")))
    neutral = [*(f"'{each}" for each in FORMULAS), "a-b=c.jpg", "dog/1.jpg"]
    assert [row["key"] for row in rows] == neutral
    assert [row["label"] for row in rows] == neutral[::-1] and {row["score"] for row in rows} == {"-0.5"}
    assert [row["error"] for row in rows] == ["'-1 bytes", *[""] * 7]
    exact = pyarrow.parquet.read_table(io.BytesIO(encode_table(table, "p.parquet")))
    assert exact["key"].to_pylist() == keys and exact["label"].to_pylist() == keys[::-1]
