"""Which cluster on this machine a command joins, and what a cluster that starts here leaves in the process."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from ray._common import utils as ray_common
from ray.exceptions import AuthenticationError, RpcError

from raytrain import UsageError
from raytrain.launch.ray import connection, find_cluster
from raytrain.launch.ray.connection import Connection
from raytrain.launch.ray.own_cluster import LocalCluster
from raytrain.launch.ray.private_api import CURRENT_CLUSTER_FILE


@pytest.fixture
def note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The note of a cluster on this machine, at whose address something listens."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "ray").mkdir()
    written = tmp_path / "ray" / CURRENT_CLUSTER_FILE
    with socket.create_server(("127.0.0.1", 0)) as server:
        written.write_text(f"127.0.0.1:{server.getsockname()[1]}\n")
        yield written


def joins_a_cluster() -> bool:
    opened = Connection(None)
    try:
        return opened.own is None
    finally:
        opened.close()


def test_the_address_that_was_read_is_the_one_that_is_joined(
    note: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = note.read_text().strip()
    opened = Connection(None)
    note.write_text("127.0.0.1:1\n")  # changed by somebody between the look and the connection
    asked: list[str] = []

    def refuse(address: str) -> None:
        asked.append(address)
        raise UsageError("nobody answers")

    monkeypatch.setattr(connection, "check_cluster_answers", refuse)
    with pytest.raises(UsageError):
        opened.connect()
    assert asked == [address]
    assert [record.getMessage() for record in caplog.records if record.name == "raytrain"] == [
        f"Joining the Ray that runs on this machine, {address}; --address local starts a new one."
    ]


def test_who_names_auto_is_not_told_that_it_is_joined(note: Path, caplog: pytest.LogCaptureFixture) -> None:
    opened = Connection("auto")
    opened.close()
    assert opened.own is None
    assert "Joining the Ray" not in caplog.text


def test_another_token_is_told_instead_of_tried_again_and_again(note: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def refuse(address: str) -> None:
        asked.append(address)
        raise AuthenticationError("InvalidAuthToken")

    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.setattr(find_cluster, "ANSWER_AT_ONCE", SimpleNamespace(find=lambda: (refuse,)))
    address = note.read_text().strip()
    with pytest.raises(UsageError, match=rf"{address} asks for a token, and this machine's token is another one"):
        find_cluster.check_cluster_answers(address)
    assert asked == [address, address], "the second time with this machine's token"


@pytest.mark.slow  # Ray asks for 40 seconds
def test_what_listens_without_being_a_ray_cluster_is_not_joined(note: Path, capfd: pytest.CaptureFixture[str]) -> None:
    address = note.read_text().strip()
    with pytest.raises(UsageError, match=rf"^No Ray cluster answers at {address} \(what listens there does not answer"):
        Connection(None).connect()
    assert "gcs_client" not in capfd.readouterr().err, "the sentence says it"


def test_only_lines_of_rays_own_are_hidden_while_a_head_is_asked(
    note: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def time_out(address: str) -> None:
        os.write(2, b"[2026-11-30 07:12:16,840 W 5589 5589] gcs_client.cc:210: Failed to get cluster ID\n[1/2] mine\n")
        raise RpcError("Timed out while waiting for GCS to become available.")

    monkeypatch.setattr(find_cluster, "ANSWER_AT_ONCE", SimpleNamespace(find=lambda: (time_out,)))
    with pytest.raises(UsageError, match="what listens there does not answer as one of this version"):
        find_cluster.check_cluster_answers(note.read_text().strip())
    assert capfd.readouterr().err == "[1/2] mine\n"


def test_a_ray_is_found_where_it_writes_its_note_if_temporary_files_are_elsewhere(
    note: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_TMPDIR")
    monkeypatch.setenv("TMPDIR", str(note.parents[1]))
    assert ray_common.get_ray_address_file(None) == str(note), "Ray writes it there"
    assert joins_a_cluster()


@pytest.mark.parametrize(("owner", "joined"), [(0, True), (None, True), (65534, False)])
def test_only_a_note_of_this_user_or_of_root_is_believed(
    owner: int | None, joined: bool, note: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.getuid() != 0 and owner is not None:
        pytest.skip("only root can give files away")
    if owner is not None:
        os.chown(note, owner, -1)
    assert joins_a_cluster() is joined


def test_the_ray_of_root_is_joined_only_if_that_is_asked_for(note: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, address = os.getuid(), note.read_text().strip()
    assert find_cluster.ray_start_address() == address
    monkeypatch.setattr(os, "getuid", lambda: root + 1)
    assert find_cluster.ray_start_address() is None
    assert find_cluster.ray_start_address({root, root + 1}) == address, "as --address auto does"


def test_a_note_of_this_user_whose_port_somebody_else_has_taken_is_not_believed(note: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can listen as another user")
    os.seteuid(65534)
    try:
        other = socket.create_server(("127.0.0.1", 0))
    finally:
        os.seteuid(0)
    with other:
        note.write_text(f"127.0.0.1:{other.getsockname()[1]}\n")
        assert not joins_a_cluster()


def test_a_link_to_another_file_is_not_believed(note: Path) -> None:
    note.rename(note.parent / "elsewhere")
    note.symlink_to(note.parent / "elsewhere")
    assert not joins_a_cluster()


@pytest.mark.parametrize("address", ["auto", None])
def test_auto_believes_the_same_note_only(address: str | None, note: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if address is None:
        monkeypatch.setenv("RAY_ADDRESS", "auto")
    note.rename(note.parent / "elsewhere")
    note.symlink_to(note.parent / "elsewhere")
    with pytest.raises(UsageError, match=r"^No Ray cluster answers at auto \(this user has started none"):
        Connection(address).connect()


def test_a_cluster_that_cannot_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "file"))
    opened = Connection("local")
    with pytest.raises(UsageError, match=r"^Ray could not start a cluster on this machine \(NotADirectoryError: .*\)"):
        opened.connect()
    opened.close()


def test_a_local_cluster_takes_its_settings_along_when_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.delenv("RAY_USAGE_STATS_ENABLED", raising=False)
    monkeypatch.setenv("RAY_TRAIN_METRICS_ENABLED", "1")
    before = dict(os.environ)
    cluster = LocalCluster({})
    try:
        during = dict(os.environ)
    finally:
        cluster.close()
    assert dict(os.environ) == before
    assert {name for name in during if during[name] != before.get(name)} == {
        "RAY_AUTH_MODE",
        "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER",
        "RAY_TRAIN_METRICS_ENABLED",
        "RAY_USAGE_STATS_ENABLED",
    }, "the driver reads these, and no others, while its own cluster lives"


def test_threads_join_a_cluster_once_and_the_last_one_leaves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def init(**given: object) -> None:
        if calls:
            raise RuntimeError("Maybe you called ray.init twice by accident?")
        time.sleep(0.2)
        calls.append("joined")

    def shut_down() -> None:
        calls.append("left")

    monkeypatch.setattr(connection, "check_cluster_answers", lambda address: None)
    monkeypatch.setattr(connection, "raylet_answers", lambda: True)
    monkeypatch.setattr(connection, "in_ray", lambda: calls == ["joined"])
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="127.0.0.1:6379"))
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", shut_down)
    first, second = Connection("127.0.0.1:6379"), Connection("127.0.0.1:6379")
    with ThreadPoolExecutor(2) as threads:
        for joined in [threads.submit(each.connect) for each in (first, second)]:
            joined.result()
    assert calls == ["joined"]
    first.close()
    assert calls == ["joined"], "the second one still trains there"
    third = Connection(None)
    second.close()
    third.connect()
    assert calls == ["joined"], "the third one found the process in a cluster, and may rely on that"
    third.close()
    assert calls == ["joined", "left"]


@pytest.mark.parametrize(
    ("address", "is_same"),
    [
        ("10.0.0.1:6379", True),
        ("localhost:6379", True),  # this machine's
        (None, True),
        ("10.0.0.1:6380", False),
        ("10.0.0.2:6379", False),
        ("no-such-host.invalid:6379", False),
    ],
)
def test_a_process_that_is_in_one_cluster_is_not_told_of_another_one_in_vain(
    address: str | None, is_same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = SimpleNamespace(gcs_address="10.0.0.1:6379")
    monkeypatch.setattr(connection, "in_ray", lambda: True)
    monkeypatch.setattr(connection, "raylet_answers", lambda: True)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: here)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.0.0.1")
    with Connection(address) as opened:
        if is_same:
            opened.connect()
            return
        with pytest.raises(UsageError, match=f"is {address}, and this process is in the Ray cluster at 10.0.0.1:6379"):
            opened.connect()


def test_a_cluster_that_the_user_has_joined_is_not_left(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[str] = []
    monkeypatch.setattr(connection, "raylet_answers", lambda: True)
    monkeypatch.setattr(connection, "in_ray", lambda: True)
    monkeypatch.setattr(ray, "shutdown", lambda: left.append("left"))
    with Connection(None) as joined:
        joined.connect()
    assert not left
