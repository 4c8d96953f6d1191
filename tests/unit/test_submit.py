"""A command that is sent to a cluster: which job server, what is sent, and how it is followed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.job_submission import JobStatus, JobSubmissionClient

from raytrain.cli.main import main
from raytrain.errors import UsageError
from raytrain.launch.ray import submit as job_server
from raytrain.launch.ray.submit import JobServer, job_server_url
from raytrain.monitor.stop_request import read_stop_request
from raytrain.recipes import cifar10
from raytrain.runs.documents import run_store, write_config
from raytrain.runs.outcome import StopReason, resume_command
from raytrain.runs.status import RunStatus, write_status
from tests.helpers.small_runs import config
from tests.helpers.waiting import wait_for

LINES = ["step 1\n", "step 2\n", "step 3\n"]


class ScriptedClient:
    """A job server's client. Each list in ``logs`` is one connection to the job's log; an error in it breaks that."""

    logs: list[list[str | Exception]]
    submitted: dict[str, Any]
    packed: list[str]
    message = ""
    refusals: list[Exception]
    end = JobStatus.SUCCEEDED
    stopped = ""

    def __init__(self, address: str) -> None:
        self.is_over = False

    def get_version(self, method: str, endpoint: str) -> Any:
        return SimpleNamespace(json=lambda: {"ray_version": ray.__version__})

    def submit_job(self, **submitted: Any) -> str:
        if self.refusals:
            raise self.refusals.pop(0)
        type(self).submitted = submitted
        type(self).packed = sorted(path.name for path in Path(submitted["runtime_env"]["working_dir"]).rglob("*"))
        return submitted["submission_id"]

    async def tail_job_logs(self, job: str) -> AsyncIterator[str]:
        connection = type(self).logs.pop(0)
        for part in connection:
            if isinstance(part, Exception):
                raise part
            yield part
        self.is_over = not type(self).logs

    def get_job_status(self, job: str) -> JobStatus:
        return type(self).end if self.is_over else JobStatus.RUNNING

    def get_job_info(self, job: str) -> Any:
        return SimpleNamespace(message=type(self).message)

    def stop_job(self, job: str) -> None:
        type(self).stopped = job


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type[ScriptedClient]:
    class Client(ScriptedClient):
        pass

    Client.logs, Client.refusals = [list(LINES)], []
    monkeypatch.setattr(job_server, "job_client", Client)
    monkeypatch.setattr(job_server, "uuid", SimpleNamespace(uuid4=lambda: SimpleNamespace(hex="1")))
    monkeypatch.setattr(type(job_server.JOB_SERVER_VERSION), "find", lambda self: (Client.get_version,))
    monkeypatch.setattr(job_server, "RETRY_S", 0.01)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_loop.py").write_text("def loop(run): pass\n")
    return Client


def submit(storage: Path, *words: str) -> int:
    given = ["--data", "s3://b/train", "--storage", str(storage), *words]
    return main(["submit", "--address", "http://head:8265", "--json", "--", "train", "cifar10", *given])


def test_the_command_goes_with_its_code_and_its_log_comes_back(
    client: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit(tmp_path, "--name", "my-first", "--loop", "my_loop.py:loop") == 0
    out, err = capsys.readouterr()
    assert out.startswith("".join(LINES))
    assert json.loads(out.splitlines()[-1])["status"] == "succeeded"
    assert "Sent 1 file (20 bytes)" in err
    assert "as job raytrain_1 to http://head:8265. The run is called my-first." in err
    assert client.submitted["entrypoint"].startswith("python -m raytrain train cifar10 --data s3://b/train")
    assert client.packed == ["my_loop.py"]
    assert client.submitted["runtime_env"]["env_vars"] == {
        "RAY_JOB_STOP_WAIT_TIME_S": "300",
        "RAYTRAIN_SUBMIT": "submit --address http://head:8265 --",
    }


def test_a_job_says_how_to_resume_the_run_by_another_job(
    client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UV", raising=False)  # with it, the command begins with uv run
    Path("conf").mkdir()
    Path("conf/a.json").write_text("{}")
    words = ["train", "cifar10", "--name", "first", "--data", "s3://b/train", "--storage", "s3://b/runs"]
    assert main(["submit", "--address", "http://head:8265", "--include", "conf", "--", *words]) == 0
    for name, value in client.submitted["runtime_env"]["env_vars"].items():
        monkeypatch.setenv(name, value)
    command = resume_command(cifar10(name="first", data="s3://b/train", storage="s3://b/runs"))
    sent = "raytrain submit --include conf --address http://head:8265 --"
    assert command == f"{sent} train --name first --storage s3://b/runs --resume"


@pytest.mark.not_quick
def test_a_job_gets_the_file_of_options_and_the_commit_of_its_files(client: Any, tmp_path: Path) -> None:
    Path("run.yaml").write_text(f"recipe: cifar10\ndata: s3://b/train\nname: first\nstorage: {tmp_path}\n")
    for words in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "one"]):
        subprocess.run(["git", *words], check=True)
    assert main(["submit", "--address", "http://head:8265", "--", "train", "--config", "run.yaml"]) == 0
    assert client.packed == ["run.yaml"]
    assert client.submitted["entrypoint"] == "python -m raytrain train --config run.yaml"
    commit = subprocess.run(["git", "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    sent = json.loads(client.submitted["runtime_env"]["env_vars"]["RAYTRAIN_COMMIT"])
    assert sent == {"commit": commit, "changed_files": []}


def test_a_dry_run_lists_what_would_travel_with_sizes_and_sends_nothing(
    client: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "a.yaml").write_text("lr: 1")
    (tmp_path / "conf" / "shadow").symlink_to("/etc/shadow")
    (tmp_path / ".pypirc").write_text("hunter2")
    command = ["train", "cifar10", "--data", "s3://b/x", "--storage", str(tmp_path), "--loop", "my_loop.py:loop"]
    assert main(["submit", "--dry-run", "--include", "conf", "--", *command]) == 0
    out = capsys.readouterr().out
    assert "command   python -m raytrain train cifar10 --data s3://b/x" in out
    assert "--loop my_loop.py:loop: found" in out
    assert "2 files (25 bytes)" in out and "conf/a.yaml (5 bytes)" in out and "my_loop.py (20 bytes)" in out
    assert "not sent  conf/shadow (a link)" in out and "pypirc" not in out
    assert "cluster   not checked: give --address" in out
    assert not hasattr(client, "submitted")
    assert main(["submit", "--dry-run", "--json", "--include", "conf", "--", *command]) == 0
    assert json.loads(capsys.readouterr().out)["files"] == {"conf/a.yaml": 5, "my_loop.py": 20}


def node(address: str, *problems: str) -> dict[str, Any]:
    """What the doctor reports of a node, as far as a rehearsal reads it."""
    speed = None if problems else {"images_per_s": 230.4}
    identity = None if problems else "driver's profile …ABCD"
    return {
        "address": address,
        "error": None,
        "report": {"problems": problems, "read_speed": speed, "identity": identity},
    }


@pytest.mark.parametrize(
    ("nodes", "code", "shown"),
    [
        (
            [node("10.0.0.1")],
            0,
            "10.0.0.1: reads s3://b/train (230 images/s), writes s3://b/runs, with the keys of the head: profile …ABCD",
        ),
        ([node("10.0.0.1"), node("10.0.0.2", "There are no AWS credentials.")], 1, "10.0.0.2: There are no AWS cred"),
    ],
)
def test_a_dry_run_asks_the_cluster_what_it_reaches_and_trains_nothing(
    nodes: list[Any], code: int, shown: str, client: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    client.logs = [["listing\n", json.dumps({"ok": True, "nodes": nodes}) + "\n", "raytrain: a warning\n"]]
    command = ["train", "cifar10", "--data", "s3://b/train", "--storage", "s3://b/runs"]
    assert main(["submit", "--dry-run", "--address", "http://head:8265", "--", *command]) == code
    assert shown in capsys.readouterr().out
    entrypoint = "python -m raytrain doctor --storage s3://b/runs --json --data s3://b/train"
    assert client.submitted["entrypoint"] == entrypoint
    assert client.packed == []


def test_a_doctor_that_cannot_look_says_why(client: Any, capsys: pytest.CaptureFixture[str]) -> None:
    client.logs = [[json.dumps({"status": "failed", "error": "AZURE_STORAGE_ACCOUNT_NAME is not set."}) + "\n"]]
    command = ["train", "cifar10", "--data", "az://b/train", "--storage", "az://b/runs"]
    assert main(["submit", "--dry-run", "--address", "http://head:8265", "--", *command]) == 2
    assert "could not be checked: AZURE_STORAGE_ACCOUNT_NAME is not set." in capsys.readouterr().err


def test_a_run_without_a_name_gets_one_with_which_it_can_be_stopped(client: Any, tmp_path: Path) -> None:
    assert submit(tmp_path) == 0
    name = client.submitted["metadata"]["raytrain_run"]
    assert client.submitted["entrypoint"].endswith(f" --name {name}")


def test_a_job_that_is_not_taken_has_a_sentence(
    client: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    client.refusals = [OSError("Remote end closed connection")]
    assert submit(tmp_path) == 2
    assert "http://head:8265 did not take the job (Remote end closed connection)." in capsys.readouterr().err


def test_a_head_that_has_just_started_is_asked_again_with_the_same_job(
    client: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    no_agent = RuntimeError("Request failed with status code 500: No available agent to submit job.")
    taken = RuntimeError("…status code 500: …\nValueError: Job with submission_id raytrain_1 already exists.")
    for client.refusals in ([no_agent, no_agent], [no_agent, taken]):
        client.logs = [list(LINES)]
        assert submit(tmp_path) == 0
        assert "as job raytrain_1 to http://head:8265" in capsys.readouterr().err
    assert client.submitted["submission_id"] == "raytrain_1"

    monkeypatch.setattr(job_server, "STARTS_WITHIN_S", 0.0)
    client.refusals = [RuntimeError("…status code 500: Traceback:\n  File …\nTimeoutError: no agent\n."), no_agent]
    assert submit(tmp_path) == 2
    assert "did not take the job (TimeoutError: no agent)." in capsys.readouterr().err


def test_a_lost_connection_repeats_and_loses_nothing(
    client: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    client.logs = [["step 1\nst", RuntimeError("closed")], [OSError("no route")], ["step 1\nstep 2\n"], list(LINES)]
    assert submit(tmp_path) == 0
    out, err = capsys.readouterr()
    assert out.startswith("".join(LINES)) and out.count("step 1") == 1
    assert err.count("The connection to http://head:8265 is lost.") == err.count("Connected again.") == 1


def test_a_cluster_that_answers_no_more_is_given_up(
    client: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_server, "GIVE_UP_AFTER_S", 0.0)
    client.logs = [[RuntimeError("closed")] for _ in range(9)]
    assert submit(tmp_path) == 1
    assert "has not answered for 0 minutes; `raytrain show` says how far the run is." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        ("exit code 1\nModuleNotFoundError: No module named 'obstore'", "the cluster's Python lacks obstore"),
        ("exit code 2", "Job raytrain_1 failed; its log is above"),
    ],
)
def test_a_job_that_fails_has_a_sentence(
    message: str, sentence: str, client: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    client.end, client.message = JobStatus.FAILED, message
    assert submit(tmp_path) == 1
    assert sentence in capsys.readouterr().err


@pytest.mark.not_quick
def test_ctrl_c_stops_the_run_with_a_checkpoint_if_nobody_can_be_asked(client: Any, tmp_path: Path) -> None:
    write_config(run_store(str(tmp_path), "first"), config("s3://b/train", tmp_path, name="first", recipe="cifar10"))
    write_status(run_store(str(tmp_path), "first"), RunStatus(status="running"))
    interrupt_during_the_log(client, until=(tmp_path / "first" / "stop-request.json").exists)
    assert submit(tmp_path, "--name", "first", "--resume", "--trust") == 0
    reason = read_stop_request(run_store(str(tmp_path), "first"))
    assert reason == StopReason("signal", "SIGINT")
    assert client.stopped == ""


@pytest.mark.not_quick
def test_ctrl_c_before_the_run_is_there_stops_the_job(client: Any, tmp_path: Path) -> None:
    interrupt_during_the_log(client, until=lambda: bool(client.stopped))
    assert submit(tmp_path, "--name", "first") == 0
    assert client.stopped == "raytrain_1"


@pytest.mark.not_quick
def test_who_is_asked_may_leave_the_run_running(
    client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answered = threading.Event()
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("builtins.input", lambda: answered.set() or "l")
    interrupt_during_the_log(client, until=answered.is_set)
    assert submit(tmp_path, "--name", "first") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["status"] == "detached"
    assert client.stopped == ""


@pytest.mark.not_quick
def test_who_gives_no_answer_stops_the_run_as_the_question_says(
    client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ctrl_d() -> str:
        assert "[s]" in capsys.readouterr().err
        raise EOFError

    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("builtins.input", ctrl_d)
    interrupt_during_the_log(client, until=lambda: bool(client.stopped))
    assert submit(tmp_path, "--name", "first") == 0


@pytest.mark.not_quick
def test_a_run_goes_on_without_the_terminal_that_follows_it(
    client: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    is_over = threading.Event()  # the thread that waits for it would hold up the end of the tests
    interrupt_during_the_log(client, until=is_over.is_set, number=signal.SIGHUP)
    assert submit(tmp_path, "--name", "first") == 0
    is_over.set()
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["status"] == "detached"
    assert client.stopped == ""


def interrupt_during_the_log(client: Any, until: Callable[[], bool], number: int = signal.SIGINT) -> None:
    """Have the job print its lines, and end once ``until`` holds, which a signal in the main thread brings about."""

    async def tail(self: Any, job: str) -> AsyncIterator[str]:
        yield LINES[0]
        signal.pthread_kill(threading.main_thread().ident or 0, number)
        await asyncio.to_thread(wait_for, until)
        self.is_over = True

    client.tail_job_logs = tail


@pytest.mark.parametrize(
    ("given", "expected"),
    [("http://head:8265/", "http://head:8265"), ("head:8265", "http://head:8265"), ("https://head", "https://head")],
)
def test_addresses_of_job_servers(given: str, expected: str) -> None:
    assert job_server_url(given) == expected


def test_the_environment_names_the_job_server_as_ray_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "http://one:8265")
    assert job_server_url(None) == "http://one:8265"
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://two:8265")
    assert job_server_url(None) == "http://two:8265"


@pytest.mark.parametrize("given", ["head:6379", "ray://head:10001", "auto", "local", "", "head:abc", "head:99999"])
def test_other_addresses_are_no_job_servers(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS", raising=False)
    with pytest.raises(UsageError, match="give the cluster's job server, http://HOST:8265"):
        job_server_url(given)


def test_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_server, "GCS_PORT", 1)  # a Ray of somebody else may be at its usual port
    with pytest.raises(UsageError, match=r"No job server answers at http://127\.0\.0\.1:1 .* its port forwarded\?"):
        JobServer("http://127.0.0.1:1")


def test_the_cluster_answers_but_not_its_job_server(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gcs:
        monkeypatch.setattr(job_server, "GCS_PORT", gcs.getsockname()[1])
        with pytest.raises(UsageError, match=r"answers, but its job server at http://127\.0\.0\.1:1 does not; forward"):
            JobServer("http://127.0.0.1:1")


def test_a_ray_that_is_too_old_is_said_at_once() -> None:
    wanted = "has Ray 2.40.0, and raytrain needs 2.53 or newer"
    with served({"ray_version": "2.40.0"}) as address, pytest.raises(UsageError, match=wanted):
        JobServer(address)


def test_packages_and_connections_of_rays_client_are_not_reported() -> None:
    with served({"ray_version": ray.__version__}) as address:
        JobServer(address)
    for name in ("dashboard.modules.dashboard_sdk", "dashboard.modules.job.sdk", "_private.runtime_env.packaging"):
        assert not logging.getLogger(f"ray.{name}").isEnabledFor(logging.INFO), name


def test_a_forwarded_port_is_not_reached_through_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setenv("no_proxy", "elsewhere")
    with served({"ray_version": ray.__version__}) as address:
        assert JobServer(address).address == address
        assert JobServer(address.replace("127.0.0.1", "localhost"))
    assert os.environ["no_proxy"].startswith("elsewhere,127.0.0.1")


@contextlib.contextmanager
def served(answer: dict[str, str]) -> Iterator[str]:
    """A server that gives one answer to everything."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("", "Give train or sweep after --, such as"),
        ("trian cifar10", "Give train or sweep after --, not trian (did you mean train?), such as"),
        ("stop first", "Give train or sweep after --, not stop"),
        ("train cifra10 --data s3://b/x", "There is no recipe 'cifra10'"),
        ("train cifar10 --data s3://b/x --storage s3://b/r --epochs 0", "--epochs is 0"),
        ("train cifar10 --data s3://b/x --storage s3://b/r --address auto", "--address is the job server's"),
        ("train cifar10 --data images --storage s3://b/r", "--data is images"),
        ("train cifar10 --storage s3://b/r", "--data is missing"),
        *(
            (f"train cifar10 --data s3://b/x --storage s3://b/r {options}", sentence)
            for options, sentence in (
                ("--loop my_loop.py:train", "my_loop.py has no function 'train'"),
                ("--loop my_lop.py:loop", "there is no file my_lop.py"),
                ("--loop my_lop:loop", "there is no module my_lop"),
                ("--loop my_loop.py", "--loop my_loop.py names no function"),
                ("--loop broken.py:loop", "SyntaxError"),
                ("--model resnet81", "--model resnet81 is no classifier of torchvision"),
                ("--model my_loop.py:Net", "my_loop.py has no function 'Net'"),
                ("--transforms my_loop.py:crop", "my_loop.py has no function 'crop'"),
                ("--track my_loop.py:Sheet", "my_loop.py has no function 'Sheet'"),
                ("--best acc", "--best needs acc"),
            )
        ),
        ("sweep cifar10 --data s3://b/x --storage s3://b/r --vary learnig-rate=1,2", "learnig-rate"),
        ("sweep cifar10 --data s3://b/x --storage s3://b/r", "--vary is missing"),
        ("sweep cifar10 --data s3://b/x --storage s3://b/r --folds 3 --pruner median", "measured to their end"),
    ],
)
def test_a_mistake_is_one_sentence(
    line: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_loop.py").write_text("import only_on_the_cluster\ndef loop(run): pass\n")
    (tmp_path / "broken.py").write_text("def loop(run:\n")
    assert main(["submit", "--address", "http://127.0.0.1:1", "--", *line.split()]) == 2
    assert sentence in capsys.readouterr().err


def test_the_scripted_client_has_the_methods_of_rays() -> None:
    methods = [name for name in vars(ScriptedClient) if callable(getattr(ScriptedClient, name)) and name[:2] != "__"]
    assert methods and all(hasattr(JobSubmissionClient, name) for name in methods)


def test_a_stop_is_asked_for_again_until_a_lost_cluster_answers(
    client: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals: list[Exception] = [ConnectionError("refused"), RuntimeError("Request failed with status code 502")]

    def stop_job(self: Any, job: str) -> None:
        if refusals:
            raise refusals.pop(0)
        type(self).stopped = job

    client.stop_job = stop_job
    monkeypatch.setattr(job_server, "_POLL_EVERY_S", 0.01)
    interrupt_during_the_log(client, until=lambda: bool(client.stopped))
    assert submit(tmp_path, "--name", "first") == 0
    assert capsys.readouterr().err.count("The run is asked to stop") == 1


def test_a_job_that_a_new_head_does_not_know_is_no_lost_connection(
    client: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def status(self: Any, job: str) -> JobStatus:
        raise RuntimeError(f"Request failed with status code 404: Job {job} does not exist.")

    client.get_job_status = status
    client.logs = [[LINES[0], RuntimeError("closed")], [OSError("no route")], [OSError("404")]]
    assert submit(tmp_path, "--name", "first") == 1
    assert "The cluster at http://head:8265 no longer knows job raytrain_1" in capsys.readouterr().err


def test_a_log_that_nobody_reads_on_is_no_lost_connection(client: Any, tmp_path: Path) -> None:
    def show(text: str) -> None:
        raise BrokenPipeError

    notes: list[str] = []
    sent = job_server.Submission(JobServer("http://head:8265"), "raytrain_1", "first", str(tmp_path))
    with pytest.raises(BrokenPipeError):
        job_server.follow_job(sent, show, notes.append, lambda: True)
    assert notes == ["The output cannot be written here any more. The job goes on."] and client.stopped == ""


def test_a_doctor_that_is_not_heard_of_ends_with_a_sentence(
    client: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop_job(self: Any, job: str) -> None:
        raise ConnectionError("refused")

    monkeypatch.setattr(job_server, "GIVE_UP_AFTER_S", 0.0)
    client.stop_job, client.logs = stop_job, [[RuntimeError("closed")] for _ in range(9)]
    words = ["--", "train", "cifar10", "--data", "s3://b/train", "--storage", "s3://b/runs"]
    assert main(["submit", "--address", "http://head:8265", "--dry-run", *words]) == 1
    assert "has not answered for 0 minutes" in capsys.readouterr().err
