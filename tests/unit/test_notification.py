"""A message when a run ends, to a webhook or by a command, and secrets that are nowhere else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from raytrain.config import TrainConfig
from raytrain.errors import UsageError
from raytrain.launch import notification
from raytrain.launch.notification import Notification, check_notify, message_of, notify_target
from raytrain.launch.option_checks import check_options_of_job
from raytrain.runs.outcome import StopReason, train_command
from raytrain.runs.redact import redact
from tests.helpers.snapshots import train_result

pytestmark = pytest.mark.not_quick  # commands are processes

TOKEN = "T0123456/B0123456/abcdefghijklmnop"


class Webhook(HTTPServer):
    """Takes messages.

    Those to /refused/… are refused, those to /moved/… are to be sent elsewhere, and those to /silent/… get no answer.
    """

    def __init__(self) -> None:
        self.messages: list[tuple[str, dict[str, Any]]] = []
        self.over = threading.Event()
        super().__init__(("127.0.0.1", 0), self._handler())

    def url(self, folder: str) -> str:
        return f"http://127.0.0.1:{self.server_port}/{folder}/{TOKEN}"

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        webhook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                webhook.messages.append((self.path, body))
                if "silent" in self.path:
                    webhook.over.wait()
                if "garbled" in self.path:
                    self.wfile.write(b"no HTTP\r\n\r\n")
                    return
                self.send_response(404 if "refused" in self.path else 302 if "moved" in self.path else 200)
                self.send_header("Location", "/services/new")
                self.end_headers()

            def do_GET(self) -> None:
                webhook.messages.append((self.path, {}))
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None: ...

        return Handler


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    with Webhook() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.over.set()
        server.shutdown()
        thread.join()


def options(notify: str, **more: Any) -> TrainConfig:
    return TrainConfig(data="images", batch_size=1, learning_rate=0.1, notify=notify, **more)


def sent(target: str, **result: Any) -> None:
    message = Notification(notify_target(options(target)))
    message.send(message_of(train_result(**result)))
    message.send({"text": "again"})
    message.wait()


def test_a_webhook_gets_one_message_with_a_text_and_the_facts(webhook: Webhook) -> None:
    sent(webhook.url("services"), dollars=1.5)
    [(path, message)] = webhook.messages
    assert path == f"/services/{TOKEN}"
    assert message["text"] == "Run first finished after 12 steps: validation accuracy 0.9700, $1.50"
    assert (message["status"], message["run_dir"], message["dollars"]) == ("finished", "runs/first", 1.5)
    assert message_of(train_result(dollars=0.0017))["text"].endswith("0.9700, $0.0017")  # as everywhere below a dollar


def test_a_failure_and_a_stop_say_why_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "hunter2hunter2")
    failed = message_of(train_result(status="failed", error="Run 'first' failed: hunter2hunter2 is\nwrong."))
    assert "failed after 12 steps" in failed["text"] and "failed: … is␊wrong." in failed["text"]
    stopped = message_of(train_result(status="stopped", stop_reason=StopReason("cost", "5")))
    assert stopped["text"].startswith("Run first stopped after 12 steps (cost: 5): ")


@pytest.mark.parametrize(
    ("folder", "told"),
    [
        ("refused", "the webhook answered 404 Not Found"),
        ("moved", "the webhook answered 302 Found: name the address that it leads to"),
        ("silent", "the webhook has not answered within 0.2 s"),
        ("garbled", "the webhook gave no answer in HTTP: no HTTP"),
    ],
)
def test_a_webhook_that_fails_costs_a_line_without_its_url(
    folder: str, told: str, webhook: Webhook, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(notification, "WEBHOOK_WITHIN_S", 0.2)
    sent(webhook.url(folder))
    [line] = caplog.messages
    assert line == f"The message about run 'first' was not sent by --notify ({told})."
    assert [path for path, _ in webhook.messages] == [f"/{folder}/{TOKEN}"]


def test_nobody_listens(caplog: pytest.LogCaptureFixture) -> None:
    sent(f"http://127.0.0.1:9/{TOKEN}")
    assert len(caplog.messages) == 1 and "refused" in caplog.text and TOKEN not in caplog.text


def test_a_command_has_the_facts_in_its_environment(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sent(f'echo "$RAYTRAIN_STATUS $RAYTRAIN_NAME $RAYTRAIN_VALIDATION_ACCURACY: $RAYTRAIN_TEXT" > {tmp_path}/told')
    text = "Run first finished after 12 steps: validation accuracy 0.9700"
    assert (tmp_path / "told").read_text() == f"finished first 0.97: {text}\n"
    assert not caplog.messages
    sent("echo something is wrong >&2; exit 3")
    assert "was not sent by --notify (the command ended with code 3: something is wrong)." in caplog.text


def test_a_command_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(notification, "COMMAND_WITHIN_S", 0.2)
    sent("sleep 600 & wait")
    assert "(the command has not ended within 0 s)" in caplog.text


def test_what_a_command_leaves_in_the_background_is_neither_waited_for_nor_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sent(f"sleep 600 & echo $! > {tmp_path}/pid")
    assert not caplog.messages
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)  # raises ProcessLookupError if it is gone


def test_a_variable_may_hold_the_url(webhook: Webhook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOK", webhook.url("services"))
    sent("$HOOK")
    sent("${HOOK}")
    assert len(webhook.messages) == 2
    with pytest.raises(UsageError, match="--notify names the variable NOPE, which is not set; set it to a URL or a"):
        notify_target(options("$NOPE"))


def test_what_can_send_no_message_is_refused_at_the_start(tmp_path: Path) -> None:
    for target in ("me@example.com", "hooks.example.com/services/1", "no-such-command --quiet"):
        with pytest.raises(UsageError, match="--notify is no URL, which begins with https://") as refused:
            check_notify(options(target))
        assert target not in str(refused.value), "it may be a secret"
    for target in ("", " "):  # as of "$HOOK" in a shell that has no such variable
        with pytest.raises(UsageError, match="--notify is empty; give a URL"):
            check_notify(options(target))
    (script := tmp_path / "tell.sh").write_text("#!/bin/sh\n")
    for target in (f"{script} me", str(tmp_path)):
        with pytest.raises(UsageError, match=r"a path that is there and may not be run .* `chmod \+x`"):
            check_notify(options(target))
    script.chmod(0o700)
    allowed = ("https://example.com/hook", "HTTPS://example.com/hook", "true", "cd /tmp && true", "TO=me true")
    for target in (*allowed, "( true )", f"{script} me"):
        check_notify(options(target))


def test_the_url_is_in_no_text_about_the_run() -> None:
    url = f"https://hooks.example.com/{TOKEN}"
    config = options(url)
    resolved = config.resolve(name="run", num_workers=1, device="cpu", mean=(0.5,) * 3, std=(0.5,) * 3)
    assert resolved.notify is None
    texts = [config.to_json(), resolved.to_json(), repr(config), str(config), train_command(config)]
    notify_target(config)
    texts.append(redact(f"raytrain train --notify {url}"))
    assert not any(TOKEN in text for text in texts)


def test_a_job_on_a_cluster_gets_the_name_of_a_variable_only() -> None:
    with pytest.raises(UsageError, match=r"--notify would stand in the command line of the job, .* give --notify '"):
        check_options_of_job(options(f"https://hooks.example.com/{TOKEN}"), is_sweep=True)


@pytest.mark.slow
def test_a_run_tells_its_end_and_its_documents_do_not_have_the_url(
    webhook: Webhook, images: Path, tmp_path: Path
) -> None:
    words = f"train --data {images} --storage {tmp_path} --name run --model tests.helpers.memory_runs:network --trust"
    options = "--image-size 12 --batch-size 20 --learning-rate 0.05 --epochs 1 --workers 1 --backend local"
    command = [sys.executable, "-m", "raytrain", *words.split(), *options.split(), "--notify", webhook.url("services")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    [(_, message)] = webhook.messages
    assert (message["name"], message["status"]) == ("run", "finished")
    files = [file for file in (tmp_path / "run").rglob("*") if file.is_file()]
    assert files and not any(TOKEN.encode() in file.read_bytes() for file in files)
    assert TOKEN not in ended.stdout + ended.stderr
