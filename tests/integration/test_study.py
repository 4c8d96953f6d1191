"""A study: which runs it trains, what it refuses before any starts, and what it shows of them."""

from __future__ import annotations

import dataclasses
import io
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from rich.console import Console

import raytrain
from raytrain.cli.main import main
from raytrain.config import TrainConfig
from raytrain.display.study import study_figure, study_page
from raytrain.errors import UsageError
from raytrain.experiments import study as study_module
from raytrain.experiments.study import study
from raytrain.launch.placement import Hardware
from raytrain.monitor.snapshot import Snapshot
from raytrain.monitor.stop_request import request_stop
from raytrain.recipes import cifar10
from raytrain.runs.documents import METRICS, encode_lines, read_config, run_store, write_config
from raytrain.runs.outcome import StopReason
from raytrain.runs.records import list_runs, read_run
from raytrain.runs.status import RunStatus, write_status
from tests.helpers.scaling_histories import history
from tests.helpers.small_runs import config as tiny_config
from tests.helpers.small_runs import loop_with
from tests.helpers.waiting import wait_for


def options(storage: Path, **more: Any) -> TrainConfig:
    return cifar10(**{"name": "sizes", "data": "s3://b/train", "storage": str(storage), **more})


def leave(config: TrainConfig, status: str) -> None:
    """Write the documents of a run with these options that is ``status``; each doubling gains 70 %."""
    workers, name = int(config.workers), config.name or ""
    store = run_store(config.storage, name)
    write_config(
        store, config.resolve(name=name, num_workers=workers, device="cpu", mean=(0.5, 0.5, 0.5), std=(0.2, 0.2, 0.2))
    )
    write_status(store, RunStatus(status=status))
    rows = history(1000 * 1.7 ** (workers.bit_length() - 1), [0.5, 0.8, 0.9])
    store.put(METRICS, encode_lines(row.to_json() for row in rows))


class Trainer:
    """Stands for the cluster: finishes the runs that it should train, or stops in the run of ``stop_in`` workers."""

    def __init__(self, stop_in: int | None = None) -> None:
        self.asked: list[list[tuple[str | None, bool]]] = []
        self.stop_in = stop_in

    def __call__(self, configs: Sequence[TrainConfig]) -> None:
        self.asked.append([(config.name, config.resume) for config in configs])
        for config in configs:
            if config.workers == self.stop_in:
                return leave(config, "stopped")
            leave(config, "finished")
        return None


