"""The fork server of a node: what its processes take over, when it forks none, and what runs instead."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

import raytrain
from raytrain.launch.ray import fork_client, fork_server
from raytrain.launch.ray.fork_client import GO, READY, connect, py_executable, ray_program, traits, worker_program
from raytrain.launch.ray.own_cluster import lean

pytestmark = [
    pytest.mark.not_quick,
    pytest.mark.skipif(sys.platform != "linux", reason="the fork server is for Linux"),
]

PATIENCE_S = 240.0
USAGE = "usage: default_worker.py"
FORK_TWO = """
import gc, os
from threading import Thread
from raytrain.launch.ray.fork_server import import_all

import_all()
for _ in range(2):
    if not os.fork():
        assert gc.isenabled()
        import ray
        drawn = [ray.ObjectRef.from_random().hex()]
        thread = Thread(target=lambda: drawn.append(ray.ObjectRef.from_random().hex()))
        thread.start()
        thread.join()
        print(*drawn, flush=True)
        os._exit(0)
    os.wait()
"""
TAKE_OVER = """
import json, os, sys, tempfile, time
from raytrain.launch.ray import fork_server
from raytrain.launch.ray.fork_client import traits
import numpy, torch

tempfile.gettempdir(), time.localtime()  # both remember what they have found
taken = json.loads(sys.stdin.read())
for _ in range(2):
    if not os.fork():
        fork_server.take_over(taken)
        drawn = torch.initial_seed(), int(numpy.random.randint(2**31))
        places = time.strftime("%z"), tempfile.gettempdir()
        print(json.dumps([traits(sys.argv), sys.path, places, *drawn]), flush=True)
        os._exit(0)
    os.wait()
"""
SERVE = """
import socket
from raytrain.launch.ray import fork_server

fork_server.IDLE_S = 0.1
with socket.socket(socket.AF_UNIX) as listener:
    listener.bind(b"")
    listener.listen()
    print(listener.getsockname().hex(), flush=True)
    fork_server.receive_traits(fork_server.serve(listener))
"""
SERVE_MANY = """
import socket, sys
from raytrain.launch.ray import fork_server

with socket.socket(socket.AF_UNIX) as listener:
    listener.bind(b"")
    listener.listen()
    print(listener.getsockname().hex(), flush=True)
    with fork_server.serve(listener):
        print("torch._dynamo" in sys.modules, flush=True)
"""


class Asked:
    """A process that was asked for over the protocol, with the output that it has."""

    def __init__(self, arguments: list[str]) -> None:
        self.connection = connect(ray_program())
        self.connection.settimeout(PATIENCE_S)
        output, written = os.pipe()
        with open(os.devnull) as nothing:
            socket.send_fds(self.connection, [b" "], [nothing.fileno(), written, written])
        os.close(written)
        self._output = open(output, errors="replace")  # noqa: SIM115 ; closed in output()
        self.connection.sendall(json.dumps(traits([ray_program(), *arguments])).encode() + b"\n")
        assert self.connection.recv(len(READY)) == READY

    def output(self) -> str:
        """All that it writes until it ends."""
        self.connection.close()
        with self._output as output:
            return output.read()


@pytest.fixture(scope="module", autouse=True)
def own_server() -> Iterator[None]:
    """A fork server for these tests alone, which ends soon after them."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("PYTHONPYCACHEPREFIX", "")
        with connect(ray_program()):
            yield


def run_alone(*arguments: str, folder: Path | None = None) -> str:
    """What is printed if Ray runs the client in place of its own program."""
    return _printed(f"exec {sys.executable} {worker_program()} {' '.join(arguments)}", folder)


def run(program: str, *arguments: str, folder: Path | None = None) -> str:
    """What is printed if Ray runs its ``program`` with ``py_executable``."""
    return _printed(f"exec {py_executable()} {program} {' '.join(arguments)}", folder)


def _printed(command: str, folder: Path | None) -> str:
    done = subprocess.run(
        ["bash", "-c", command], stdout=subprocess.PIPE, text=True, check=True, timeout=PATIENCE_S, cwd=folder
    )
    return done.stdout


def test_a_process_becomes_rays_with_the_output_of_its_client_once_the_client_says_go() -> None:
    asked = Asked(["--help"])
    asked.connection.sendall(GO)
    assert USAGE in asked.output()


def test_a_process_of_a_ray_that_a_run_starts_for_itself_is_forked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", lean(os.environ)["PYTHONPATH"])
    asked = Asked(["--help"])
    asked.connection.sendall(GO)
    assert USAGE in asked.output()


