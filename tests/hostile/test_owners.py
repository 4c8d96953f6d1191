"""Two owners of one run: one trains, the other is refused or stops, and nothing of the run is lost."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import queue
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import torch

import raytrain
from raytrain.demo.s3_server import S3Server
from raytrain.errors import OwnerChanged, StorageError, UsageError
from raytrain.launch.prepare import TrainRequest, prepare, settle_options
from raytrain.monitor.document_writer import DocumentWriter
from raytrain.monitor.stop_request import read_stop_request, request_stop
from raytrain.runs import ownership as claims
from raytrain.runs.documents import CLAIM, CONFIG, METRICS, STATUS, new_name, run_store
from raytrain.runs.metric_row import MetricRow
from raytrain.runs.metrics_history import History, read_metrics
from raytrain.runs.outcome import Progress, StopReason
from raytrain.runs.ownership import Claim, RunClaim, claim_run
from raytrain.runs.status import read_status
from raytrain.runs.stored_checkpoints import Identity, checkpoint_path, newest_checkpoint, newest_step
from raytrain.storage.bucket import BucketStore
from raytrain.storage.folder import FolderStore
from raytrain.storage.open import open_store
from raytrain.storage.store import ObjectChanged, Store
from raytrain.training.checkpoint import Checkpoints
from tests.helpers.faulty_s3 import faulty_s3
from tests.helpers.small_runs import config, documents, local_config, loop_with
from tests.helpers.snapshots import snapshot
from tests.helpers.stored_runs import contents
from tests.helpers.waiting import wait_for

LEASE_S = 1.0


@pytest.fixture(autouse=True)
def _short_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "LEASE_S", LEASE_S)
    monkeypatch.setattr(claims, "RENEW_EVERY_S", 0.1)
    monkeypatch.setattr(claims, "POLL_EVERY_S", 0.05)


@pytest.fixture(params=["folder", "moto", "rclone"])
def any_store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    fixture = {"moto": "moto_url", "rclone": "s3_url"}.get(request.param)
    return run_store(request.getfixturevalue(fixture) if fixture else str(tmp_path), "run")


@pytest.fixture(params=["folder", "moto"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """A run's place in storage that has conditional writes."""
    return run_store(str(tmp_path) if request.param == "folder" else request.getfixturevalue("moto_url"), "run")


def stalled(owner: RunClaim) -> RunClaim:
    """The same owner, which renews its claim no more: as on a laptop that sleeps."""
    # Nothing public ends the thread that renews but close(), which also gives the run up.
    owner._closed.set()
    owner._renewer.join()
    return owner


def from_elsewhere(store: Store, **changes: Any) -> Claim:
    """Have the claim be that of a process on another machine, whether or not its owner renews it at this moment."""
    while True:
        content = store.get(CLAIM)
        changed = dataclasses.replace(Claim(**json.loads(content)), **{"machine": "another", **changes})
        with suppress(ObjectChanged):
            store.put_if(CLAIM, changed.to_json(), content)
            return changed


def test_conditional_puts(any_store: Store) -> None:
    any_store.put_if("a", b"1", None)
    any_store.put_if("a", b"1", None)  # as after an answer that was lost
    for wrong in (None, b"0"):
        with pytest.raises(ObjectChanged):
            any_store.put_if("a", b"2", wrong)
    any_store.put_if("a", b"2", b"1")
    assert any_store.get("a") == b"2"
    with pytest.raises(ObjectChanged):
        any_store.put_if("b", b"2", b"1")
    assert [found.path for found in any_store.list()] == ["a"]


def test_of_many_writers_at_the_same_moment_one_wins(store: Store) -> None:
    assert store.has_conditional_puts()

    def wins(content: bytes, expected: bytes | None) -> bool:
        try:
            store.put_if("a", content, expected)
        except ObjectChanged:
            return False
        return True

    before: bytes | None = None
    with ThreadPoolExecutor(8) as pool:
        for number in range(20):
            contents = [f"{number} {writer}".encode() for writer in range(8)]
            won = list(pool.map(lambda content, before=before: wins(content, before), contents))
            assert sum(won) == 1
            before = contents[won.index(True)]
            assert store.get("a") == before


