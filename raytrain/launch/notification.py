"""A message when a run ends: ``--notify`` names a webhook, or a command of the user's.

A webhook gets a small JSON object; Slack, Mattermost and others show its ``text``. A command gets the same facts in its
environment, as ``RAYTRAIN_TEXT``, ``RAYTRAIN_STATUS`` and so on. The message is sent while the run's processes end, and
waits at most some seconds: the result of a run does not depend on it.

The URL of a webhook is a secret, because anyone who has it can write there. It is in no document of the run and in no
command line that raytrain starts, and :func:`raytrain.runs.redact.redact` hides it. A user can give ``$NAME``, a
variable of the environment, instead of the URL, which is then in no command line at all.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from raytrain.config import TrainConfig
from raytrain.errors import UsageError, format_count, format_dollars
from raytrain.runs.outcome import TrainResult
from raytrain.runs.redact import keep_secret, one_line, redact

_log = logging.getLogger("raytrain")
WEBHOOK_WITHIN_S = 5.0  # seconds until an answer
COMMAND_WITHIN_S = 20.0  # seconds until its end
_MAX_REASON = 200  # characters of an error message
_MAX_ERRORS_BYTES = 4096  # read from the end of a command's standard error, for its last line
_FACTS = (
    *("name", "status", "steps", "epochs", "validation_accuracy", "test_accuracy", "seconds", "dollars", "gpu_kwh"),
    *("best_metric", "best_value", "checkpoint", "run_dir", "error"),
)


def notify_target(config: TrainConfig) -> str | None:
    """Return the URL or the command that ``--notify`` names; None without that option.

    Have :func:`redact` remove it, and each URL in a command, from all texts of this process. A value such as ``$NAME``
    stands for the content of that variable. Raises UsageError if it names a variable that is not set.
    """
    target = config.notify
    if target is None:
        return None
    if variable := re.fullmatch(r"\$(?:\{(\w+)\}|(\w+))", target):
        name = variable[1] or variable[2]
        target = os.environ.get(name, "").strip()
        if not target:
            raise UsageError(f"--notify names the variable {name}, which is not set; set it to a URL or a command.")
    for secret in (target, *re.findall(r"(?i)https?://[^\s'\"]+", target)):
        keep_secret(secret)
    return target


def check_notify(config: TrainConfig) -> None:
    """Raise UsageError if ``--notify`` names a variable that is not set, or nothing that could send a message."""
    target = notify_target(config)
    if target is None or _is_url(target):
        return
    if not target.strip():
        raise UsageError("--notify is empty; give a URL, which begins with https://, or a command, or omit it.")
    # A command that begins with an assignment, a quote or a bracket is left to the shell.
    program = target.strip().partition(" ")[0]
    if not re.fullmatch(r"[\w.:/@+-]+", program):
        return
    # `command -v` accepts any file that is named by its path, even one that is not executable.
    if "/" in program and Path(program).exists() and shutil.which(program) is None:
        raise UsageError(
            "--notify begins with a path that is there and may not be run as a program; `chmod +x` a script of yours, "
            "or give another command."
        )
    if subprocess.run(
        ["/bin/sh", "-c", 'command -v "$1" > /dev/null', "sh", program], check=False, timeout=COMMAND_WITHIN_S
    ).returncode:
        raise UsageError(
            "--notify is no URL, which begins with https://, and its first word is no command that this machine has; "
            "give one of the two."
        )


def _is_url(target: str) -> bool:
    return re.match("https?://", target, re.IGNORECASE) is not None


def message_of(result: TrainResult) -> dict[str, Any]:
    """Return the message about a run's end, as ``text`` and as single facts; no secret is in them.

    Facts that are None are left out. Each text is one line.

    Example: ``message_of(result)["text"] == "Run first finished after 500 steps: validation accuracy 0.9312"``
    """
    facts = {name: getattr(result, name) for name in _FACTS}
    # The text: how the run ended and why, what was measured, what it cost, and the error.
    measured = [
        f"{name.replace('_', ' ')} {facts[name]:.4f}"
        for name in ("validation_accuracy", "test_accuracy")
        if facts[name] is not None
    ]
    if result.best_value is not None and result.best_metric not in (None, "accuracy"):
        measured.append(f"best {result.best_metric.replace('_', ' ')} {result.best_value:.4f}")
    measured += [] if result.dollars is None else [format_dollars(result.dollars)]
    text = f"Run {result.name} {result.status} after {format_count(result.steps, 'step')}"
    if result.stop_reason is not None:
        kind = result.stop_reason.kind.replace("_", " ")
        text += f" ({kind}: {result.stop_reason.detail})" if result.stop_reason.detail else f" ({kind})"
    text += f": {', '.join(measured)}" if measured else ""
    text += f". {result.error}" if result.error else ""
    message = {"text": text, **{name: value for name, value in facts.items() if value is not None}}
    return {name: one_line(redact(value)) if isinstance(value, str) else value for name, value in message.items()}


class Notification:
    """Sends one message to ``target``, a URL or a command, in a thread; does nothing if ``target`` is None.

    Example::

        notification = Notification(notify_target(config))
        notification.send(message_of(result))
        notification.wait()
    """

    def __init__(self, target: str | None) -> None:
        self._target = target
        self._thread: threading.Thread | None = None
        self._within_s = 0.0

    def send(self, message: dict[str, Any]) -> None:
        """Send ``message`` in a thread, and return at once. Do nothing if a message was sent before."""
        if self._target is None or self._thread is not None:
            return
        is_url = _is_url(self._target)
        self._within_s = WEBHOOK_WITHIN_S if is_url else COMMAND_WITHIN_S
        call = _post if is_url else _run_command
        self._thread = threading.Thread(target=self._send, args=(call, message), daemon=True, name="notification")
        self._thread.start()

    def wait(self) -> None:
        """Wait until the message is sent, for some seconds at most; warn if it is not sent by then."""
        if self._thread is not None:
            self._thread.join(self._within_s + 1)
            if self._thread.is_alive():
                _log.warning("--notify has not ended within %.0f s; nothing waits for it.", self._within_s)

    def _send(self, call: Callable[[str, dict[str, Any]], str | None], message: dict[str, Any]) -> None:
        """Send ``message`` to the target by ``call``, :func:`_post` or :func:`_run_command`; warn if that fails."""
        assert self._target is not None
        try:
            problem = call(self._target, message)
        except Exception as error:  # a failed notification must not change the result of the run
            problem = f"{error or type(error).__name__}"
        if problem:
            reason = one_line(redact(str(problem)))[:_MAX_REASON]
            _log.warning("The message about run %r was not sent by --notify (%s).", message.get("name"), reason)


def _post(url: str, message: dict[str, Any]) -> str | None:
    """Send ``message`` to a webhook; return the error as a text, or None if there is none."""
    from http.client import HTTPException
    from urllib.error import HTTPError, URLError
    from urllib.request import HTTPRedirectHandler, Request, build_opener  # which takes a while to import

    class NoRedirects(HTTPRedirectHandler):
        """Returns a redirect as the answer; following it would send a GET, without the message."""

        def redirect_request(self, *_: object) -> None:
            return None

    headers = {"Content-Type": "application/json", "User-Agent": "raytrain"}
    request = Request(url, json.dumps(message).encode(), headers, method="POST")
    try:
        with build_opener(NoRedirects).open(request, timeout=WEBHOOK_WITHIN_S) as answer:
            answer.read(1)  # a webhook that breaks off its answer has failed
    except HTTPError as error:
        advice = ": name the address that it leads to" if 300 <= error.code < 400 else ""
        return f"the webhook answered {error.code} {error.reason}{advice}"
    except TimeoutError:
        return f"the webhook has not answered within {WEBHOOK_WITHIN_S:g} s"
    except URLError as error:  # there is no connection
        return str(error.reason)
    except HTTPException as error:
        return f"the webhook gave no answer in HTTP: {str(error).strip() or type(error).__name__}"
    return None


def _run_command(command: str, message: dict[str, Any]) -> str | None:
    """Run the user's command in a shell, with the facts in its environment; return the error as a text, or None.

    After 20 seconds, kill it with all processes that it has started.
    """
    facts = {f"RAYTRAIN_{name.upper()}": str(value) for name, value in message.items()}
    # Errors go to a file: a pipe would stay open as long as any process that the command leaves in the background.
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command,
            shell=True,
            env={**os.environ, **facts},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
        )
        try:
            process.wait(COMMAND_WITHIN_S)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"the command has not ended within {COMMAND_WITHIN_S:.0f} s"
        if process.returncode == 0:
            return None
        errors.seek(max(0, errors.seek(0, os.SEEK_END) - _MAX_ERRORS_BYTES))
        last = errors.read().decode(errors="replace").strip().rpartition("\n")[2]
    return f"the command ended with code {process.returncode}" + (f": {last}" if last else "")