def test_no_process_runs_for_a_client_that_has_died_before_it_says_go() -> None:
    assert Asked(["--help"]).output() == ""


def test_ray_runs_the_client_with_its_own_program() -> None:
    assert USAGE in run(ray_program(), "--help")


def test_ray_runs_the_client_in_place_of_its_own_program() -> None:
    assert USAGE in run_alone("--help")


def test_modules_in_the_users_folder_are_not_taken_for_pythons_own(tmp_path: Path) -> None:
    for name in ("resource", "json", "socket", "torch"):
        (tmp_path / f"{name}.py").write_text("import pathlib; pathlib.Path(__file__).with_name('read').touch()")
    assert USAGE in run(ray_program(), "--help", folder=tmp_path)
    assert not (tmp_path / "read").exists()


def other_ray(folder: Path) -> str:
    """The program of a Ray in a Python environment of its own, which prints its arguments."""
    python, program = folder / "bin" / "python", folder / "lib" / "python3.11" / "ray" / "a" / "b" / "default_worker.py"
    for file, text in ((python, f'#!/bin/sh\nexec {sys.executable} "$@"\n'), (program, "import sys; print(sys.argv)")):
        file.parent.mkdir(parents=True)
        file.write_text(text)
    python.chmod(0o755)
    return str(program)


def test_another_ray_runs_its_own_program_in_its_own_python(tmp_path: Path) -> None:
    program = other_ray(tmp_path)
    assert run(program, "--a=b") == f"{[program, '--a=b']}\n"


def test_a_node_without_raytrain_runs_its_own_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_client, "__file__", str(tmp_path / "none"))
    program = other_ray(tmp_path)
    assert run(program, "--a=b") == f"{[program, '--a=b']}\n"


def test_a_process_takes_over_limits_niceness_cores_mask_places_and_variables_and_draws_numbers_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    wanted = traits(["program", "--an=argument"])
    wanted |= {"niceness": wanted["niceness"] + 1, "cores": wanted["cores"][:1], "umask": 0o027}
    wanted["limits"] = [
        [kind, 77 if kind == resource.RLIMIT_NOFILE else soft, hard] for kind, soft, hard in wanted["limits"]
    ]

    others = {**os.environ, "TZ": "UTC", "TMPDIR": "/tmp"}
    done = subprocess.run(
        [sys.executable, "-c", TAKE_OVER],
        input=json.dumps(wanted | {"variables": {**os.environ, "TZ": "Asia/Tokyo", "TMPDIR": str(tmp_path)}}),
        env={name: value for name, value in others.items() if name != "PYTHONPATH"},
        cwd="/",
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    (first, path, places, *drawn), (_, _, _, *drawn_by_another) = map(json.loads, done.stdout.splitlines())
    assert first.pop("variables")["TZ"] == "Asia/Tokyo"
    assert first == json.loads(json.dumps({name: value for name, value in wanted.items() if name != "variables"}))
    assert path[:2] == ["", str(tmp_path)]
    assert places == ["+0900", str(tmp_path)]
    assert all(one != other for one, other in zip(drawn, drawn_by_another, strict=True))


def test_a_module_of_the_users_that_is_imported_already_from_elsewhere_is_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "users_module.py").touch()
    (tmp_path / "logging.yaml").touch()  # no module, and neither is a folder without Python files
    (tmp_path / "site").mkdir()
    assert fork_server.python_path() == [str(tmp_path)]
    (tmp_path / "socket.py").touch()
    with pytest.raises(ImportError, match=f"socket of {tmp_path}"):
        fork_server.python_path()