def test_the_embedded_server_is_known_to_have_no_conditions(s3_url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="raytrain")
    store = run_store(s3_url, "run")
    assert not store.has_conditional_puts()
    claim_run(store, "run").close()
    assert "has no conditional writes" in caplog.text


def test_without_conditions_the_later_of_two_at_the_same_moment_wins(
    s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Neither reads its claim back before both have written theirs, however slow this machine is.
    number, both_have_written, put_if = itertools.count(), threading.Barrier(2), BucketStore.put_if

    def put_and_meet(self: BucketStore, path: str, data: bytes, expected: bytes | None) -> None:
        try:
            put_if(self, path, data, expected)
        finally:
            if next(number) < 2:
                both_have_written.wait(60)

    monkeypatch.setattr(BucketStore, "put_if", put_and_meet)
    owners, refused = claimed_at_the_same_moment(run_store(s3_url, "run"), 2)
    assert (len(owners), len(refused)) == (1, 1)
    owners[0].close()


def claimed_at_the_same_moment(store: Store, num_processes: int) -> tuple[list[RunClaim], list[UsageError]]:
    """Who got the run, and what the others were told."""
    started = threading.Barrier(num_processes)

    def start(_: int) -> RunClaim | UsageError:
        started.wait()
        try:
            return claim_run(store, "run")
        except UsageError as error:
            return error

    with ThreadPoolExecutor(num_processes) as pool:
        results = list(pool.map(start, range(num_processes)))
    owners = [result for result in results if isinstance(result, RunClaim)]
    return owners, [result for result in results if isinstance(result, UsageError)]


def test_a_claim_is_held_from_the_moment_at_which_others_can_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, put_if = open_store(str(tmp_path / "run")), FolderStore.put_if

    def put_and_claim(self: FolderStore, path: str, data: bytes, expected: bytes | None) -> None:
        put_if(self, path, data, expected)
        monkeypatch.setattr(FolderStore, "put_if", put_if)
        with pytest.raises(UsageError, match="training at this moment"):  # the claim is known not to be of a dead one
            claim_run(store, "run")

    def is_training(*arguments: Any) -> None:
        raise UsageError("training at this moment")

    monkeypatch.setattr(FolderStore, "put_if", put_and_claim)
    monkeypatch.setattr(claims, "_wait_for_lease", is_training)  # whose owner cannot renew the claim in this thread
    claim_run(store, "run").close()


def test_of_many_owners_at_the_same_moment_one_gets_the_run(store: Store) -> None:
    owners, refused = claimed_at_the_same_moment(store, 6)
    assert (len(owners), len(refused)) == (1, 5)
    assert all("training at this moment" in str(error) for error in refused)
    owners[0].owned_store.put(STATUS, b"{}")
    owners[0].close()


def test_an_owner_that_lives_is_noticed_without_a_clock(store: Store) -> None:
    with claim_run(store, "run") as owner:
        begun = time.monotonic()
        with pytest.raises(UsageError, match=rf"'run' is training at this moment \(process {os.getpid()} on "):
            claim_run(store, "run")
        assert time.monotonic() - begun < LEASE_S
        for documents, when in ((), " once it has started"), ((CONFIG, STATUS), ""):  # `stop` needs the configuration
            for document in documents:
                owner.owned_store.put(document, b"{}")
            with pytest.raises(UsageError, match=rf"raytrain stop run --storage .*` stops it{when}\.$"):
                claim_run(store, "run")


def test_a_released_run_is_free_at_once(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    store.put(CONFIG, b"{}")
    for fence in (1, 2, 3):
        with claim_run(store, "run") as owner:
            assert owner.claim.fence == fence
    assert "waiting" not in caplog.text


def test_a_run_that_never_started_leaves_no_claim(store: Store) -> None:
    claim_run(store, "run").close()
    assert list(store.list()) == []


def test_an_owner_elsewhere_that_is_silent_for_a_lease_is_dead(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    first = stalled(claim_run(store, "run"))
    from_elsewhere(store)
    begun = time.monotonic()
    with claim_run(store, "run") as second:
        assert time.monotonic() - begun >= LEASE_S
        assert "waiting 1 s to see whether the last owner of run 'run' (process " in caplog.text
        assert second.claim.fence == first.claim.fence + 1
        with pytest.raises(OwnerChanged, match="took over the run"):
            first.owned_store.put(STATUS, b"{}")


def test_a_process_of_this_machine_that_ended_is_known_to_be_dead(store: Store) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    stalled(claim_run(store, "run"))
    from_elsewhere(store, machine=claims.machine_id(), pid=gone.pid, token="another")
    begun = time.monotonic()
    claim_run(store, "run").close()
    assert time.monotonic() - begun < LEASE_S


@pytest.mark.parametrize("machine", ["another", ""])
def test_the_same_host_name_and_process_id_elsewhere_mean_nothing(machine: str, store: Store) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    stalled(claim_run(store, "run"))
    seen = from_elsewhere(store, machine=machine, pid=gone.pid, host=socket.gethostname())
    renewed = dataclasses.replace(seen, renewed=seen.renewed + 1)
    threading.Timer(LEASE_S / 2, lambda: store.put(CLAIM, renewed.to_json())).start()
    with pytest.raises(UsageError, match="is training at this moment"):
        claim_run(store, "run")


def write_checkpoint(owner: RunClaim, step: int) -> None:
    checkpoints = Checkpoints(owner.owned_store, Identity("net", ("a",), "", 1, 0), keep=1)
    checkpoints.save({"model": {"weight": torch.zeros(3)}}, Progress(step=step))
    checkpoints.close()


def write_metrics(owner: RunClaim, step: int) -> None:
    history = History(owner.owned_store)
    history.record(MetricRow(kind="step", step=step, epoch=1, metrics={"loss": 1.0}))
    history.close()


def write_status(owner: RunClaim, step: int) -> None:
    DocumentWriter(owner.owned_store, num_steps=100, first_step=step).write_status("running")


def write_heartbeat(owner: RunClaim, step: int) -> None:
    DocumentWriter(owner.owned_store, num_steps=100).heartbeat(snapshot(step=step))


def delete(owner: RunClaim, step: int) -> None:
    owner.owned_store.delete("checkpoints/step-000000001.pt")


def delete_stop_request(owner: RunClaim, step: int) -> None:
    raytrain_config = config("images", "runs").resolve(
        name="run", num_workers=1, device="cpu", mean=(0.5,) * 3, std=(0.5,) * 3
    )
    DocumentWriter(owner.owned_store, num_steps=100).begin(raytrain_config)


WRITES = [write_checkpoint, write_metrics, write_status, write_heartbeat, delete, delete_stop_request]


@pytest.mark.parametrize("write", WRITES)
def test_who_lost_the_run_writes_and_deletes_nothing(
    write: Callable[[RunClaim, int], None], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "LEASE_S", 0.1)  # nobody waits for the first owner, which renews nothing
    first = claim_run(store, "run")
    store.put(CONFIG, b"{}")
    write_checkpoint(first, 1)
    write_metrics(first, 1)
    write_status(first, 1)
    stalled(first)
    from_elsewhere(store)
    with claim_run(store, "run") as second:
        write_checkpoint(second, 2)
        before = contents(store)
        with pytest.raises(OwnerChanged):
            write(first, 3)
        assert contents(store) == before
        assert not first.renew()
        first.close()
        assert contents(store) == before
        write(second, 4)


def test_a_run_that_was_deleted_is_not_written_again(store: Store) -> None:
    with claim_run(store, "run") as owner:
        for path in [found.path for found in store.list()]:
            store.delete(path)
        with pytest.raises(OwnerChanged, match=r"claim\.json is gone") as gone:
            write_checkpoint(owner, 1)
        assert list(store.list()) == []
        is_bucket = "://" in store.url
        assert ("on S3 or in a folder that all machines share" not in str(gone.value)) == is_bucket


def test_the_folder_of_a_run_that_was_deleted_does_not_come_back(tmp_path: Path) -> None:
    store = run_store(str(tmp_path), "first")
    with claim_run(store, "first") as claim:
        claim.owned_store.put(CONFIG, b"{}")
        stalled(claim)  # so that the folder does not change while it is removed
        shutil.rmtree(tmp_path / "first")
        assert not claim.renew()
    assert not list(tmp_path.iterdir())


def test_storage_that_is_away_for_a_while_loses_no_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = run_store(str(tmp_path), "run")
    tries = renewals(monkeypatch)
    with claim_run(store, "run") as owner:
        folder = tmp_path / "run"
        folder.rename(tmp_path / "away")
        folder.write_text("not a folder")
        while not tries.get(timeout=30):
            pass
        folder.unlink()
        (tmp_path / "away").rename(folder)
        while tries.get(timeout=30):
            pass
        write_checkpoint(owner, 1)


def renewals(monkeypatch: pytest.MonkeyPatch) -> queue.Queue[bool]:
    """Whether each renewal of a claim failed, as they happen."""
    failed: queue.Queue[bool] = queue.Queue()
    renew = RunClaim.renew

    def observed(claim: RunClaim) -> bool:
        try:
            renewed = renew(claim)
        except StorageError:
            failed.put(True)
            raise
        failed.put(False)
        return renewed

    monkeypatch.setattr(RunClaim, "renew", observed)
    return failed


@pytest.mark.parametrize(
    "moment",
    [
        "training",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("prepared", "at a checkpoint", "at the end")),
    ],
)
def test_a_run_that_is_taken_over_stops_with_one_sentence(moment: str, images: Path, tmp_path: Path) -> None:
    store = run_store(str(tmp_path), "run")
    step = {"prepared": 0, "training": 3, "at a checkpoint": 4, "at the end": 19}[moment]

    def take_over(run: raytrain.Run, batch: raytrain.Batch) -> None:
        if (run.rank, batch.step) == (0, step):
            wait_for(lambda: store.exists(CONFIG))  # the driver writes the run down beside the training
            from_elsewhere(store, token="another", fence=2, pid=7, host="elsewhere")

    def loop(run: raytrain.Run) -> None:
        loop_with(run, take_over)

    with pytest.raises(OwnerChanged, match="Process 7 on elsewhere took over the run in"):
        raytrain.train(local_config(images, tmp_path), loop=loop)
    after = documents(tmp_path)
    assert json.loads(after["run/claim.json"])["token"] == "another"
    assert json.loads(after["run/status.json"])["status"] in ("starting", "running")
    assert "run/summary.json" not in after
    assert read_status(store).active


def test_a_second_run_of_the_same_name_is_refused_while_the_first_one_trains(images: Path, tmp_path: Path) -> None:
    refused = tmp_path / "refused"

    def start_another(run: raytrain.Run, batch: raytrain.Batch) -> None:
        if (run.rank, batch.step) == (0, 2):
            try:
                prepare(settle_options(dataclasses.replace(local_config(images, tmp_path), resume=True)))
            except UsageError as error:
                refused.write_text(str(error))

    result = raytrain.train(local_config(images, tmp_path), loop=lambda run: loop_with(run, start_another))
    assert result.status == "finished"
    assert "'run' is training at this moment" in refused.read_text()
    assert (tmp_path / "run" / METRICS).read_text().count("\n") == 24


@pytest.mark.parametrize("restarting", [False, True])
def test_a_stop_requested_while_a_resume_waits_for_the_last_owner_is_for_the_resume(
    restarting: bool, images: Path, tmp_path: Path
) -> None:
    wanted = dataclasses.replace(local_config(images, tmp_path, precision="float32"), resume=True)
    store = run_store(str(tmp_path), "run")
    owner = stalled(claim_run(store, "run"))
    documents = DocumentWriter(owner.owned_store, num_steps=20)
    documents.begin(wanted.resolve(name="run", num_workers=2, device="cpu", mean=(0.4,) * 3, std=(0.2,) * 3))
    from_elsewhere(store)
    store.put(STATUS, json.dumps({**json.loads(store.get(STATUS)), "machine": "another"}).encode())

    # The old request stays only for an attempt that follows one of the same process.
    request_stop(str(tmp_path), "run", StopReason("caller", "enough"))
    with prepare(settle_options(wanted), TrainRequest(restarting=restarting)):
        assert read_stop_request(store) == (StopReason("caller", "enough") if restarting else None)

    from_elsewhere(store, released=False)
    request_stop(str(tmp_path), "run", StopReason("caller", "enough"))
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(prepare, settle_options(wanted), TrainRequest(restarting=restarting))
        time.sleep(LEASE_S / 2)
        request_stop(str(tmp_path), "run", StopReason("caller", "enough"))
        with late.result() as prepared:
            DocumentWriter(prepared.store, num_steps=20).begin(prepared.resolve(2, "cpu"))
            assert read_stop_request(store) == StopReason("caller", "enough")


def test_a_refused_start_releases_the_run(images: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        raytrain.train(local_config(images, tmp_path, weights="no-such-file.pt"))
    assert documents(tmp_path) == {}


def test_names_made_in_the_same_second_differ() -> None:
    assert len({new_name("digits") for _ in range(50)}) == 50


@pytest.mark.slow
def test_a_clock_that_is_wrong_by_hours_neither_opens_nor_closes_a_run(images: Path, tmp_path: Path) -> None:
    raytrain.train(local_config(images, tmp_path, epochs=1))
    status = tmp_path / "run" / STATUS
    ahead = {**json.loads(status.read_text()), "status": "running", "heartbeat_at": "2999-01-01T00:00:00+00:00"}
    status.write_text(json.dumps(ahead | {"host": "another-machine"}))
    result = raytrain.train(dataclasses.replace(local_config(images, tmp_path, epochs=2), resume=True))
    assert result.status == "finished"
    with claim_run(run_store(str(tmp_path), "run"), "run"):
        status.write_text(json.dumps(ahead | {"heartbeat_at": "2000-01-01T00:00:00+00:00"}))
        with pytest.raises(UsageError, match="is training at this moment"):
            prepare(settle_options(dataclasses.replace(local_config(images, tmp_path, epochs=3), resume=True)))


def test_another_store_of_the_server_is_not_the_runs(s3: S3Server, s3_url: str) -> None:
    owner = claim_run(run_store(s3_url, "run"), "run")
    with pytest.raises(OwnerChanged, match="is gone"):
        open_store(f"{s3_url}/other").guarded(owner.claim).put(STATUS, b"{}")
    owner.close()


def put_status(owner: RunClaim) -> None:
    owner.owned_store.put(STATUS, b"{}")


@pytest.mark.parametrize("act", [RunClaim.renew, put_status])
def test_a_server_that_has_no_object_while_it_replaces_it_ends_no_run(
    act: Callable[[RunClaim], object], s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = run_store(s3_url, "run")
    away: list[bytes] = []  # the claim, from the first request for it to the next one
    asked = Counter[str]()

    def take_away_once(request: BaseHTTPRequestHandler, body: bytes) -> None:
        if request.command == "GET" and request.path.partition("?")[0].endswith(CLAIM):
            asked[request.command] += 1
            if asked[request.command] == 1:
                away.append(server.get(CLAIM))
                server.delete(CLAIM)
            elif away:
                server.put(CLAIM, away.pop())

    owner = stalled(claim_run(server, "run"))
    server.put(CONFIG, b"{}")
    with faulty_s3(os.environ["AWS_ENDPOINT_URL"], interfere=take_away_once) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        behind = RunClaim(run_store(s3_url, "run"), owner.claim)
        stalled(behind)
        assert act(behind) in (True, None)
    assert asked["GET"] == 2
    assert not away


def row(step: int, loss: float = 1.0) -> MetricRow:
    return MetricRow(kind="step", step=step, epoch=1, metrics={"loss": loss})


class NextOwner:
    """Takes the run over from its newest checkpoint on, and trains further."""

    def __init__(self, store: Store) -> None:
        self.claim = claim_run(store, "run")
        self.step = newest_step(store)
        self.history = History(self.claim.owned_store)
        self.history.rewind(self.step)

    def train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step += 1
            self.history.record(row(self.step, loss=2.0))
            self.history.flush()
            write_checkpoint(self.claim, self.step)
            write_status(self.claim, self.step)

    def close(self) -> None:
        self.history.close()
        self.claim.close()


def write_steps(owner: RunClaim, first: int, last: int) -> None:
    for step in range(first, last + 1):
        write_metrics(owner, step)
        write_checkpoint(owner, step)
        write_status(owner, step)


WRITES_OF_A_STEP = 6  # of metrics, of a checkpoint and its note, two deletions, and of the status


@pytest.mark.parametrize(
    "moment", [0, *(pytest.param(each, marks=pytest.mark.slow) for each in range(1, WRITES_OF_A_STEP))]
)
def test_without_conditions_the_next_write_repairs_what_a_late_one_has_replaced(
    moment: int, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write number ``moment`` of the first owner's third step is held until the next one has trained on.

    Of a server that has conditional writes, test_takeovers shows that the late one replaces nothing.
    """
    store = run_store(s3_url, "run")
    number, held, taken_over, armed = itertools.count(), threading.Event(), threading.Event(), threading.Event()

    def hold(sent: BaseHTTPRequestHandler, body: bytes) -> None:
        if armed.is_set() and sent.command in ("PUT", "POST") and next(number) == moment:
            held.set()
            taken_over.wait(60)

    with faulty_s3(os.environ["AWS_ENDPOINT_URL"], interfere=hold) as proxy, ThreadPoolExecutor(1) as pool:
        with monkeypatch.context() as environment:
            environment.setenv("AWS_ENDPOINT_URL", proxy.url)
            first = stalled(claim_run(run_store(s3_url, "run"), "run"))
        store.put(CONFIG, b"{}")
        write_steps(first, 1, 2)
        from_elsewhere(store)
        armed.set()
        late = pool.submit(write_steps, first, 3, 3)
        assert held.wait(60)
        second = NextOwner(store)
        second.train(3)
        taken_over.set()
        with suppress(OwnerChanged):
            late.result()
        second.train(1)
        second.close()
    rows = [(found.step, found.metrics["loss"]) for found in read_metrics(store)]
    assert [step for step, _ in rows] == list(range(1, second.step + 1))
    assert [loss for _, loss in rows[-4:]] == [2.0] * 4
    assert newest_checkpoint(store) == checkpoint_path(second.step, takeover=second.claim.claim.takeover)


def test_checkpoints_that_follow_a_deleted_claim_are_newer_than_those_before_it(tmp_path: Path) -> None:
    """A takeover is a part of their names, and is not forgotten with the claim."""
    store = run_store(str(tmp_path), "run")
    stalled(claim_run(store, "run"))
    store.put(CONFIG, b"{}")
    from_elsewhere(store)
    for step in (2, 4, 6):
        with claim_run(store, "run") as owner:
            write_checkpoint(owner, step)
        assert newest_step(store) == step
        store.delete(CLAIM)  # as the sentence about a damaged one advises


@pytest.mark.parametrize("moment", [1, *(pytest.param(each, marks=pytest.mark.slow) for each in (0, *range(2, 12)))])
def test_in_a_folder_nobody_takes_over_between_the_check_and_the_write(
    moment: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = run_store(str(tmp_path), "run")
    first = stalled(claim_run(store, "run"))
    store.put(CONFIG, b"{}")
    write_steps(first, 1, 2)
    from_elsewhere(store)
    number, held, let_go = itertools.count(), threading.Event(), threading.Event()
    check = Claim.check

    def held_check(owner: Claim, content: bytes | None, url: str) -> None:
        check(owner, content, url)
        if owner.token == first.claim.token and next(number) == moment:
            held.set()
            let_go.wait(2 * LEASE_S)  # the next owner may be waiting for this write

    monkeypatch.setattr(Claim, "check", held_check)
    with ThreadPoolExecutor(2) as pool:
        late = pool.submit(write_steps, first, 3, 3)
        assert held.wait(60)
        claiming = pool.submit(claim_run, store, "run")
        claiming.add_done_callback(lambda _: let_go.set())
        claiming.result().close()
        second = NextOwner(store)
        second.train(3)
        before = contents(store)
        with suppress(OwnerChanged):
            late.result()
        assert contents(store) == before
        second.close()
    assert [found.step for found in read_metrics(store)] == list(range(1, second.step + 1))
