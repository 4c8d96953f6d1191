"""``raytrain.attach``: the same run in processes that somebody else has started."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import raytrain
from raytrain.display.look import look
from raytrain.errors import StorageError, TrainingFailed, UsageError
from raytrain.launch.attached_launch import GroupMessages
from raytrain.monitor.snapshot import Snapshot
from raytrain.runs.documents import run_store
from raytrain.runs.status import read_status
from raytrain.storage.open import open_store
from tests.helpers.attached_runs import LAUNCHERS, attached_run, failed_run, refusal, stopped_run
from tests.helpers.gloo_processes import run_in_processes, run_until_one_ends
from tests.helpers.small_runs import assert_same_weights, check_keys, config, loop_with
from tests.helpers.waiting import wait_for

BIN = Path(sys.executable).parent
ROOT = Path(__file__).parents[2]


def train_as_attached(run: raytrain.Run) -> None:
    loop_with(run, check_keys)


@pytest.fixture(scope="module")
def reference(images: Path, tmp_path_factory: pytest.TempPathFactory) -> raytrain.TrainResult:
    """The result of ``raytrain.train`` with two workers."""
    options = config(images, tmp_path_factory.mktemp("reference"), backend="local", workers=2)
    return raytrain.train(options, loop=train_as_attached)


def test_one_process_trains_what_two_workers_do_and_its_run_is_one_of_raytrains(
    images: Path, tmp_path: Path, reference: raytrain.TrainResult
) -> None:
    result = attached_run(images, tmp_path, check_keys)
    assert_same_weights(result, reference)
    assert (result.status, result.steps, result.num_workers) == ("finished", reference.steps, 1)
    assert read_status(run_store(str(tmp_path), "run")).status == "finished"
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["kind"] for row in rows].count("evaluation") == 4
    photo = next(images.rglob("*.png"))
    assert raytrain.load("run", storage=str(tmp_path), trust=True).classify(photo)[0] in ("blue", "green", "red")


@pytest.mark.slow  # the imports of three processes; those of a group that is there train the same below
def test_torchrun_trains_what_two_workers_do(images: Path, tmp_path: Path, reference: raytrain.TrainResult) -> None:
    command = [BIN / "torchrun", "--nproc-per-node=2", "-m", "tests.helpers.attached_runs", images, tmp_path]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(list(map(str, command)), env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"\d: \w+", done.stdout)) == ["0: finished", "1: finished"]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["num_workers"], summary["steps"]) == (2, reference.steps)
    stored = raytrain.TrainResult(
        **{**vars(reference), "checkpoint": summary["checkpoint"], "run_dir": summary["run_dir"]}
    )
    assert_same_weights(stored, reference)


def test_a_run_that_two_processes_stop_in_mid_epoch_goes_on_with_one(
    images: Path, tmp_path: Path, reference: raytrain.TrainResult
) -> None:
    stopped = run_in_processes(2, stopped_run, images, tmp_path, 6)
    assert stopped[0] == stopped[1]
    assert (stopped[0].status, stopped[0].steps, stopped[0].num_workers) == ("stopped", 8, 2)
    assert stopped[0].stop_reason.detail == "enough"
    result = attached_run(images, tmp_path, resume=True)
    assert (result.status, result.steps) == ("finished", reference.steps)
    assert_same_weights(result, reference)


def test_a_resume_that_has_nothing_to_do_is_refused_and_changes_nothing(images: Path, tmp_path: Path) -> None:
    before = attached_run(images, tmp_path, until="accuracy=0")
    assert before.stop_reason is not None and before.stop_reason.kind == "target"
    documents = {path: path.read_bytes() for path in sorted((tmp_path / "run").rglob("*")) if path.is_file()}
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"until": "accuracy=0"}, "was stopped by --until accuracy=0 after 1 epoch: there is nothing to do"),
        ({"epochs": 1}, "has 1 epoch already, and --epochs is 1: there is nothing to do"),
    )
    for options, sentence in cases:
        with pytest.raises(UsageError, match=sentence):
            attached_run(images, tmp_path, resume=True, **options)
    assert {path: path.read_bytes() for path in documents} == documents
    assert attached_run(images, tmp_path, resume=True).status == "finished"


def test_a_resume_that_has_spent_its_dollars_is_refused(images: Path, tmp_path: Path) -> None:
    attached_run(images, tmp_path, price="1000000", max_steps=4)
    with pytest.raises(UsageError, match=r"Run 'run' has cost \$[\d,.]+ already, and --max-cost is 0.001"):
        attached_run(images, tmp_path, resume=True, price="1000000", max_cost=0.001)


def test_an_error_in_the_block_fails_the_run_and_is_raised_as_it_is(
    images: Path, tmp_path: Path, reference: raytrain.TrainResult
) -> None:
    def before_step(run: raytrain.Run, batch: raytrain.Batch) -> None:
        if run.progress.step == 6:
            raise ValueError("a mistake of the user's") from KeyError("its cause")

    with pytest.raises(ValueError, match="a mistake of the user's") as raised:
        attached_run(images, tmp_path, before_step, checkpoint_every=("5st",))
    assert isinstance(raised.value.__cause__, KeyError)
    assert read_status(run_store(str(tmp_path), "run")).status == "failed"
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert "its loop failed after step 6: ValueError: a mistake of the user's (test_attach.py, line" in summary["error"]
    assert "resume with raytrain.attach, the same loop, name='run' and resume=True" in summary["error"]
    assert_same_weights(attached_run(images, tmp_path, resume=True), reference)


def test_the_message_of_notify_is_sent_before_the_block_is_left(images: Path, tmp_path: Path) -> None:
    """Afterwards the process may end at once."""
    attached_run(images, tmp_path, epochs=1, notify=f"sleep 0.5; touch {tmp_path}/sent")
    assert (tmp_path / "sent").exists()


def test_a_view_that_fails_ends_the_loop_which_nobody_would_watch(images: Path, tmp_path: Path) -> None:
    def view(snapshot: Snapshot) -> None:
        raise KeyError("a mistake of the view's")

    def before_step(run: raytrain.Run, batch: raytrain.Batch) -> None:
        wait_for(run.reporter.stop_requested, deadline_s=60)

    options = config(images, tmp_path, **LAUNCHERS)
    with pytest.raises(KeyError, match="a mistake of the view's"), raytrain.attach(options, view=view) as run:
        loop_with(run, before_step)


def test_the_run_says_which_worker_has_failed(images: Path, tmp_path: Path) -> None:
    raised = run_in_processes(2, failed_run, images, tmp_path, 1)
    assert raised[1] == "ValueError: a mistake of the user's"
    assert "onnection" in raised[0]  # what gloo says of a process that has gone
    error = json.loads((tmp_path / "run" / "summary.json").read_text())["error"]
    assert "its loop failed after step 6: ValueError: a mistake of the user's (attached_runs.py, line" in error


def fail_beside_a_writer(images: Path, storage: str) -> None:
    def before_step(run: raytrain.Run, batch: raytrain.Batch) -> None:
        if run.rank == 0:
            (run.folder / "log.txt").write_text("before")
        dist.barrier()
        if run.rank == 1:
            raise ValueError("a mistake of the user's")
        threading.Event().wait()  # it never meets an error itself

    attached_run(images, storage, before_step)


def test_a_bucket_has_the_files_of_the_loop_if_another_process_fails_and_all_are_killed(
    images: Path, s3_url: str
) -> None:
    run_until_one_ends(2, fail_beside_a_writer, images, s3_url)
    store = open_store(f"{s3_url}/run")
    assert {stored.path: store.get(stored.path) for stored in store.list("files/")} == {"files/log.txt": b"before"}
    assert read_status(store).status == "failed"


def test_a_run_ends_by_itself_if_its_loss_is_not_finite(images: Path, tmp_path: Path) -> None:
    def before_step(run: raytrain.Run, batch: raytrain.Batch) -> None:
        run.log(loss=float("nan"))

    with pytest.raises(TrainingFailed, match="the loss is nan at step"):
        attached_run(images, tmp_path, before_step)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"workers": 2}, "workers is 2, which raytrain.attach cannot obey"),
        ({"backend": "local"}, "backend is 'local', which raytrain.attach cannot obey"),
        ({"max_failures": 0}, "max_failures is 0, which raytrain.attach cannot obey"),
        ({"loop": "my_loop.py:train"}, "loop is 'my_loop.py:train', which raytrain.attach cannot obey"),
        ({"device": "cuda:0"}, "device is 'cuda:0', which raytrain.attach cannot obey"),
        ({"accumulate": "auto"}, "accumulate is 'auto', which raytrain.attach cannot obey"),
        ({"data": "/nowhere"}, "/nowhere"),
        ({"name": "a/b"}, "a/b"),
        ({"resume": True, "name": None}, "--resume needs --name"),
        ({"weights": "/nowhere.pt"}, "/nowhere.pt"),
        ({"warmup_epochs": 9, "epochs": 2}, "--warmup-epochs is 9 and --epochs 2"),
        ({"worker_load": (1.0, 2.0)}, "--worker-load has 2 numbers for 1 worker;"),
    ],
)
def test_bad_options_are_one_sentence_and_leave_nothing(
    options: dict[str, Any], sentence: str, images: Path, tmp_path: Path
) -> None:
    storage = tmp_path / "runs"
    with pytest.raises((UsageError, StorageError), match=re.escape(sentence)):
        attached_run(images, storage, **options)
    assert not list(storage.rglob("*.json*"))


@pytest.mark.parametrize("number", ["gpu0", "-1", "0.5"])
def test_a_number_of_the_process_that_is_none_is_refused(
    number: str, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", number)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    config = raytrain.TrainConfig(data=str(images), storage=str(tmp_path), batch_size=8, learning_rate=0.1)
    with pytest.raises(UsageError, match=f"LOCAL_RANK is '{number}' in the environment"), raytrain.attach(config):
        pass
    assert not any(tmp_path.iterdir())


def test_options_in_a_dict_are_refused() -> None:
    options: Any = {"data": "photos"}
    for call in (lambda: raytrain.attach(options).__enter__(), lambda: raytrain.train(options), lambda: look(options)):
        with pytest.raises(UsageError, match=r"The options are a dict; give raytrain\.TrainConfig"):
            call()


def test_one_of_several_processes_that_have_no_group_does_not_train_alone(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="This is one of 2 processes, and would train alone"):
        attached_run(images, tmp_path)


def test_what_one_process_finds_wrong_all_raise(images: Path, tmp_path: Path) -> None:
    assert set(run_in_processes(2, refusal, images, tmp_path, 1, {"workers": 3})) == {
        "UsageError: workers is 3, which raytrain.attach cannot obey: it trains with the code of its block, in the "
        "processes that your launcher has started, and starts none; omit it, or call raytrain.train."
    }
    assert set(run_in_processes(2, refusal, images, tmp_path, 1, {"seed": 3})) == {
        "UsageError: Process 1 has other options for raytrain.attach than process 0; give all processes the same."
    }
    assert not list(tmp_path.iterdir())


def exchange() -> list[Any]:
    messages = GroupMessages("run")
    if dist.get_rank() == 1:
        for number in range(3):
            messages.send("worker 1", ["note_retries", number])
    dist.barrier()
    if dist.get_rank() == 1:
        return [messages.take("worker 2")]
    return [messages.take("worker 1") for _ in range(4)]


def test_messages_arrive_once_and_in_order() -> None:
    assert run_in_processes(2, exchange) == [
        [["note_retries", 0], ["note_retries", 1], ["note_retries", 2], None],
        [None],
    ]