def test_the_folder_of_an_imported_module_may_be_named_through_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = tmp_path / "link"
    link.symlink_to(Path(raytrain.__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", str(link))
    assert fork_server.python_path() == [str(link)]


def test_a_process_ends_with_the_raylet_that_it_is_for() -> None:
    with subprocess.Popen(["sleep", "1000"]) as raylet, pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("RAY_RAYLET_PID", str(raylet.pid))
        asked = Asked(["--help"])  # it waits for "go"
        raylet.kill()
        assert asked.connection.recv(1) == b""


def test_another_users_process_is_refused_by_client_and_server(monkeypatch: pytest.MonkeyPatch) -> None:
    user = os.getuid()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(b"")
        listener.listen()
        address = listener.getsockname()
        monkeypatch.setattr(fork_client, "server_address", lambda program: address)
        monkeypatch.setattr(os, "getuid", lambda: user + 1)
        with pytest.raises(PermissionError, match="another user listens"):
            connect(ray_program())
        monkeypatch.setattr(fork_server, "IDLE_S", 0.1)
        monkeypatch.setattr(fork_server, "has_processes", lambda: False)
        monkeypatch.setattr(signal, "signal", lambda *_: None)
        monkeypatch.setattr(os, "fork", lambda: pytest.fail("forked for another user"))
        # The server ends its process by this, which is here that of the tests.
        monkeypatch.setattr(os, "_exit", sys.exit)
        with pytest.raises(SystemExit):
            fork_server.serve(listener)


def test_a_full_queue_of_whoever_has_taken_its_name_delays_a_start_and_does_not_end_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket(socket.AF_UNIX) as listener, ExitStack() as waiting:
        listener.bind(b"")
        listener.listen(0)
        address = listener.getsockname()
        monkeypatch.setattr(fork_client, "server_address", lambda program: address)
        monkeypatch.setattr(fork_client, "CONNECTS_WITHIN_S", 1)
        with connect(ray_program()) as connection:
            assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, 16) == bytes(16), "not of what is sent"
            with suppress(BlockingIOError):
                while True:
                    other = waiting.enter_context(socket.socket(socket.AF_UNIX))
                    other.setblocking(False)
                    other.connect(address)
            with pytest.raises(BlockingIOError):
                connect(ray_program())
            with fork_client.keep_server():
                pass


def test_what_libraries_read_when_they_are_loaded_makes_another_server(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = {fork_client.server_address(ray_program())}
    names = ("OMP_NUM_THREADS", "KMP_AFFINITY", "TORCH_DISTRIBUTED_DEBUG", "TORCHDYNAMO_DISABLE", "PYTORCH_ALLOC_CONF")
    for name in names:
        with monkeypatch.context() as variable:
            variable.setenv(name, "7")
            assert fork_client.start_variables()[name] == "7"
            addresses.add(fork_client.server_address(ray_program()))
    assert len(addresses) == 1 + len(names)
    monkeypatch.setenv("MY_VARIABLE", "7")
    assert fork_client.server_address(ray_program()) in addresses


def test_it_ends_when_it_has_no_process_and_nobody_is_connected() -> None:
    with subprocess.Popen([sys.executable, "-c", SERVE], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        with socket.socket(socket.AF_UNIX) as kept:
            kept.connect(bytes.fromhex(server.stdout.readline()))
            with pytest.raises(subprocess.TimeoutExpired):
                server.wait(1.0)
        assert server.wait(PATIENCE_S) == 0


def test_what_a_worker_needs_in_its_first_step_is_imported_once_for_those_that_start_after_the_first_two() -> None:
    with subprocess.Popen([sys.executable, "-c", SERVE_MANY], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        address = bytes.fromhex(server.stdout.readline())
        has_it = []
        while len(has_it) < 5:  # one that is asked for at once comes before the import
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(address)
                has_it.append(server.stdout.readline() == "True\n")
        server.kill()
    assert has_it[:2] == [False, False]
    assert has_it[-1]


def test_forked_processes_collect_garbage_and_draw_ids_of_tasks_and_objects_of_their_own() -> None:
    drawn = subprocess.run([sys.executable, "-c", FORK_TWO], stdout=subprocess.PIPE, text=True, check=True).stdout
    assert len(set(drawn.split())) == 4


def test_its_threads_hardly_spin_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "2000"}
    for name in waits:
        monkeypatch.delenv(name, raising=False)
    assert fork_client.start_variables().items() >= waits.items()
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    of_user = fork_client.start_variables()
    assert of_user["OMP_WAIT_POLICY"] == "active"
    assert "GOMP_SPINCOUNT" not in of_user


def test_a_raytrain_that_was_sent_with_a_job_is_served_and_not_the_one_that_is_installed(tmp_path: Path) -> None:
    sent = tmp_path / "raytrain" / "launch" / "ray"
    sent.mkdir(parents=True)
    for folder in (sent, sent.parent, sent.parent.parent):
        (folder / "__init__.py").touch()
    (sent / "fork_server.py").write_text(Path(fork_server.__file__).read_text())
    (sent / "fork_client.py").write_text("raise SystemExit('this one was sent')")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, sent / "fork_server.py"], env=environment, capture_output=True, text=True)
    assert "this one was sent" in done.stderr
