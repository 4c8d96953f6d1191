"""A run behind HTTP: many clients at once get what the network says of their own image."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image

import raytrain
from raytrain.cli.main import main
from raytrain.errors import UsageError
from raytrain.monitor.stop_request import StopReason, StopSignals
from raytrain.training.networks.model import build_model
from tests.helpers.image_files import encoded
from tests.helpers.ray_head import free_port
from tests.helpers.stored_runs import ANIMALS, add_checkpoint, make_run, options
from tests.helpers.waiting import wait_for

_DECODER = "raytrain.data.images.decode_process"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A storage folder with the run ``first``, whose network has random weights."""
    config = options()
    add_checkpoint(make_run(tmp_path / "runs", config), build_model(config.model, len(ANIMALS), 1, 0), config)
    return tmp_path / "runs"


def ask(url: str, content: bytes | None = None, host: str | None = None) -> tuple[int, dict[str, Any]]:
    """POST an image file, or GET; returns the status and the JSON of the answer. ``host`` is the Host header."""
    headers = {} if host is None else {"Host": host}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data=content, headers=headers), timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        text = error.read().decode()
        return error.code, json.loads(text) if text.startswith("{") else {}


def replicas() -> list[psutil.Process]:
    """The processes that answer in this process's cluster; other clusters on this machine may have some, too."""
    import ray

    port = int(ray.get_runtime_context().gcs_address.rpartition(":")[2])
    named = (each for each in psutil.process_iter(["cmdline"]) if "ServeReplica" in "".join(each.info["cmdline"] or ()))
    joined = [each for each in named if any(at.raddr and at.raddr.port == port for at in each.net_connections("tcp"))]
    assert joined
    return joined


def listening(processes: list[psutil.Process]) -> set[str]:
    """The addresses of this machine at which they listen."""
    connections = [connection for each in processes for connection in each.net_connections("tcp")]
    listeners = [connection for connection in connections if connection.status == psutil.CONN_LISTEN]
    return {listener.laddr.ip.removeprefix("::ffff:") for listener in listeners}


@contextmanager
def serving(runs: Path, port: int) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """``raytrain serve first`` in the cluster of the tests; gives its URL and its process."""
    import ray
    from ray import serve

    words = ["--storage", str(runs), "--port", str(port), "--address", ray.get_runtime_context().gcs_address]
    command = [sys.executable, "-m", "raytrain", "serve", "first", *words, "--top-k", "2"]
    process = subprocess.Popen(command, env={**os.environ}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        assert line.startswith("Serving at "), process.stderr.read()
        yield line.split()[2].rstrip(","), process
    finally:
        process.kill()
        process.wait()
        serve.shutdown()


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_clients_at_the_same_time_get_the_classes_of_their_own_images(runs: Path) -> None:
    random = np.random.default_rng(0)
    images = [encoded(Image.fromarray(random.integers(0, 256, (20, 12), np.uint8)), "PNG") for _ in range(100)]
    expected = raytrain.load("first", storage=str(runs)).classify(images)
    with serving(runs, free_port()) as (url, process):
        assert ask(url, host="evil.example")[0] == 403
        assert "127.0.0.1" in listening(replicas()), "for other replicas; Ray's own port is beside it"
        assert ask(url) == (200, {"run": "first", "checkpoint": ask(url)[1]["checkpoint"], "classes": list(ANIMALS)})
        assert ask(url, b"no image")[0] == 400
        assert ask(url, b"")[1] == {"error": "the file is empty"}
        with ThreadPoolExecutor(32) as clients:
            answers = list(clients.map(lambda image: ask(url, image), images))
        assert [(status, answer["label"]) for status, answer in answers] == [(200, label) for label, _ in expected]
        for (_, answer), (_, score) in zip(answers, expected, strict=True):
            assert answer["score"] == pytest.approx(score, abs=1e-5)
            first, second = answer["classes"]
            assert first == {"label": answer["label"], "score": answer["score"]} and second["score"] <= first["score"]
        decoders = [child for each in replicas() for child in each.children() if _DECODER in child.cmdline()]
        assert decoders
        for each in decoders:
            each.kill()
        assert ask(url, images[0])[0] == 200, "an image that kills its decoder does not end what serves"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert ask(url)[0] == 404, "what was served is gone; Ray Serve stays in the cluster"


def test_a_port_in_use_is_refused_before_a_cluster_starts(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert main(["serve", "first", "--storage", str(runs), "--port", str(port), "--address", "local"]) == 2
    assert f"--port {port} cannot be used: Address already in use" in capsys.readouterr().err


def test_a_run_that_does_not_exist_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "second", "--storage", str(tmp_path)]) == 2
    assert "'second'" in capsys.readouterr().err


