"""What the page's server gives, to whom, and that no viewer can hold it up."""

from __future__ import annotations

import json
import math
import re
import shutil
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa
import pytest

from raytrain.data.labels.manifest import Manifest
from raytrain.display.page import server as page_server
from raytrain.display.page import watched_runs
from raytrain.display.page.server import TOKEN_HEADER, PageServer
from raytrain.display.page.watched_runs import HomeRuns, StoredRuns, WatchedRuns
from raytrain.errors import StorageError, UsageError, shell_command
from raytrain.experiments.trials import names_of
from raytrain.monitor.events import Evaluated, TimedEvent
from raytrain.runs.documents import EVALUATION, STOP_REQUEST, SWEEP, VALIDATION_MANIFEST, run_store, write_json
from raytrain.runs.metric_row import MetricRow
from raytrain.runs.outcome import StopReason
from raytrain.runs.provenance import Provenance, record_provenance
from raytrain.runs.status import read_status, write_status
from tests.helpers.snapshots import snapshot
from tests.helpers.stored_histories import append_rows, end_run, evaluation_row, step_row, store_run


@contextmanager
def page(storage: Path, *names: str) -> Iterator[PageServer]:
    with StoredRuns(str(storage), names or ("run",)) as runs, PageServer(runs, port=0) as server:
        yield server


def ask(server: PageServer, path: str, method: str = "GET", **headers: str) -> Any:
    """The answer to a request with the right token, unless ``headers`` say otherwise. Raises HTTPError."""
    address = urlsplit(server.url)
    headers = {TOKEN_HEADER: address.fragment.removeprefix("token="), **headers}
    request = urllib.request.Request(f"http://{address.netloc}{path}", method=method, headers=headers)
    return urllib.request.urlopen(request, timeout=60)


def status_of(server: PageServer, path: str, method: str = "GET", **headers: str) -> int:
    try:
        return ask(server, path, method, **headers).status
    except urllib.error.HTTPError as error:
        return error.code


def messages(server: PageServer) -> Iterator[tuple[str, Any]]:
    """The server-sent events of a viewer, who leaves after the last one: name and content."""
    event = ""
    with ask(server, "/api/events") as answer:
        for line in answer:
            name, _, value = line.decode().rstrip("\n").partition(": ")
            if name == "event":
                event = value
            elif name == "data":
                yield event, json.loads(value)
                if event == "closed":
                    return


def run_messages(server: PageServer) -> Generator[dict[str, Any]]:
    """The messages about runs; ``close`` lets the viewer leave, for whom the server would wait at its end."""
    return (content for event, content in messages(server) if event == "run")


def test_a_viewer_gets_the_whole_history_and_then_what_is_new(tmp_path: Path) -> None:
    store_run(tmp_path, "run", [step_row(10, loss=2.0)])
    with page(tmp_path) as server:
        viewer = run_messages(server)
        first = next(viewer)
        assert first["state"]["status"] == "running"
        assert first["curves"]["step"]["metrics"]["loss"]["mean"] == [2.0]
        append_rows(tmp_path / "run", [step_row(20, loss=1.0)])
        second = next(viewer)
        assert (second["curves"]["step"]["step"], second["curves"]["step"]["reset"]) == ([20], False)
        assert next(run_messages(server))["curves"]["step"]["step"] == [10, 20]  # another viewer, who comes late
        viewer.close()


def test_a_run_that_has_not_finished_says_how_to_resume_it(tmp_path: Path) -> None:
    def resume(name: str) -> Any:
        return StoredRuns(str(tmp_path), [name]).documents(name)["resume"]

    command = shell_command("train", "--name", "run", storage=str(tmp_path)) + " --resume"
    for status in ("stopped", "failed"):
        end_run(store_run(tmp_path, "run", [step_row(10, loss=2.0)]), status, 10, None)
        assert resume("run") == {"heading": "Resume with", "command": command}
    end_run(store_run(tmp_path, "run", [step_row(10, loss=2.0)]), "finished", 10, None)
    assert resume("run") is None
    store_run(tmp_path, "run", [step_row(10, loss=2.0)])  # it trains
    assert resume("run") is None
    end_run(store_run(tmp_path, "run", []), "failed", 0, None)  # its name is free
    assert resume("run") is None

    # A trial is resumed by its sweep, and a script's own loop by the script.
    of_sweep = store_run(tmp_path, "rates", [])
    write_json(of_sweep, SWEEP, {"vary": ["seed=1,2"], "points": [{"seed": 1}, {"seed": 2}]})
    for name in ("rates-01", "rates-2024"):
        end_run(store_run(tmp_path, name, [step_row(10, loss=2.0)]), "stopped", 10, None)
    of_sweep = shell_command("sweep", "--name", "rates", storage=str(tmp_path)) + " --resume"
    assert resume("rates-01")["command"] == of_sweep
    own = shell_command("train", "--name", "rates-2024", storage=str(tmp_path)) + " --resume"
    assert resume("rates-2024") == {"heading": "Resume with", "command": own}
    of_script = store_run(tmp_path, "script", [step_row(10, loss=2.0)])
    end_run(of_script, "stopped", 10, None)
    made_of = Provenance(first_step=0, started_at="", command="python train.py", python="3.12", packages={})
    record_provenance(of_script, replace(made_of, code={"train.py": "def loop(run): ..."}))
    assert resume("script") is None