def study_by(
    train: Callable[[Sequence[TrainConfig]], None], config: TrainConfig, workers: Sequence[int]
) -> study_module.StudyResult:
    """A study whose runs ``train`` trains."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(study_module, "_train", lambda configs, view: train(configs))
        return study(config, workers)


def nothing(configs: Sequence[TrainConfig]) -> None:
    pytest.fail(f"it trained {configs}")


def test_each_size_is_a_run_whose_batch_and_rate_go_with_its_workers(tmp_path: Path) -> None:
    trainer = Trainer()
    summary = study_by(trainer, options(tmp_path), [4, 1, 2, 2]).summary()
    assert trainer.asked == [[("sizes-1", False), ("sizes-2", False), ("sizes-4", False)]]
    known = [
        {name: size[name] for name in ("run", "workers", "batch_size", "learning_rate", "status")}
        for size in summary["sizes"]
    ]
    assert known == [
        {
            "run": f"sizes-{n}",
            "workers": n,
            "batch_size": 256 * n,
            "learning_rate": pytest.approx(0.1 * n),
            "status": "finished",
        }
        for n in (1, 2, 4)
    ]
    assert (summary["status"], summary["images_per_s_gain"]) == ("finished", pytest.approx(0.7))
    assert [run.name for run in list_runs(str(tmp_path))] == ["sizes-1", "sizes-2", "sizes-4"]


def test_a_global_batch_and_rate_are_those_of_every_size(tmp_path: Path) -> None:
    summary = study_by(Trainer(), options(tmp_path, batch_size=64, learning_rate=0.3), [1, 2]).summary()
    assert [(size["batch_size"], size["learning_rate"]) for size in summary["sizes"]] == [(64, 0.3)] * 2


def test_the_same_study_goes_on_where_it_was_stopped_and_trains_nothing_twice(tmp_path: Path) -> None:
    first = study_by(Trainer(stop_in=2), options(tmp_path), [1, 2, 4])
    assert first.statuses == {1: "finished", 2: "stopped", 4: "not started"}
    summary = first.summary()
    assert (summary["status"], [size["images_per_s"] for size in summary["sizes"]]) == ("stopped", [1000, None, None])
    second = Trainer()
    assert study_by(second, options(tmp_path), [1, 2, 4]).summary()["status"] == "finished"
    assert second.asked == [[("sizes-2", True), ("sizes-4", False)]]
    assert study_by(nothing, options(tmp_path), [1, 2, 4]).summary()["status"] == "finished"


@pytest.mark.parametrize("status", ["stopped", "failed", "interrupted"])
def test_a_run_that_ended_before_its_time_is_resumed(status: str, tmp_path: Path) -> None:
    leave(dataclasses.replace(options(tmp_path), name="sizes-2", workers=2), status)
    trainer = Trainer()
    study_by(trainer, options(tmp_path), [2])
    assert trainer.asked == [[("sizes-2", True)]]


@pytest.mark.parametrize(
    ("status", "more", "sentence"),
    [
        ("finished", {"epochs": 9}, r"'sizes-2' was started with --epochs 50, and this study has 9; .*another --name"),
        ("stopped", {"learning_rate": "0.2/worker"}, r"--learning-rate 0.2, and this study has 0.4"),
        ("finished", {"test_data": "d"}, "--test-data None, and this study has d"),
        ("finished", {"mean": (0.1, 0.1, 0.1)}, "--mean"),
        ("running", {}, "'sizes-2' is training at this moment"),
    ],
)
def test_a_run_that_does_not_belong_to_the_study_is_refused(
    status: str, more: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    leave(dataclasses.replace(options(tmp_path), name="sizes-2", workers=2), status)
    with pytest.raises(UsageError, match=sentence):
        study_by(nothing, options(tmp_path, **more), [1, 2])


@pytest.mark.parametrize(
    ("more", "workers", "sentence"),
    [
        ({}, [], "--workers has no number"),
        ({}, [0, 1], "--workers is 0"),
        ({"data": ""}, [1], "--data is missing"),
        ({"name": "a b"}, [1], "--name is 'a b-1'"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(
    more: dict[str, Any], workers: list[int], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=sentence):
        study_by(nothing, options(tmp_path, **more), workers)


@pytest.fixture
def two_cpus(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """A cluster of two CPUs that is not there; gives the names of the runs that were trained in it."""
    trained: list[str | None] = []

    def train(config: TrainConfig, view: Callable[..., None]) -> RunStatus:
        assert (config.address, config.gpus) == (None, None)
        trained.append(config.name)
        leave(config, "finished")
        return RunStatus(status="finished")

    found = Hardware(num_nodes=1, cpus=2.0, gpus=0.0, object_store_bytes=10**9)
    monkeypatch.setattr(study_module, "open_machines", lambda _: nullcontext(lambda: found))
    monkeypatch.setattr(study_module, "train", train)
    return trained


def test_a_size_that_the_cluster_has_no_room_for_is_refused_before_any_starts(
    two_cpus: list[str | None], tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="--workers is 16, and the cluster has 2 CPUs; ask for at most 8"):
        study(options(tmp_path), [1, 2, 16])
    assert two_cpus == []
    assert list(tmp_path.iterdir()) == []


def test_a_size_that_was_finished_elsewhere_needs_no_room(two_cpus: list[str | None], tmp_path: Path) -> None:
    leave(dataclasses.replace(options(tmp_path), name="sizes-16", workers=16), "finished")
    assert study(options(tmp_path), [1, 2, 16]).summary()["status"] == "finished"
    assert two_cpus == ["sizes-1", "sizes-2"]


# What it shows


def seen(result: study_module.StudyResult, width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO())
    console.print(study_page(result, "sizes.png"))
    return console.file.getvalue()  # pyright: ignore


def test_the_page_has_the_figures_of_each_size_and_what_a_doubling_gives(tmp_path: Path) -> None:
    page = seen(study_by(Trainer(), options(tmp_path), [1, 2, 4]))
    lines = [line.split() for line in page.splitlines()]
    assert ["1", "256", "0.1", "1,000", "–", "00:00:02", "–", "0.9000"] in lines
    assert ["2", "512", "0.2", "1,700", "+70%", "00:00:01", "-41%", "0.9000"] in lines
    assert "Per doubling of the workers: images/s +70%, time to an accuracy of 0.855 -41%." in page
    assert "The final accuracies lie within 0.0 percentage points." in page
    assert "━ on 1 0.900" in page and "━ on 4 0.900" in page and "● measured 2,890" in page
    assert f"raytrain compare sizes --storage {tmp_path}The best" in page.replace("\n", "").replace("  ", " ")
    assert "same command" not in page


def test_the_page_of_a_stopped_study_says_how_to_go_on(tmp_path: Path) -> None:
    page = " ".join(seen(study_by(Trainer(stop_in=2), options(tmp_path), [1, 2, 4])).split())
    assert "sizes-2 is stopped, sizes-4 is not started; run the same command again to continue the study." in page
    assert "2 512 0.2 – – – – –" in page
    assert "Per doubling" not in page
    nothing_yet = " ".join(seen(study_by(Trainer(stop_in=1), options(tmp_path, name="later"), [1])).split())
    assert "later-1 is stopped; run the same command" in nothing_yet


def test_the_picture_has_both_figures(tmp_path: Path) -> None:
    over_time, over_workers = study_figure(study_by(Trainer(), options(tmp_path), [1, 2, 4])).axes
    tested = [line for line in over_time.get_lines() if "worker" in str(line.get_label())]
    assert [str(line.get_label()) for line in tested] == [
        "1 worker  00:00:02",
        "2 workers  00:00:01",
        "4 workers  00:00:00",
    ]
    assert list(tested[0].get_xdata()) == pytest.approx([1, 2, 3])  # pyright: ignore
    assert [list(line.get_ydata()) for line in tested] == [[0.5, 0.8, 0.9]] * 3  # pyright: ignore
    in_proportion, measured = over_workers.get_lines()
    assert list(measured.get_ydata()) == pytest.approx([1000, 1700, 2890])  # pyright: ignore
    assert list(in_proportion.get_ydata()) == pytest.approx([1000, 2000, 4000])  # pyright: ignore
    assert [text.get_text() for text in over_workers.texts] == ["1,000", "1,700 (+70%)", "2,890 (+70%)"]
    assert [panel.get_title(loc="right") for panel in (over_time, over_workers)] == [
        "-41% per doubling of the workers",
        "+70% per doubling of the workers",
    ]


def test_a_study_that_is_finished_is_read_without_ray(tmp_path: Path) -> None:
    study_by(Trainer(), options(tmp_path), [1, 2])
    words = [
        "study",
        "cifar10",
        "--workers",
        "1",
        "2",
        "--name",
        "sizes",
        "--data",
        "s3://b/train",
        "--storage",
        str(tmp_path),
        "--json",
    ]
    script = (
        f"import sys; from raytrain.cli.main import main; code = main({words!r}); "
        "assert not {'ray', 'torch'} & set(sys.modules); exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["status"], summary["picture"]) == ("finished", "sizes.png")
    assert [size["images_per_s"] for size in summary["sizes"]] == [1000, 1700]
    with Image.open(tmp_path / "sizes.png") as image:
        assert image.format == "PNG" and min(image.size) > 400


def test_the_command_has_the_options_of_its_recipe_and_a_name_that_stays(
    two_cpus: list[str | None], tmp_path: Path
) -> None:
    png = str(tmp_path / "figures.png")
    words = [
        "study",
        "cifar10",
        "--data",
        "d",
        "--epochs",
        "3",
        "--workers",
        "1",
        "2",
        "--storage",
        str(tmp_path / "runs"),
    ]
    assert main([*words, "--target-accuracy", "0.5", "--output", png]) == 0
    assert two_cpus == ["cifar10-study-1", "cifar10-study-2"]
    assert read_config(run_store(str(tmp_path / "runs"), "cifar10-study-2")).epochs == 3
    assert main([*words, "--output", png]) == 0
    assert len(two_cpus) == 2
    assert Path(png).read_bytes().startswith(b"\x89PNG")


def test_in_python_it_goes_on_with_what_the_command_began(two_cpus: list[str | None], tmp_path: Path) -> None:
    words = ["study", "cifar10", "--data", "s3://b/train", "--storage", str(tmp_path), "--workers", "1"]
    assert main([*words, "--output", str(tmp_path / "figures.png")]) == 0
    result = raytrain.study(options(tmp_path, name=None), workers=[1, 2], target_accuracy=0.5)
    assert two_cpus == ["cifar10-study-1", "cifar10-study-2"]
    assert isinstance(result, raytrain.StudyResult)
    assert (result.name, result.summary()["target_accuracy"]) == ("cifar10-study", 0.5)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--workers 1 --output figures.svg", "--output is 'figures.svg'; its name must end in .png."),
        ("--workers 1 2 --target-accuracy 95", "--target-accuracy is 95; it must lie above 0 and be at most 1."),
        ("--workers 1..2", "--workers"),
        ("", "`raytrain study` needs --workers"),
        ("--workers 1 2 --worker-load 1 1", "There is no option --worker-load"),
        ("--workers 1 2 --name sizes --resume", "There is no option --resume"),
    ],
)
def test_bad_usage_is_told(
    words: str, sentence: str, capsys: pytest.CaptureFixture[str], two_cpus: list[str | None]
) -> None:
    assert main(["study", "cifar10", "--data", "d", *words.split()]) == 2
    assert sentence in capsys.readouterr().err
    assert two_cpus == []


def wait_for_stop_on_two_workers(run: raytrain.Run) -> None:
    def wait(run: raytrain.Run, batch: raytrain.Batch) -> None:
        if run.world_size == 2 and run.rank == 0 and batch.step == 7:
            wait_for(run.reporter.stop_requested)

    loop_with(run, before_step=wait)


@pytest.mark.slow
def test_a_study_that_was_stopped_resumes_in_the_middle_of_its_run(
    ray_cluster: None, images: Path, tmp_path: Path
) -> None:
    def stop_in_step_8(snapshot: Snapshot) -> None:
        if snapshot.name == "run-2" and snapshot.step >= 6 and snapshot.stop_request is None and not snapshot.over:
            request_stop(str(tmp_path), "run-2", StopReason("caller", "enough"))

    loop = "tests.integration.test_study:wait_for_stop_on_two_workers"
    config = tiny_config(images, tmp_path, workers="auto", loop=loop)
    stopped = study(config, [1, 2], view=stop_in_step_8)
    assert stopped.statuses == {1: "finished", 2: "stopped"}
    assert 8 <= read_run(str(tmp_path), "run-2").status.step <= 9
    finished = study(config, [1, 2])
    assert finished.statuses == {1: "finished", 2: "finished"}
    assert finished.histories[1] == stopped.histories[1]
    assert [row.step for row in finished.histories[2] if row.kind == "step"] == list(range(1, 21))
    assert read_run(str(tmp_path), "run-2").summary["samples_seen"] == 324
    for size in finished.summary()["sizes"]:
        assert size["images_per_s"] > 0 and size["seconds"] > 0 and size["test_accuracy"] >= 0.8
    with pytest.raises(UsageError, match="--workers is 9, and the cluster has 2 CPUs"):
        study(config, [1, 2, 9])