@pytest.mark.parametrize(("option", "number"), [("--top-k", 0), ("--top-k", -1), ("--workers", 0)])
def test_an_answer_without_a_class_or_a_network_is_refused_before_a_cluster_starts(
    option: str, number: int, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as other:  # the port is looked at later, and is taken
        other.bind(("127.0.0.1", 0))
        other.listen()
        words = [option, str(number), "--port", str(other.getsockname()[1]), "--address", "local"]
        assert main(["serve", "first", "--storage", str(runs), *words]) == 2
    assert f"{option} is {number}; it must be at least 1" in capsys.readouterr().err


def test_the_answer_of_this_machine_does_not_come_through_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    from raytrain.launch.ray import http_server

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="127.0.0.1:1"))
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/run"
        assert http_server.wait_until_loaded("127.0.0.1", server.server_port, "run", StopSignals()) == url
        server.shutdown()


def test_the_wait_for_a_network_is_told_once_and_ended_by_a_stop_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import ray

    from raytrain.launch.ray import http_server

    asked: list[str] = []
    signals = StopSignals()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            if len(asked) == 3:
                signals.request_stop(StopReason("signal", "SIGINT"))
            self.send_response(503)
            self.end_headers()

    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="127.0.0.1:1"))
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        url = http_server.wait_until_loaded("127.0.0.1", server.server_port, "run", signals)
        server.shutdown()
    assert asked == ["/run"] * 3
    assert caplog.messages == [f"loading the network of run; until then, {url} answers 503 …"]


def test_a_replica_that_dies_while_it_loads_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    from raytrain.launch.ray import http_server

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(500)
            self.end_headers()
            self.wfile.write(b"Internal Server Error\nThe actor died unexpectedly before finishing this task.")

    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="127.0.0.1:1"))
    sentence = r"^Ray Serve could not start run 'run': The actor died unexpectedly before finishing this task\.$"
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        with pytest.raises(UsageError, match=sentence):
            http_server.wait_until_loaded("127.0.0.1", server.server_port, "run", StopSignals())
        server.shutdown()


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_a_run_that_is_served_is_refused_until_its_command_has_ended_in_whatever_way(runs: Path) -> None:
    import ray
    from ray import serve

    port, address = free_port(), ray.get_runtime_context().gcs_address
    words = ["serve", "first", "--port", str(port), "--address", address]
    elsewhere = str(shutil.copytree(runs, runs.parent / "elsewhere"))
    with serving(runs, port) as (url, process):
        for storage in (str(runs), elsewhere):
            assert main([*words, "--storage", storage]) == 2
        assert ask(url)[0] == 200, "the first one goes on"
        process.kill()
        process.wait()
        assert ask(url)[0] == 200, "Ray Serve keeps what a killed command has served"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("raytrain.inference.serve.StopSignals", StoppedSignals)
            wait_for(lambda: main([*words, "--storage", elsewhere]) == 0)
        assert serve.status().applications == {}


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_serving_waits_for_room_in_the_cluster_and_a_signal_ends_that(runs: Path) -> None:
    import ray
    from ray import serve

    others = ray.util.placement_group([{"CPU": 2}])
    assert others.wait(60)
    words = ["--storage", str(runs), "--port", str(free_port()), "--address", ray.get_runtime_context().gcs_address]
    command = [sys.executable, "-m", "raytrain", "serve", "first", *words]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        lines = (line for line in process.stderr if "not served yet" in line)
        assert "each of its networks takes 1 CPU, and the cluster has 0 CPUs free" in next(lines)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert serve.status().applications == {}
    finally:
        process.kill()
        process.wait()
        serve.shutdown()
        ray.util.remove_placement_group(others)


