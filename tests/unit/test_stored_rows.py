"""Many lines of a history become a table that holds the same rows; what a table cannot hold is parsed line by line."""

from __future__ import annotations

import json

import numpy as np
import pytest

from raytrain.runs.documents import encode_lines
from raytrain.runs.metric_row import MetricRow
from raytrain.runs.stored_rows import RowParser, StoredRows, rows_of_kind
from tests.helpers.stored_histories import evaluation_row, step_row

ROWS = [
    evaluation_row(step, loss=0.25, accuracy=0.5) if step % 10 == 0 else step_row(step, loss=1 / step)
    for step in range(1, 3_001)
]


def lines(rows: list[MetricRow]) -> list[bytes]:
    return encode_lines(row.to_json() for row in rows).splitlines()


def test_a_table_holds_the_same_rows_and_their_values_as_columns() -> None:
    rows = RowParser()(lines(ROWS))
    assert isinstance(rows, StoredRows)
    assert list(rows) == ROWS
    assert (rows[7], rows[-1], list(rows[-3:])) == (ROWS[7], ROWS[-1], ROWS[-3:])
    steps, evaluations = rows_of_kind(rows, "step"), rows_of_kind(rows, "evaluation")
    assert isinstance(steps, StoredRows)
    assert (len(steps), len(evaluations)) == (2_700, 300)
    assert steps.names == ["loss"]  # only evaluations have an accuracy here
    assert steps.values("loss")[:3].tolist() == [1.0, 0.5, 1 / 3]
    assert np.isnan(rows.values("accuracy")[:9]).all()


def test_few_lines_and_many_give_the_same() -> None:
    parse = RowParser()
    assert list(parse(lines(ROWS[:5]))) == ROWS[:5]
    assert parse([]) == []


@pytest.mark.not_quick
@pytest.mark.parametrize(
    "line",
    [
        b"garbage",
        b"",
        b"[1]",
        b'{"kind": "other", "step": 1, "epoch": 1}',
        b'{"kind": "step", "step": 1}',
        b'{"kind": "step", "step": -1, "epoch": 1}',
        b'{"kind": "step", "step": 1, "epoch": 0}',
        b'{"kind": "step", "step": 1.5, "epoch": 1}',
        b'{"kind": "step", "step": 1, "epoch": 1, "loss": "low"}',
        b'{"kind": "step", "step": 1, "epoch": 1, "loss": true}',
        b'{"kind": "step", "step": 1, "epoch": 1, "loss": {"a": 1}}',
        b'{"kind": "step", "step": 99999999999999999999, "epoch": 1}',
        b"[" * 100_000,
    ],
)
def test_a_damaged_line_is_left_out_wherever_it_is(line: bytes) -> None:
    written = lines(ROWS)
    assert list(RowParser()([*written[:1_500], line, *written[1_500:]])) == ROWS


def test_a_metric_that_appears_late_is_not_lost() -> None:
    late = [*ROWS, *(step_row(step, loss=1.0, top5=0.5) for step in range(3_001, 6_001))]
    assert list(RowParser()(lines(late))) == late


def test_values_that_are_not_finite_are_unknown() -> None:
    written = lines(ROWS)
    for value in (b"NaN", b"Infinity", b"1e999", b"null"):
        written[1] = b'{"kind": "step", "step": 2, "epoch": 1, "loss": %s}' % value
        rows = RowParser()(written)
        assert (len(rows), rows[1].loss) == (3_000, None)


def test_millions_of_metric_names_become_no_columns() -> None:
    documents = ({"kind": "step", "step": step, "epoch": 1, f"metric {step}": 1.0} for step in range(1, 5_001))
    rows = RowParser()([json.dumps(document).encode() for document in documents])
    assert not isinstance(rows, StoredRows)
    assert [row.step for row in rows] == list(range(1, 5_001))