@pytest.mark.parametrize("token", ["", "wrong", "ä", "x" * 5000])
def test_without_the_token_nothing_is_shown_and_nothing_stops(tmp_path: Path, token: str) -> None:
    store_run(tmp_path, "run", [step_row(10, loss=2.0)])
    with page(tmp_path) as server:
        wrong = {TOKEN_HEADER: token.encode().decode("latin1")}
        for path in (
            "/api/events",
            "/api/documents?run=run",
            "/api/curves?run=run&first=1&last=2",
            "/api/machines?run=run",
        ):
            assert status_of(server, path, **wrong) == 403
        assert status_of(server, "/api/stop?run=run", "POST", **wrong) == 403
        assert status_of(server, "/") == 200  # the empty page tells nothing
    assert not (tmp_path / "run" / STOP_REQUEST).exists()


def test_another_site_cannot_use_the_page_even_with_the_token(tmp_path: Path) -> None:
    store_run(tmp_path, "run", [step_row(10, loss=2.0)])
    with page(tmp_path) as server:
        for header in ({"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
            assert status_of(server, "/api/stop?run=run", "POST", **header) == 403
        assert status_of(server, "/api/stop?run=run") == 405  # a link stops nothing
        assert not (tmp_path / "run" / STOP_REQUEST).exists()
        same = {"Origin": f"http://{urlsplit(server.url).netloc}", "Sec-Fetch-Site": "same-origin"}
        assert status_of(server, "/api/stop?run=run", "POST", **same) == 200
    assert '"kind": "page"' in (tmp_path / "run" / STOP_REQUEST).read_text()


def test_the_page_of_the_process_that_trains_stops_it_without_storage(tmp_path: Path) -> None:
    asked: list[StopReason] = []
    runs = WatchedRuns(str(tmp_path / "away"), ["run"], asked.append)
    with PageServer(runs, port=0) as server:
        assert status_of(server, "/api/stop?run=run", "POST") == 200
    assert asked == [StopReason("page", socket.gethostname())]
    assert not (tmp_path / "away").exists()


def test_an_evaluation_whose_loss_is_not_finite_is_shown_while_the_run_trains(tmp_path: Path) -> None:
    evaluated = TimedEvent(0, 1.0, Evaluated(1, accuracy=0.5, loss=math.nan))
    runs = WatchedRuns(str(tmp_path), ["run"])
    with PageServer(runs, 0) as server:
        runs.update(snapshot(events=(evaluated,)))
        shown = next(run_messages(server))["events"][0]
    assert shown["fields"] == {"epoch": 1, "accuracy": 0.5, "loss": None}
    assert shown["text"] == "evaluated after epoch 1: accuracy 0.5000, loss nan"


def test_a_run_that_is_over_or_unknown_cannot_be_stopped(tmp_path: Path) -> None:
    end_run(store_run(tmp_path, "run", []), "finished", 1000, "checkpoints/step-000001000.pt")
    with page(tmp_path) as server:
        assert status_of(server, "/api/stop?run=run", "POST") == 409
        assert status_of(server, "/api/stop?run=other", "POST") == 404
        assert status_of(server, "/api/curves?run=run&first=a&last=b") == 400
        assert status_of(server, f"/api/curves?run=run&first=-{'9' * 4000}&last={'9' * 4000}") == 200


def test_the_browser_is_told_to_run_nothing_but_the_page(tmp_path: Path) -> None:
    store_run(tmp_path, "run", [])
    with page(tmp_path) as server:
        headers = ask(server, "/").headers
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert ask(server, "/api/events").headers["Content-Security-Policy"] == policy


def test_the_page_needs_no_other_server_and_no_fixed_path() -> None:
    folder = Path(__file__).parents[2] / "raytrain" / "display" / "page" / "static"
    texts = [*folder.glob("*.js"), *folder.glob("*.html"), *folder.glob("*.css")]
    assert texts
    for file in texts:
        text = (
            file.read_text().replace("http://www.w3.org/2000/svg", "").replace("https://github.com/leeoniya/uPlot", "")
        )
        assert not re.search(r"https?://|(?:src|href|fetch\(|from )\s*=?\s*[\"'`]/", text), file.name


def test_a_viewer_that_never_reads_holds_up_nobody(tmp_path: Path) -> None:
    runs = WatchedRuns(str(tmp_path), ["run"])
    with PageServer(runs, port=0) as server:
        address = urlsplit(server.url)
        token = address.fragment.removeprefix("token=")
        asleep = [socket.create_connection(("127.0.0.1", address.port or 0)) for _ in range(100)]
        for viewer in asleep:
            viewer.sendall(f"GET /api/events HTTP/1.1\r\nHost: x\r\n{TOKEN_HEADER}: {token}\r\n\r\n".encode())
        names = [f"metric {number}" for number in range(50)]
        rows = [step_row(step, **dict.fromkeys(names, float(step))) for step in range(1, 10_001)]
        awake = run_messages(server)
        for first in range(0, 10_000, 2_000):
            runs.update(snapshot(rows[first : first + 2_000], first))
            assert next(awake)["state"]["step"] == first + 2_000
        for viewer in (*asleep, awake):
            viewer.close()


def test_a_hundred_viewers_at_once_all_get_the_whole_run_and_what_is_new(tmp_path: Path) -> None:
    runs = WatchedRuns(str(tmp_path), ["run"])
    rows = [step_row(step, loss=1 / step) for step in range(1, 5_001)]
    with PageServer(runs, port=0) as server, ThreadPoolExecutor(100) as threads:
        runs.update(snapshot(rows[:4_000]))
        viewers = [run_messages(server) for _ in range(100)]
        firsts = list(threads.map(lambda viewer: next(viewer), viewers))
        assert firsts[0]["state"]["step"] == 4_000
        assert all(first == firsts[0] for first in firsts)
        runs.update(snapshot(rows[4_000:], 4_000))
        assert {second["state"]["step"] for second in threads.map(lambda viewer: next(viewer), viewers)} == {5_000}
        for viewer in viewers:
            viewer.close()


def test_viewers_hear_the_last_word_before_the_server_ends(tmp_path: Path) -> None:
    runs = WatchedRuns(str(tmp_path), [])
    heard: list[tuple[str, Any]] = []
    with PageServer(runs, port=0) as server:
        runs.update(snapshot([step_row(1, loss=1.0)]))
        viewer = messages(server)
        while not heard or heard[-1][0] != "run":
            heard.append(next(viewer))
        listener = threading.Thread(target=lambda: heard.extend(viewer))
        listener.start()
        runs.update(snapshot([step_row(2, loss=1.0)], first_row=1))
    listener.join()
    assert [event for event, _ in heard[-2:]] == ["run", "closed"]
    assert heard[-2][1]["state"]["step"] == 2


def test_a_port_that_is_taken_is_said_in_one_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"--port is {port}"), PageServer(WatchedRuns("", []), port):
            pass


@pytest.mark.parametrize("port", [-1, 65_536, 99_999])
def test_a_port_that_does_not_exist_is_said_in_one_sentence(port: int) -> None:
    with pytest.raises(UsageError, match=f"--port is {port}; a port is a number from 1 to 65535, or 0 for any"):
        PageServer(WatchedRuns("", []), port)


def test_a_sweep_is_all_of_its_trials(tmp_path: Path) -> None:
    for name in ("rates-00", "alone", "alone-1", "other-1", "other-2"):
        store_run(tmp_path, name, [])
    write_json(store_run(tmp_path, "rates", []), SWEEP, {"vary": ["seed=1,2"], "points": [{"seed": 1}, {"seed": 2}]})
    assert names_of(str(tmp_path), "rates") == ["rates-00", "rates-01"]
    assert names_of(str(tmp_path), "alone") == ["alone"]
    with HomeRuns(str(tmp_path)) as runs:
        groups = {run["name"]: run["group"] for run in runs.all_runs()["runs"]}
    assert {name for name, group in groups.items() if group == "rates"} == {"rates-00"}
    assert groups["other-1"] is None, "no address shows runs that are no sweep"
    with pytest.raises(UsageError, match="There is no run 'none'"):
        names_of(str(tmp_path), "none")


def test_the_trials_of_a_sweep_that_is_opened_are_in_their_order(tmp_path: Path) -> None:
    points = [{"seed": seed} for seed in range(12)]
    write_json(store_run(tmp_path, "rates", []), SWEEP, {"vary": ["seed=0..11"], "points": points})
    with HomeRuns(str(tmp_path)) as runs:
        names = runs.open("rates")
        assert [feed.name for feed in runs.feeds] == names == sorted(names) and len(names) == 12


def test_a_viewer_of_trials_gets_what_their_sweep_has_cost(tmp_path: Path) -> None:
    for name in ("rates-00", "rates-01", "rates", "alone-1", "alone"):
        store = store_run(tmp_path, name, [], price=("3",))
        write_status(store, replace(read_status(store), dollars=0.5))
    plan = {"vary": ["seed=1,2"], "points": [{"seed": 1}, {"seed": 2}]}
    write_json(run_store(str(tmp_path), "rates"), SWEEP, plan)
    with page(tmp_path, "rates-00", "rates-01", "alone-1") as server:
        costs = (content["sweep_dollars"] for event, content in messages(server) if event == "runs")
        assert next(filter(None, costs)) == {"rates": 0.5}
        costs.close()


def test_a_run_that_is_deleted_and_trained_anew_names_its_own_images(tmp_path: Path) -> None:
    def worst() -> str:
        return runs.documents("run")["evaluation"]["worst"][0]["key"]

    def train(day: int, key: str) -> None:
        store = store_run(tmp_path, "run", [])
        started_at = f"2026-11-{day}T00:00:00Z"
        attempt = Provenance(first_step=0, started_at=started_at, command="", python="3.12", packages={})
        record_provenance(store, attempt)
        keys, one = pa.array([key]), np.ones(1, np.int64)
        manifest = Manifest(keys, np.zeros(1, np.int32), one, keys, ("a", "b"), "images")
        store.put(VALIDATION_MANIFEST, manifest.to_parquet())
        write_json(store, EVALUATION, {"worst": [{"sample": 0}]})

    with StoredRuns(str(tmp_path), []) as runs:
        train(28, "a/first.png")
        assert worst() == "a/first.png"
        shutil.rmtree(tmp_path / "run")
        train(29, "b/second.png")
        assert worst() == "b/second.png"


def test_runs_with_similar_names_are_no_sweep(tmp_path: Path) -> None:
    for name in ("first", "first-2", "rates", "rates-00", "rates-01", "rates-2024"):
        store_run(tmp_path, name, [])
    write_json(run_store(str(tmp_path), "rates"), SWEEP, {"vary": ["seed=1"], "points": [{"seed": 1}]})
    with HomeRuns(str(tmp_path)) as runs:
        groups = {run["name"]: run["group"] for run in runs.all_runs()["runs"]}
    assert [name for name, group in groups.items() if group] == ["rates-00"]


def test_the_list_and_the_comparison_go_by_the_metric_of_best(tmp_path: Path) -> None:
    rows = [evaluation_row(step, accuracy=step / 9, loss=1 / step) for step in (1, 2, 3)]
    store_run(tmp_path, "by-loss", rows, best="loss")
    store_run(tmp_path, "by-accuracy", rows)
    with HomeRuns(str(tmp_path)) as runs:
        listed = {run["name"]: (run["metric"], run["measured"]) for run in runs.all_runs()["runs"]}
        documents = runs.documents("by-loss")
    by_loss = {"name": "loss", "is_lower_better": True, "is_fraction": False}
    assert listed["by-loss"] == (by_loss, [1.0, 0.5, pytest.approx(1 / 3)])
    assert listed["by-accuracy"][0] == {"name": "accuracy", "is_lower_better": False, "is_fraction": True}
    assert documents["metric"] == by_loss


def test_a_curve_that_could_not_be_read_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store_run(tmp_path, "over", [evaluation_row(1, accuracy=0.5)])

    def refuse(*_: object) -> list[MetricRow]:
        raise StorageError("The storage is out of reach.")

    with HomeRuns(str(tmp_path)) as runs:
        with monkeypatch.context() as broken:
            broken.setattr(watched_runs, "read_metrics", refuse)
            assert [run["measured"] for run in runs.all_runs()["runs"]] == [[]]
        assert [run["measured"] for run in runs.all_runs()["runs"]] == [[0.5]]


@pytest.mark.parametrize("value", ["9" * 4000, "9" * 5000, "-" + "9" * 4000, "1e9", "%00", "%FF", "%D9%A1", ""])
def test_numbers_that_are_none_or_have_no_end_are_no_traceback(
    tmp_path: Path, value: str, caplog: pytest.LogCaptureFixture
) -> None:
    store_run(tmp_path, "run", [step_row(10, loss=2.0)])
    with page(tmp_path) as server:
        for query in (f"first={value}&last=20", f"first=0&last={value}"):
            assert status_of(server, f"/api/curves?run=run&{query}") in (200, 400)
    assert not caplog.records


@pytest.mark.parametrize("name", ["%00", "%FF", "..", "%2F", "x" * 5000, "run%0A", "", "a%2F..%2Frun", "%F0%9F%98%80"])
def test_names_that_are_none_are_no_traceback(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    store_run(tmp_path, "run", [step_row(10, loss=2.0)])
    with HomeRuns(str(tmp_path)) as runs, PageServer(runs, port=0) as server:
        for path in ("documents", "machines", "curves", "stop", "open"):
            method = "POST" if path in ("stop", "open") else "GET"
            assert status_of(server, f"/api/{path}?run={name}&first=0&last=1", method) in (400, 404, 405, 409)
    assert not caplog.records


def strangers(server: PageServer, count: int, words: bytes = b"") -> list[socket.socket]:
    """Connections of somebody without the token, oldest first, who sends ``words`` and listens to nothing."""
    opened = [socket.create_connection(("127.0.0.1", urlsplit(server.url).port or 0), 60) for _ in range(count)]
    for connection in opened:
        connection.sendall(words)
    return opened


def wait_until_ended(connection: socket.socket) -> None:
    """Read until the server has hung up; fails after a minute."""
    with connection, suppress(ConnectionResetError):
        while connection.recv(1 << 16):
            pass


def test_connections_of_strangers_are_few_and_cut_off_nobody_who_watches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_server, "STRANGER_S", 300.0)  # those who come later end them, and no clock
    few = page_server.MAX_STRANGERS + page_server.BACKLOG
    runs = WatchedRuns(str(tmp_path), ["run"])
    with PageServer(runs, port=0) as server:
        runs.update(snapshot([step_row(1, loss=1.0)]))
        viewer = run_messages(server)
        assert next(viewer)["state"]["step"] == 1
        crowd = strangers(server, 2 * few)
        for connection in crowd[:-few]:
            wait_until_ended(connection)
        runs.update(snapshot([step_row(2, loss=1.0)], first_row=1))
        assert next(viewer)["state"]["step"] == 2
        assert status_of(server, "/") == 200  # whoever comes now is served, too
        for connection in (*crowd, viewer):
            connection.close()


@pytest.mark.parametrize(
    "words",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: x\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /api/stop HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n",
        b"GET /uPlot.iife.min.js HTTP/1.1\r\nHost: x\r\n\r\n" * 500,
    ],
    ids=["nothing", "half a head", "one question", "half a body", "many answers that it does not read"],
)
def test_a_stranger_is_hung_up_on_within_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: bytes) -> None:
    monkeypatch.setattr(page_server, "STRANGER_S", 0.5)
    with PageServer(WatchedRuns(str(tmp_path), ["run"]), port=0) as server:
        (stranger,) = strangers(server, 1, words)
        wait_until_ended(stranger)


@pytest.mark.parametrize(
    "words",
    [
        b"GET *\x1b]0;OWNED\x07\x1b[31mraytrain:\xc2\x9b HTTP/1.1\r\nHost: h\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: h\r\nA\x1b[31m: b\r\n\r\n",
        b"GET http://[\xc2\x9b2J HTTP/1.1\r\n\r\n",
        b"GET //[\x1b[2J HTTP/1.1\r\nHost: h\r\n\r\n",
        b"\x1b[31mX / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET / HTTP/1.1\r\nHost: h\r\nX: " + b"x" * 100_000 + b"\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01",
        bytes(range(256)) * 20,
    ],
)
def test_a_malformed_request_says_nothing_in_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, words: bytes
) -> None:
    monkeypatch.setattr(page_server, "STRANGER_S", 1.0)
    with PageServer(WatchedRuns(str(tmp_path), ["run"]), port=0) as server:
        (stranger,) = strangers(server, 1, words)
        wait_until_ended(stranger)
        assert status_of(server, "/") == 200
    assert not caplog.records