class StoppedSignals(StopSignals):
    """Signals of which one has arrived before the network was loaded."""

    stop_request = StopReason("signal", "SIGINT")


@pytest.fixture
def applications(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a Ray Serve that starts nothing serves, by name: it runs from the second look at its status on."""
    from ray import serve

    from raytrain.launch.ray import http_server

    applications: dict[str, Any] = {}

    def run_many(targets: list[Any], wait_for_applications_running: bool) -> None:
        (target,) = targets
        applications[target.name] = SimpleNamespace(url=target.target, status="DEPLOYING")

    def status() -> Any:
        seen = {name: SimpleNamespace(**vars(application)) for name, application in applications.items()}
        for application in applications.values():
            application.status = "RUNNING"
        return SimpleNamespace(applications=seen)

    served_here = SimpleNamespace(
        deployment=lambda **_: lambda replica: SimpleNamespace(bind=lambda model, *_: model.store.url),
        start=lambda **_: None,
        status=status,
        run_many=run_many,
        RunTarget=serve.RunTarget,
        delete=lambda name: applications.pop(name, None),
    )
    monkeypatch.setattr(http_server, "serve", served_here)
    monkeypatch.setattr(http_server, "check_guarded", lambda host: None)
    monkeypatch.setattr(http_server, "wait_until_loaded", lambda host, port, run, signals: f"/{run}")
    return applications


def served_run(name: str, url: str) -> Any:
    from raytrain.launch.ray import http_server

    placement: Any = SimpleNamespace(num_workers=1, cpus=1.0, device="cpu", threads=1)
    model: Any = SimpleNamespace(run=name, store=SimpleNamespace(url=url))
    return http_server.serving(model, placement, "127.0.0.1", 8000, StopSignals())


def test_what_a_killed_command_has_served_is_replaced(applications: dict[str, Any]) -> None:
    killed = served_run("first", "s3://mine/first")
    killed.__enter__()  # and its command comes to no end of its own
    with served_run("first-2", "s3://yours/first-2"), served_run("2", "s3://yours/2"):
        assert len(applications) == 3
        with served_run("first", "s3://yours/first"):
            assert sorted(each.url for each in applications.values()) == [
                "s3://yours/2",
                "s3://yours/first",
                "s3://yours/first-2",
            ]
    assert not applications


@pytest.mark.usefixtures("applications")
@pytest.mark.parametrize(
    ("free", "reason"),
    [
        (0.0, "each of its networks takes 1 CPU, and the cluster has 0 CPUs free; waiting"),
        (1.0, "Ray Serve is starting"),
    ],
)
def test_a_slow_start_is_not_taken_for_a_lack_of_room(
    free: float, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import ray

    from raytrain.launch.ray import http_server

    monkeypatch.setattr(http_server, "_REPORT_AFTER_S", 0.0)
    monkeypatch.setattr(ray, "available_resources", lambda: {"CPU": free})
    with served_run("first", "s3://mine/first"):
        assert f"first is not served yet: {reason}" in caplog.text


def test_a_replica_holds_files_up_to_a_limit_and_then_says_try_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from raytrain.launch.ray import http_server

    def decode(file: bytes, *_: object) -> int:
        return len(file)

    monkeypatch.setattr(http_server, "MAX_HELD_BYTES", 100)
    monkeypatch.setattr(http_server, "DecodeProcess", lambda shape: SimpleNamespace(decode=decode))
    replica = http_server.Replica(served(lambda *_: None), 1)
    # Ray refuses to gather images in a process that is no replica of Serve.
    monkeypatch.setattr(replica, "_classify", lambda size: asyncio.sleep(0, {"size": size}))
    wait_until_loaded(replica)

    async def scenario() -> None:
        rest = asyncio.Event()
        slow = asyncio.create_task(replica(posted(b"x" * 80, rest)))
        await asyncio.sleep(0)  # lets the task begin
        refused = await replica(posted(b"y" * 30))
        assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
        rest.set()
        assert json.loads(bytes((await slow).body)) == {"size": 80}
        assert (await replica(posted(b"y" * 90))).status_code == 200  # what was held is free again, refused or not

    asyncio.run(scenario())


def served(load: Callable[..., object]) -> Any:
    """The network of the run ``first``, loaded by ``load``."""
    return SimpleNamespace(
        run="first",
        checkpoint="checkpoints/5.pt",
        classes=("cat", "dog"),
        load_predictor=load,
        store=None,
        format=SimpleNamespace(shape=(8, 8, 3), cropping=SimpleNamespace(crop=None)),
    )


def wait_until_loaded(replica: Any) -> None:
    """Wait until the replica has its network, or says why it has none."""
    wait_for(lambda: asyncio.run(replica(posted(b"", method="GET"))).status_code != 503)


def test_a_replica_answers_while_it_loads_and_says_why_it_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    from raytrain.launch.ray import http_server

    loading = threading.Event()

    def load(*_: object) -> None:
        loading.wait()
        raise UsageError("the weights are damaged.")

    replica = http_server.Replica(served(load), 1)

    async def scenario() -> None:
        early = await replica(posted(b"x"))
        assert (early.status_code, early.headers["Retry-After"]) == (503, "1") and b"is being loaded" in bytes(
            early.body
        )
        page = await replica(posted(b"", method="GET", headers={"accept": "text/html,*/*"}))
        assert (page.status_code, page.media_type) == (200, "text/html")
        loading.set()
        await asyncio.to_thread(wait_until_loaded, replica)
        late = await replica(posted(b"x"))
        assert late.status_code == 500 and b"the weights are damaged" in bytes(late.body)
        assert (await replica(posted(b"x", path="/second"))).status_code == 404

    asyncio.run(scenario())


@pytest.mark.parametrize("boundary", ["xyz", '"xyz"'])
def test_the_file_of_a_form_is_taken_byte_for_byte(boundary: str) -> None:
    from raytrain.launch.ray import http_server

    content = bytes(range(256)) + b"\r\n\r\n--xy\r\n"
    field = b'--xyz\r\nContent-Disposition: form-data; name="filename"\r\n\r\nhello\r\n'  # a text, whatever its name
    file = (
        b'--xyz\r\nContent-Disposition: form-data; name="file"; filename="a.png"\r\n\r\n' + content + b"\r\n--xyz--\r\n"
    )
    kind = f"multipart/form-data; boundary={boundary}"
    assert http_server.posted_file(kind, field + file) == content
    assert http_server.posted_file("image/png", file) == file
    with pytest.raises(http_server.RefusedRequest, match="the form has no file"):
        http_server.posted_file(kind, field + b"--xyz--")
    with pytest.raises(http_server.RefusedRequest, match="the form has 2 files; send each in a request of its own"):
        http_server.posted_file(kind, file.removesuffix(b"--xyz--\r\n") + file)
    nothing = b'--xyz\r\nContent-Disposition: form-data; name="other"; filename=""\r\n\r\n\r\n'
    assert http_server.posted_file(kind, nothing + file) == content


def test_a_form_with_its_file_after_many_parts_is_refused_and_headers_have_a_limit() -> None:
    from raytrain.launch.ray import http_server

    kind = "multipart/form-data; boundary=a"
    file = b'--a\r\nContent-Disposition: form-data; name="file"; filename="a.png"\r\n\r\npixels\r\n--a--\r\n'
    assert http_server.posted_file(kind, b"--a\r\n\r\n1\r\n" * 63 + file) == b"pixels"
    with pytest.raises(http_server.RefusedRequest, match="no file in its first 64 parts; send the file first"):
        http_server.posted_file(kind, b"--a\r\n\r\n1\r\n" * 64 + file)
    with pytest.raises(http_server.RefusedRequest, match="the form has no file"):
        http_server.posted_file(kind, b"--a\r\n" + b"x" * (9 << 10) + file[5:])
    # A boundary counts at the beginning of a line only.
    with pytest.raises(http_server.RefusedRequest, match="the form has no file"):
        http_server.posted_file(kind, b"--axy" * 1000)


def test_the_file_of_a_form_is_looked_for_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    from raytrain.launch.ray import http_server

    threads: list[threading.Thread] = []

    def look(content_type: str, body: bytes) -> bytes:
        threads.append(threading.current_thread())
        raise http_server.RefusedRequest(400, "the form has no file")

    monkeypatch.setattr(http_server, "posted_file", look)
    monkeypatch.setattr(http_server, "DecodeProcess", lambda shape: None)
    replica = http_server.Replica(served(lambda *_: None), 1)
    wait_until_loaded(replica)
    assert asyncio.run(replica(posted(b"x"))).status_code == 400
    assert threads and threading.main_thread() not in threads


@pytest.mark.parametrize(
    ("serves_at", "host", "status"),
    [
        ("127.0.0.1", "evil.example", 403),
        ("127.0.0.1", "evil.example:8000", 403),
        ("localhost", "localhost.evil.example", 403),
        ("127.1", "evil.example", 403),
        ("127.0.0.1", "127.0.0.1.evil.example:8000", 403),
        ("127.0.0.1", "192.0.2.1", 403),
        ("127.0.0.1", "0.0.0.0:8000", 403),
        ("127.0.0.1", "LOCALHOST:8000", 200),
        ("127.0.0.1", "127.0.0.1", 200),
        ("127.0.0.1", "[::1]:8000", 200),
        ("127.1", "127.1:8000", 200),
        ("0.0.0.0", "photos.example", 200),
    ],
)
def test_on_loopback_only_this_machine_by_its_own_names_is_answered(
    serves_at: str, host: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from raytrain.launch.ray import http_server

    monkeypatch.setattr(http_server, "DecodeProcess", lambda shape: None)
    monkeypatch.setattr(http_server.ray.util, "get_node_ip_address", lambda: "192.0.2.2")
    monkeypatch.setattr(http_server, "bind_replica", lambda address: None)
    local_host = serves_at if http_server.listens_on_loopback(serves_at) else None
    replica = http_server.Replica(served(lambda *_: None), 1, local_host)
    for method in ("GET", "POST") if status == 403 else ("GET",):
        answer = asyncio.run(replica(posted(b"", method=method, headers={"host": host, "accept": "text/html"})))
        assert answer.status_code == status


def test_a_ray_whose_replicas_unpickle_before_they_ask_for_the_token_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ray.serve._private import replica

    from raytrain.launch.ray import http_server

    http_server.check_guarded("127.0.0.1")
    monkeypatch.delattr(replica, "create_grpc_server_with_interceptors")
    with pytest.raises(UsageError, match=r"^Ray [\d.]+ cannot be used by raytrain serve: .* install Ray 2\.60 or"):
        http_server.check_guarded("127.0.0.1")


@pytest.mark.parametrize(
    ("host", "address", "has_token", "refused"),
    [
        ("0.0.0.0", "192.0.2.2", False, True),
        ("192.0.2.2", "192.0.2.2", False, True),
        ("0.0.0.0", "192.0.2.2", True, False),
        ("0.0.0.0", "127.0.0.1", False, False),
        ("127.0.0.1", "192.0.2.2", False, False),
    ],
)
def test_a_cluster_without_a_token_serves_on_loopback_only(
    host: str, address: str, has_token: bool, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from raytrain.launch.ray import http_server

    node = SimpleNamespace(address=address)
    on_each = lambda function, timeout_s: (SimpleNamespace(node=node, result=function(node), error=None),)  # noqa: E731
    monkeypatch.setattr(http_server, "run_on_each_node", on_each)
    monkeypatch.setattr(http_server, "asks_for_token", lambda: has_token)
    monkeypatch.setattr(http_server.ray.util, "get_node_ip_address", lambda: address)
    if not refused:
        http_server.check_guarded(host)
        return
    with pytest.raises(UsageError, match=rf"^--host is {host}, and the Ray of the node {address} asks for no token"):
        http_server.check_guarded(host)


def posted(
    content: bytes,
    rest: asyncio.Event | None = None,
    method: str = "POST",
    path: str = "/first",
    headers: dict[str, str] | None = None,
) -> Any:
    """A request whose body ends once ``rest`` is set."""

    async def stream() -> AsyncIterator[bytes]:
        yield content
        if rest is not None:
            await rest.wait()

    return SimpleNamespace(method=method, stream=stream, url=SimpleNamespace(path=path), headers=headers or {})
