"""Down-sampling: what a screen cannot show is not sent, and no extreme is lost."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from raytrain.display.page import feed
from raytrain.display.page.feed import MAX_BUCKETS, Curves, FeedCursor, RunFeed
from raytrain.runs.documents import encode_lines
from raytrain.runs.stored_rows import RowParser, StoredRows
from tests.helpers.snapshots import snapshot
from tests.helpers.stored_histories import evaluation_row, step_row


def filled(values: list[float]) -> Curves:
    curves = Curves("step")
    curves.extend([step_row(step, loss=value) for step, value in enumerate(values, start=1)])
    return curves


def test_a_short_curve_is_sent_as_it_is() -> None:
    buckets = filled([3.0, 2.0, 1.0]).since(0)
    assert buckets["step"] == [1, 2, 3]
    assert buckets["metrics"]["loss"] == {"mean": [3.0, 2.0, 1.0]}


def test_a_long_curve_keeps_its_extremes_and_its_mean() -> None:
    values = np.random.default_rng(0).normal(size=100_000)
    values[77_777] = 50.0
    curves = filled(values.tolist())
    buckets = curves.since(0)
    loss = buckets["metrics"]["loss"]
    assert MAX_BUCKETS / 2 <= len(buckets["step"]) <= MAX_BUCKETS
    assert max(loss["high"]) == 50.0
    assert min(loss["low"]) == float(f"{values.min():.8g}")
    width = buckets["width"]
    assert loss["mean"][5] == float(f"{values[5 * width - 1 : 6 * width - 1].mean():.8g}")


def test_a_curve_of_any_length_takes_a_bounded_amount_of_memory_and_keeps_its_extremes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The real limit, of 262,144 points, would take many times as many rows.
    monkeypatch.setattr(feed, "MAX_POINTS", 4096)
    values = np.random.default_rng(0).normal(size=100_003)
    values[123], values[77_777], values[77_778] = 50.0, -50.0, math.inf
    curves = filled(values.tolist())
    assert 2048 <= len(curves) <= 4096
    loss, steps = curves.since(0)["metrics"]["loss"], curves.since(0)["step"]
    assert (max(loss["high"]), min(loss["low"])) == (50.0, -50.0)
    assert steps[-1] > 100_003 - 64
    assert all(later - earlier < 256 for earlier, later in pairwise(steps))  # the beginning is as fine as the end
    known = values[: np.searchsorted(np.arange(100_003), steps[9])]
    means = np.average(loss["mean"][:10], weights=np.diff([0, *steps[:10]]))
    assert abs(means - known[np.isfinite(known)].mean()) < 0.01
    assert max(loss["high"][:10]) == 50.0 and max(loss["high"][10:]) < 10


def test_it_does_not_matter_in_which_pieces_and_in_which_form_rows_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "MAX_POINTS", 512)  # the real limit would take many times as many rows
    values = np.random.default_rng(0).normal(size=9_001).tolist()
    rows = [
        step_row(step, loss=value, **({"top5": value} if step > 4_000 else {})) for step, value in enumerate(values)
    ]
    rows.insert(5_000, evaluation_row(5_000, loss=99.0))
    parse, lines = RowParser(), encode_lines(row.to_json() for row in rows).splitlines()
    assert list(parse(lines)) == rows
    table = parse(lines)  # now it knows all names
    found: list[dict[str, Any]] = []
    for whole, size in ((rows, 9_002), (rows, 7), (rows, 1_000), (table, 9_002), (table, 3_000)):
        curves = Curves("step")
        for start in range(0, len(whole), size):
            curves.extend(whole[start : start + size])
        found.append(curves.since(0))
    assert isinstance(table, StoredRows)
    assert all(each == found[0] for each in found)


def test_values_that_are_not_finite_leave_a_gap_and_json_stays_json() -> None:
    buckets = filled([1.0, math.nan, math.inf, 1e308, -1e308]).since(0)
    assert buckets["metrics"]["loss"]["mean"] == [1.0, None, None, 1e308, -1e308]
    long = filled([math.nan, 1e308] * 5 * MAX_BUCKETS).since(0)
    json.dumps(long, allow_nan=False)
    assert set(long["metrics"]["loss"]["high"]) == {1e308}


def test_a_metric_that_appears_late_and_one_that_is_missing_leave_gaps() -> None:
    curves = Curves("step")
    curves.extend([step_row(1, loss=1.0), step_row(2, loss=2.0, top5=0.5), step_row(3, top5=0.6)])
    metrics = curves.since(0)["metrics"]
    assert metrics["loss"]["mean"] == [1.0, 2.0, None]
    assert metrics["top5"]["mean"] == [None, 0.5, 0.6]


def test_millions_of_metric_names_do_not_become_columns() -> None:
    curves = Curves("step")
    curves.extend([step_row(step, **{f"metric {step}": 1.0}) for step in range(1, 500)])
    assert len(curves.since(0)["metrics"]) <= 64


def test_a_closer_look_is_finer() -> None:
    curves = filled([float(step) for step in range(1, 100_001)])
    near = curves.between(50_000, 50_099)
    assert near["step"] == list(range(50_000, 50_100))
    assert near["metrics"]["loss"]["mean"][0] == 50_000.0
    assert curves.between(5, 4)["step"] == []


def replayed(messages: list[dict[str, Any]], kind: str) -> dict[int, float | None]:
    """The means by step that a viewer has after these messages, as ``curves.js`` puts them together."""
    kept: dict[int, float | None] = {}
    for change in (message["curves"][kind] for message in messages):
        if change["reset"]:
            kept = {}
        if change["step"]:
            first = change["step"][0] // change["width"]
            kept = {step: value for step, value in kept.items() if step // change["width"] < first}
        kept |= dict(zip(change["step"], change["metrics"].get("loss", {"mean": []})["mean"], strict=False))
    return kept


def test_a_viewer_of_every_update_and_one_who_comes_late_have_the_same_curve() -> None:
    feed, cursor, messages = RunFeed("run"), FeedCursor(), []
    rows = [step_row(step, loss=float(step)) for step in range(1, 5001)]
    for first in range(0, 5000, 137):
        feed.update(snapshot(rows[first : first + 137], first))
        message, cursor = feed.since(cursor)
        assert message is not None
        messages.append(json.loads(message))
    late, _ = feed.since(FeedCursor())
    assert late is not None
    assert replayed(messages, "step") == replayed([json.loads(late)], "step")
    assert len(messages[-1]["curves"]["step"]["step"]) < 100  # only what is new
    assert feed.since(cursor) == (None, cursor)


def test_a_run_that_resumes_from_an_earlier_step_is_sent_anew() -> None:
    feed = RunFeed("run")
    feed.update(snapshot([step_row(1, loss=1.0), step_row(2, loss=2.0), evaluation_row(2, loss=3.0)]))
    before, cursor = feed.since(FeedCursor())
    feed.update(snapshot([step_row(1, loss=1.0), step_row(2, loss=9.0)], attempt=2))
    after, _ = feed.since(cursor)
    first, second = json.loads(before or b""), json.loads(after or b"")
    assert replayed([first, second], "step") == {1: 1.0, 2: 9.0}
    assert replayed([first, second], "evaluation") == {}
