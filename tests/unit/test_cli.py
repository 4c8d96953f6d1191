"""The command line: options, errors as one sentence, JSON output, and a fast start."""

from __future__ import annotations

import dataclasses
import errno
import io
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console, Group

import raytrain
from raytrain.__main__ import run
from raytrain.cli.commands import COMMANDS, GROUPS
from raytrain.cli.main import main
from raytrain.cli.parser import parse
from raytrain.config import SECTIONS, TrainConfig
from raytrain.display.console import headed_table, key_value_table
from raytrain.display.evaluation import evaluation_page
from raytrain.errors import StorageError, TrainingFailed
from raytrain.inference.classification_metrics import ClassScore, score
from raytrain.recipes import RECIPES, alexnet_transfer, auto, cifar10_fast
from raytrain.runs.documents import SUMMARY, open_run, read_config, run_store, write_config, write_json
from raytrain.runs.logs import STARTUP
from raytrain.runs.outcome import train_command
from raytrain.runs.status import RunStatus, write_status
from tests.helpers.snapshots import train_result
from tests.helpers.stored_evaluation import label_evaluation

RESULT = train_result(validation_loss=float("nan"))


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replace functions of the package, or whole modules of it, that a command calls."""

    def put(module: str = "raytrain", **functions: Any) -> None:
        if module == "raytrain":
            for name, function in functions.items():
                monkeypatch.setitem(vars(raytrain), name, function)
        else:
            monkeypatch.setitem(sys.modules, module, ModuleType(module))
            vars(sys.modules[module]).update(functions)

    return put


@pytest.fixture
def trained(stand_in: Callable[..., None]) -> list[TrainConfig]:
    """The configurations with which ``raytrain.train`` was called; it trains nothing."""
    configs: list[TrainConfig] = []

    def train(config: TrainConfig, **options: Any) -> Any:
        configs.append(config)
        return RESULT

    stand_in(train=train)
    return configs


def failing(error: BaseException) -> Callable[..., Any]:
    def train(config: TrainConfig, **options: Any) -> Any:
        raise error

    return train


@pytest.fixture
def storage(tmp_path: Path) -> str:
    """A storage with one stopped run."""
    storage = str(tmp_path / "runs")
    store = run_store(storage, "first")
    config = RECIPES["cifar10"](data="my data", flip="none").resolve(
        name="first", num_workers=2, device="cpu", mean=(0.1, 0.2, 0.3), std=(0.5, 0.5, 0.5)
    )
    write_config(store, config)
    write_status(store, RunStatus(status="stopped", step=20, num_steps=90, epoch=2, num_epochs=9))
    write_json(
        store,
        SUMMARY,
        {"status": "stopped", "validation_accuracy": 0.625, "stop_reason": {"kind": "signal", "detail": "SIGINT"}},
    )
    row = {"kind": "step", "accuracy": 0.1}
    rows = [
        {**row, "step": step, "epoch": step // 10, "loss": 2.0 / step, "elapsed_s": 3.0 * step} for step in (10, 20)
    ]
    store.put("metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())
    store.put("skipped.jsonl", b'{"key": "cat/a.jpg", "reason": "truncated"}\n')
    store.put("checkpoints/step-000000020.pt", bytes(3_000_000))
    return storage


# Options.


def test_without_flags_a_recipe_is_trained_unchanged(trained: list[TrainConfig]) -> None:
    for name, recipe in RECIPES.items():
        assert main(["train", name]) == 0
        assert trained[-1] == recipe()


def test_flags_override_the_recipe(trained: list[TrainConfig]) -> None:
    flags = "--data s3://b/train --workers 3 --worker-load 1 0 1 --batch-size 256 --flip none --mean 0.5 0.5 0.5"
    assert main(["train", "cifar10", *flags.split(), "--channels-last", "--image-size", "8", "9", "--resume"]) == 0
    expected = dataclasses.replace(
        RECIPES["cifar10"](),
        data="s3://b/train",
        workers=3,
        worker_load=(1.0, 0.0, 1.0),
        batch_size=256,
        flip="none",
        mean=(0.5, 0.5, 0.5),
        channels_last=True,
        image_size=(8, 9),
        resume=True,
    )
    assert trained == [expected]


def test_every_option_of_a_run_is_a_flag_with_its_help(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")  # wider, the boxes would stand side by side
    with pytest.raises(SystemExit) as end:
        main(["train", "cifar10", "--help-all"])
    assert end.value.code == 0
    help_text = capsys.readouterr().out
    fields = {field.name for field in dataclasses.fields(TrainConfig)} - {"recipe", "open_options"}
    assert [name for name in fields if f"--{name.replace('_', '-')}" not in help_text] == []
    assert "Passes over the training images." in help_text
    assert "--recipe" not in help_text and "none)" not in help_text and "--batch-size N|N/worker" in help_text
    assert re.findall(r"(\w+) options  ", help_text) == list(SECTIONS)

    # A text that the source has in two lines is wrapped as one: a line ends only if the next word does not fit.
    lines = [line.strip("│").rstrip() for line in help_text.splitlines()]
    ended_early = [
        line
        for line, following in itertools.pairwise(lines)
        if line.startswith(" " * 20) and following.startswith(" " * 20) and len(line) + len(following.split()[0]) < 94
    ]
    assert ended_early == []


def test_the_help_says_what_the_images_decide_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    for recipe, default in (("auto", "what fits the images"), ("custom", "10")):
        with pytest.raises(SystemExit):
            main(["train", recipe, "--help"])
        text = re.sub(r"[\s│]+", " ", capsys.readouterr().out)
        assert f"Passes over the training images. (default: {default})" in text


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"{version('raytrain')}\n"


@pytest.mark.parametrize("words", [["--json", "--version"], ["--json", "-h"], ["--json"]])
def test_flags_that_every_command_has_may_precede_the_help_and_the_version(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 0
    assert (version("raytrain") if "--version" in words else "Watch and compare") in capsys.readouterr().out


def test_the_help_lists_commands_by_purpose_and_recipes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for argv in ([], ["--help"]):
        assert main(argv) == 0
        out = capsys.readouterr().out
        assert [name for name in (*COMMANDS, *GROUPS) if name not in out] == []
        assert "[bold]" not in out and max(map(len, out.splitlines())) <= 80
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    out = capsys.readouterr().out
    assert [name for name in RECIPES if name not in out] == []
    assert (
        "Without a recipe, the command takes auto, or, with --loop, custom." in " ".join(out.split())
        and "(required)" not in out
    )


def test_the_help_shows_the_options_that_most_people_use(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "cifar10", "--help"])
    out = capsys.readouterr().out
    assert "--help-all shows all" in out and "--learning-rate" in out and "--weight-decay" not in out
    options = {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(TrainConfig)}
    assert 10 < len(options & set(re.findall(r"--[a-z][\w-]*", out))) < 25


@pytest.mark.parametrize("command", ["train", "find-rate"])
def test_the_help_counts_the_options_that_have_flags(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    texts: list[str] = []
    for word in ("--help", "--help-all"):
        with pytest.raises(SystemExit):
            main([command, "cifar10", word])
        texts.append(capsys.readouterr().out)
    stated = re.search(r"--help-all shows all (\d+)\.", texts[0])
    options = {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(TrainConfig)}
    assert stated is not None
    assert int(stated[1]) == len(options & set(re.findall(r"--[a-z][\w-]*", texts[1])))


@pytest.mark.parametrize("words", [*COMMANDS, "train flowers", "sweep flowers"])
@pytest.mark.parametrize("columns", ["80", "120"])
def test_the_help_of_each_command_shows_an_example_that_works(
    words: str, columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    with pytest.raises(SystemExit) as end:
        main([*words.split(), "--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    example = " ".join(out.partition("Example: ")[2].partition("\n\n")[0].split())
    assert example.startswith(f"raytrain {words}")
    parse(shlex.split(example)[1:], COMMANDS)
    assert max(map(len, out.splitlines())) <= int(columns)


@pytest.mark.not_quick
def test_the_help_and_the_parsing_import_neither_torch_nor_ray() -> None:
    script = """
import sys
from raytrain.cli.commands import COMMANDS, GROUPS
from raytrain.cli.main import main
from raytrain.cli.parser import parse
try:
    main(["train", "cifar10", "--help"])
except SystemExit:
    parse(["train", "cifar10", "--workers", "2"], COMMANDS)
    print({"torch", "ray", "numpy", "pyarrow", "botocore"} & set(sys.modules) or "light")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "light"


@pytest.mark.not_quick
def test_the_package_exports_its_public_names() -> None:
    assert {"TrainConfig", "train", "start", "stop", "recipes", "Run", "UsageError"} <= set(raytrain.__all__)
    assert [name for name in raytrain.__all__ if getattr(raytrain, name).__name__.split(".")[-1] != name] == []
    assert dir(raytrain) == raytrain.__all__
    with pytest.raises(AttributeError, match="no_such_name"):
        raytrain.no_such_name  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.not_quick
def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "raytrain", "stop"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("raytrain: `raytrain stop` needs NAME")


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("rm first --yes second", ("first", "second")),
        ("rm --yes first --storage here second third", ("first", "second", "third")),
        ("rm --storage=here first --json second", ("first", "second")),
        ("compare first --png a.png second", ("first", "second")),
        ("watch first --port 80 second", ("first", "second")),
    ],
)
def test_names_may_follow_an_option(line: str, names: tuple[str, ...]) -> None:
    assert parse(line.split(), COMMANDS).keywords["runs"] == names


# Errors.


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ("train cifar10 --epochs 0", "--epochs is 0; it must be at least 1."),
        ("train cifar10 --image-size 0 8", "--image-size is (0, 8); each number must be at least 1."),
        ("train cifar10 --validation-fraction 1", "--validation-fraction is 1.0; it must be above 0 and below 1."),
        ("train cifar10 --learning-rate nan", "--learning-rate is nan; it must be at least 0."),
        ("train cifar10 --std 1 0 1", "--std is (1.0, 0.0, 1.0); each number must be above 0 and at most 1."),
        ("train cifar10 --workers 0", "--workers is 0; it must be at least 1."),
        ("train cifar10 --worker-load 1 -1", "--worker-load is (1.0, -1.0); each number must be at least 0."),
        ("train cifar10 --worker-load 0 0", "--worker-load is (0.0, 0.0); at least one number must be above 0."),
        ("train cifar10 --image-size 3x3", "--image-size is '3x3'; give a side, such as 224, height and width, or a"),
        ("trian cifar10", "There is no command 'trian' (did you mean train?)"),
        ("stop ../first --storage nowhere", "letters, digits"),
        ("show first/ --storage nowhere", "The name of a run is 'first/' (did you mean first?); use up to 100 letters"),
        ("stop * --storage nowhere", "The name of a run is '*'; use up to 100 letters"),
        ("train digits --data nowhere --name *", "--name is '*'; use up to 100 letters"),
        ("logs first --worker x", "--worker is 'x'; it must be a whole number."),
        (
            "submit train cifar10 --lr=0.1",
            "--lr belongs to the command that is sent, which needs -- before it: `raytrain submit -- train --lr …`.",
        ),
        ("submit --adress x -- train cifar10", "There is no option --adress (did you mean --address?)."),
        ("watch --port x", "--port is 'x'; it must be a whole number."),
        ("stop first --storage nowhere", "nowhere to look for runs in; check --storage"),
        ("show first --storage nowhere", "nowhere to look for runs in; check --storage"),
    ],
)
def test_bad_usage_is_one_sentence_and_exit_code_2(
    argv: str, sentence: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*argv.split(), "--json"]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("raytrain: ")
    assert len(err.splitlines()) == 1
    assert sentence in err
    assert json.loads(out) == {"status": "failed", "error": err.removeprefix("raytrain: ").strip()}
    assert list(tmp_path.iterdir()) == []


def test_bad_usage_is_the_same_sentence_in_a_narrow_terminal_with_colours(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(["train", "cifar10", "--optimizer", "adam"]) == 2
    expected = "raytrain: --optimizer is 'adam' (did you mean adamw?); it must be one of sgd, adamw, lamb, lion.\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [(TrainingFailed("The workers died; --resume continues."), 1), (StorageError("No such bucket: b."), 2)],
)
def test_an_expected_error_is_one_sentence(
    error: Exception, exit_code: int, stand_in: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(train=failing(error))
    assert main(["train", "cifar10"]) == exit_code
    assert capsys.readouterr().err == f"raytrain: {error}\n"


def test_an_unexpected_error_is_one_sentence_and_its_traceback_is_kept(
    stand_in: Callable[..., None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    stand_in(train=failing(KeyError("a long story\nin the end this")))
    assert main(["train", "cifar10"]) == 1
    (log,) = tmp_path.iterdir()
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    assert "unexpected KeyError" in err
    assert str(log) in err
    assert "Traceback" in log.read_text()

    # Without a temporary folder, as on a full disk, the sentence is all there is.
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    assert main(["train", "cifar10", "--json"]) == 1
    out, err = capsys.readouterr()
    assert err.endswith(" (--debug shows the traceback here)\n")
    assert json.loads(out)["status"] == "failed"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (MemoryError("Unable to allocate 279. GiB"), "Unable to allocate 279. GiB"),
        (MemoryError("Unable to allocate 9. GiB for an array with shape (9,)"), "Unable to allocate 9. GiB"),
        (MemoryError(), "it is full"),
    ],
)
def test_too_little_memory_is_one_sentence(
    error: MemoryError, reason: str, stand_in: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(train=failing(error))
    assert main(["train", "cifar10"]) == 2
    assert capsys.readouterr().err.startswith(f"raytrain: This machine has too little memory ({reason}); give smaller")


def test_a_library_that_is_broken_is_one_sentence(
    stand_in: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(train=failing(ImportError("libtorch_cpu.so: cannot open shared object file", name="torch._C")))
    assert main(["train", "cifar10"]) == 2
    assert capsys.readouterr().err == (
        "raytrain: torch cannot be imported (libtorch_cpu.so: cannot open shared object file); install it again, into "
        f"{sys.prefix}.\n"
    )


def test_a_long_path_in_a_pipe_stays_in_one_line(
    stand_in: Callable[..., None], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = f"/{'a long folder/' * 20}label.pt"
    tables = Group(key_value_table({"picture": path}), headed_table(["image"], ["margin"], [[path, "0.1"]]))
    stand_in("raytrain.display.run_tables", runs_table=lambda *_, **options: tables, run_info_json=dict)
    assert main(["runs", "--storage", str(tmp_path)]) == 0
    assert sum(path in line for line in capsys.readouterr().out.splitlines()) == 2


def test_the_document_of_a_failed_run_whose_loss_is_not_finite_is_json(
    stand_in: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(train=failing(TrainingFailed("The run failed.", {"validation_loss": float("nan")})))
    assert main(["train", "cifar10", "--json"]) == 1
    assert last_line(capsys)["validation_loss"] is None


@pytest.mark.parametrize("how", ["flag", "environment"])
def test_debug_shows_the_traceback(
    how: str, stand_in: Callable[..., None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(train=failing(StorageError("The bucket is gone.")))
    if how == "environment":
        monkeypatch.setenv("RAYTRAIN_DEBUG", "1")
    assert main(["train", "cifar10", *(["--debug"] if how == "flag" else [])]) == 2
    assert "Traceback" in capsys.readouterr().err
    stand_in(train=failing(TrainingFailed("The loop failed.")))
    main(["train", "cifar10", "--debug"])
    assert "Traceback" not in capsys.readouterr().err, "that of the loop, which is in another process, is in the log"


def test_an_abort_shows_no_traceback(stand_in: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    def train(config: TrainConfig, **options: Any) -> Any:
        raise KeyboardInterrupt

    stand_in(train=train)
    assert main(["train", "cifar10"]) == 130
    assert capsys.readouterr() == ("", "raytrain: aborted.\n")
    assert main(["train", "cifar10", "--json"]) == 130
    assert json.loads(capsys.readouterr().out) == {"status": "aborted", "error": "aborted."}


def test_an_abort_while_the_command_is_imported_shows_no_traceback(
    stand_in: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in("raytrain.cli.main", __getattr__=failing(KeyboardInterrupt()))
    with pytest.raises(SystemExit, match="130"):
        run()
    assert capsys.readouterr() == ("", "raytrain: aborted.\n")


# Results.


def last_line(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return json.loads(capsys.readouterr().out.splitlines()[-1], parse_constant=pytest.fail)


def test_train_ends_with_its_summary_as_json(trained: list[TrainConfig], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "cifar10", "--json"]) == 0
    assert last_line(capsys) == {**RESULT.summary(), "validation_loss": None}


def test_a_command_to_copy_is_one_line_in_a_narrow_terminal(
    stand_in: Callable[..., None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    stand_in(train=lambda config, **options: train_result(status="stopped"))
    assert main(["train", "cifar10", "--storage", "a folder with a long name"]) == 0
    command = "raytrain train --name first --storage 'a folder with a long name' --resume"
    assert any(line.endswith(command) for line in capsys.readouterr().out.splitlines())


def test_predict_takes_files_and_prints_rows(stand_in: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    row = {"key": "photo.jpg", "label": "cat", "score": 0.9, "error": None}
    asked: list[Any] = []
    result = SimpleNamespace(images=2, errors=0, summary=lambda: {"run": "first", "rows": [row]})
    stand_in(predict=lambda run, data, output, **_: (asked.append((run, data, output)), result)[1])
    assert main(["predict", "first", "photo.jpg", "b.png"]) == 0
    assert asked == [("first", ("photo.jpg", "b.png"), None)]
    assert "photo.jpg cat 0.9000" in " ".join(capsys.readouterr().out.split())
    for words in (["first"], ["first", "photo.jpg", "--data", "d"]):
        assert main(["predict", *words]) == 2
        assert "or a folder with --data" in capsys.readouterr().err


@pytest.mark.parametrize(("status", "exit_code"), [("finished", 0), ("stopped", 0), ("failed", 1)])
def test_the_exit_code_depends_on_the_runs_final_status(
    status: str, exit_code: int, stand_in: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(train=lambda config, **options: dataclasses.replace(RESULT, status=status))
    assert main(["train", "cifar10", "--data", "my images", "--workers", "2"]) == exit_code
    out = " ".join(capsys.readouterr().out.split())
    assert f"status {status}" in out
    resume_command = "raytrain train --name first --workers 2 --resume"
    assert (resume_command in out) == (status != "finished")


def test_lines_to_copy_are_not_wrapped(
    stand_in: Callable[..., None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    lines = ["names = ['" + "a name with blanks " * 10 + "']", "print(names)"]
    stand_in(export=lambda *_, **__: SimpleNamespace(summary=lambda: {"output": "m.pt2", "example": "\n".join(lines)}))
    assert main(["export", "first", "--output", "m.pt2"]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == lines


@pytest.mark.parametrize(
    ("line", "heading"),
    [
        ("import torchvision", "Without raytrain:"),
        ("from raytrain.models import digits", "With raytrain.models alone:"),
    ],
)
def test_an_export_says_whether_its_lines_need_raytrain(
    line: str, heading: str, stand_in: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(export=lambda *_, **__: SimpleNamespace(summary=lambda: {"output": "m.safetensors", "example": line}))
    assert main(["export", "first", "--output", "m.safetensors"]) == 0
    assert capsys.readouterr().out.splitlines()[-3:] == [heading, "", line]


def test_predict_export_doctor_devices_and_demo_pass_on_their_options(
    stand_in: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[Any] = []

    def note(result: Any) -> Callable[..., Any]:
        return lambda *args, **named: (calls.append((args, named)), result)[1]

    report = SimpleNamespace(summary=lambda: {"nodes": []}, ok=False)
    stand_in("raytrain.display.diagnostics_tables", doctor_page=lambda _: "", devices_page=lambda _: "")
    stand_in(predict=note(SimpleNamespace(images=7, errors=0, summary=lambda: {"images": 7})))
    stand_in(export=note(SimpleNamespace(summary=lambda: {"same_answers": 9, "example": ""})))
    stand_in("raytrain.diagnostics.doctor", diagnose=note(report))
    stand_in("raytrain.diagnostics.node_probe", list_devices=note(()))
    stand_in(
        "raytrain.demo.demo",
        run_demo=note(SimpleNamespace(summary=lambda: {"validation_accuracy": 0.98})),
        demo_page=lambda *_: "",
    )
    for argv, document, exit_code in (
        ("export first --output m.onnx --data d --json", {"same_answers": 9, "example": ""}, 0),
        ("predict first --data d --output p.csv --top-k 3 --storage s --json", {"images": 7}, 0),
        ("doctor --data d --address auto --json", {"nodes": []}, 1),
        ("devices --address auto --json", {"nodes": []}, 0),
        ("demo --workers 1 --json", {"validation_accuracy": 0.98}, 0),
    ):
        assert main(argv.split()) == exit_code
        assert last_line(capsys) == document
    assert calls == [
        (("first", "m.onnx"), {"format": None, "data": "d", "storage": "./runs", "trust": False}),
        (
            ("first", "d", "p.csv"),
            {
                "storage": "s",
                "top_k": 3,
                "embeddings": False,
                "threshold": (),
                "test_views": (),
                "workers": None,
                "address": None,
                "trust": False,
            },
        ),
        (("d", "./runs", "auto"), {}),
        (("auto",), {}),
        ((), {"storage": "./runs", "workers": 1}),
    ]


EVALUATION = score(
    np.array([0, 0, 0, 0, 1]),
    np.array([0, 0, 0, 1, 1]),
    np.full(5, 0.5),
    ("cat", "dog"),
    run="first",
    data="d",
    checkpoint="checkpoints/step-000000020.pt",
    skipped=1,
)


def test_evaluate_prints_classes_and_confusions_and_draws_a_figure(
    stand_in: Callable[..., None], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    calls: list[Any] = []
    stand_in(evaluate=lambda *args, **named: (calls.append((args, named)), EVALUATION)[1])
    assert main(["evaluate", "first", "--data", "d", "--workers", "2"]) == 0
    named = {"labels": None, "threshold": (), "test_views": (), "storage": "./runs"}
    named |= {"workers": 2, "address": None, "trust": False}
    assert calls == [(("first", "d"), named)]
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    for words in (["accuracy", "0.8000"], ["images", "5"], ["skipped", "1"], ["picture", "./runs/first/confusion.png"]):
        assert words in lines
    (cat,) = [line for line in lines if line[:4] == ["cat", "4", "3", "0.7500"]]
    assert cat[-4:] == ["cat", "dog", "1", "25.0%"]
    assert (tmp_path / "runs" / "first" / "confusion.png").read_bytes().startswith(b"\x89PNG")
    assert [file.name for file in tmp_path.iterdir()] == ["runs"]
    assert main(["evaluate", "first", "--data", "d", "--output", "mine.png", "--json"]) == 0
    assert last_line(capsys) == {**EVALUATION.summary(), "picture": "mine.png"}
    assert (tmp_path / "mine.png").is_file()

    # Somebody else's run, to whose folder nothing may be written: it is measured without a picture.
    (tmp_path / "file").touch()
    assert main(["evaluate", "first", "--data", "d", "--storage", "file/runs", "--json"]) == 0
    assert last_line(capsys) == {**EVALUATION.summary(), "picture": None}


def test_evaluate_says_that_images_of_several_classes_have_no_picture(
    stand_in: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    result = label_evaluation("cat")
    stand_in(evaluate=lambda *args, **named: result)
    assert main(["evaluate", "first", "--data", "d", "--output", "mine.png", "--json"]) == 0
    assert last_line(capsys) == result.summary()
    assert "no mine.png: images of run first may have several classes" in caplog.text
    assert not (tmp_path / "mine.png").exists()


def test_evaluate_refuses_a_wrong_output_before_it_starts(
    stand_in: Callable[..., None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(evaluate=lambda *args, **named: pytest.fail("it started"))
    assert main(["evaluate", "first", "--data", "d", "--output", "nowhere/c.png"]) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_only_the_worst_of_many_classes_are_shown() -> None:
    matrix = np.array([[10, 0] if label == 7 else [label + 20, 1] for label in range(30)])
    scores = tuple(
        ClassScore(f"class-{label}", int(sum(counts)), int(counts[0]), counts[0] / sum(counts))
        for label, counts in enumerate(matrix)
    )
    console = Console(width=150, file=io.StringIO())
    console.print(evaluation_page(dataclasses.replace(EVALUATION, per_class=scores, confusions=())))
    seen = console.file.getvalue()  # pyright: ignore
    assert "class-0 " in seen
    assert "class-7 " not in seen
    assert "and 10 better classes" in seen
    assert "No image was misclassified." in seen


def test_stop_requests_a_stop(stand_in: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[Any] = []
    stand_in(stop=lambda name, **named: asked.append((name, named["storage"], named["address"])))
    assert main(["stop", "first", "--storage", "s3://b/runs", "--address", "auto", "--json"]) == 0
    assert asked == [("first", "s3://b/runs", "auto")]
    assert last_line(capsys)["status"] == "stop requested"


def test_runs_lists_the_runs_of_a_storage(storage: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "--storage", storage]) == 0
    out = capsys.readouterr().out
    for part in ("first", "cifar10", "stopped", "2/9", "20/90", "0.6250"):
        assert part in out
    assert main(["runs", "--storage", storage, "--json"]) == 0
    (run,) = last_line(capsys)["runs"]
    assert (run["name"], run["status"], run["step"], run["validation_accuracy"]) == ("first", "stopped", 20, 0.625)


def test_a_file_in_place_of_a_folder_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (file := tmp_path / "file").touch()
    for words in (["runs", "--storage", str(file)], ["watch", "--storage", str(file)], ["new", str(file)]):
        assert main(words) == 2
        assert f"raytrain: {file} is a file, but should be a folder; " in capsys.readouterr().err
    assert main(["new", f"{file}/project"]) == 2
    assert "is below a file" in capsys.readouterr().err
    assert main(["new", "s3://bucket/project"]) == 2
    assert "s3://bucket/project is not a folder of this machine" in capsys.readouterr().err
    assert main(["new", str(tmp_path / "deep/project")]) == 0
    assert sorted(path.name for path in (tmp_path / "deep/project").iterdir()) == ["README.md", "loop.py", "train.py"]


@pytest.mark.not_quick
def test_ctrl_c_is_no_traceback_while_the_commands_are_imported() -> None:
    code = (
        "import sys, raytrain.cli.main; print(*{'tyro', 'rich', 'numpy', 'raytrain.cli.parser'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "", "what takes long is imported where Ctrl-C ends the command"


def test_runs_reports_an_empty_storage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "--storage", str(tmp_path)]) == 0
    assert "There are no runs" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", ["runs", "show a", "compare a", "logs a", "stop a", "tag a", "rm a --yes", "audit a", "watch", "watch a"]
)
def test_storage_that_does_not_exist_is_refused(words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words.split(), "--storage", str(tmp_path / "none")]) == 2
    assert f"There is no folder {tmp_path / 'none'} to look for runs in" in capsys.readouterr().err


def test_show_prints_the_details_of_a_run(
    storage: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["show", "first", "--storage", storage]) == 0
    out = capsys.readouterr().out
    for part in ("first  stopped at step 20/90, epoch 2/9", "Epoch: 2, Elapsed: 00:01:00", "train 0.100", "step 20"):
        assert part in out
    for part in ("stop reason", "Ctrl-C", "step-000000020.pt", "3.0 MB", "1 image skipped", "cat/a.jpg: truncated"):
        assert part in out
    assert "raytrain train cifar10 --data 'my data' --name first" in " ".join(out.split())


def test_show_prints_the_same_as_json(storage: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "first", "--storage", storage, "--json"]) == 0
    shown = last_line(capsys)
    assert shown["config"]["workers"] == 2
    assert shown["status"]["status"] == "stopped"
    assert shown["summary"]["validation_accuracy"] == 0.625
    assert [row["step"] for row in shown["metrics"]] == [10, 20]
    assert [stored["path"] for stored in shown["checkpoints"]] == ["checkpoints/step-000000020.pt"]
    assert shown["skipped"] == [{"key": "cat/a.jpg", "reason": "truncated"}]


def test_show_draws_the_curves(storage: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["show", "first", "--storage", storage, "--png", str(tmp_path / "first.png")]) == 0
    assert (tmp_path / "first.png").read_bytes().startswith(b"\x89PNG")
    assert main(["show", "first", "--storage", storage, "--png", "first.svg"]) == 2
    assert "--png is 'first.svg'; its name must end in .png." in capsys.readouterr().err


def test_compare_shows_runs_side_by_side(
    storage: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    second = run_store(storage, "second")
    first = read_config(run_store(storage, "first"))
    write_config(second, dataclasses.replace(first, name="second", weight_decay=1e-10, translate=2))
    row = {"step": 30, "epoch": 1, "elapsed_s": 1234.5}
    rows = [
        {"kind": "step", "loss": 0.5, "images_per_s": 1500.0, **row},
        {"kind": "evaluation", "accuracy": 0.75, "loss": 0.25, **row},
    ]
    second.put("metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())
    assert main(["compare", "first", "second", "--storage", storage, "--png", str(tmp_path / "both.png")]) == 0
    out = capsys.readouterr().out
    lines = [line.split() for line in out.splitlines()]
    for words in (
        ["first", "second"],
        ["translate", "4", "2"],
        ["steps", "20", "30"],
        ["epochs", "2", "1"],
        ["skipped", "1", "0"],
    ):
        assert words in lines
    for words in (
        ["last", "accuracy", "–", "0.7500"],
        ["training", "loss", "0.1000", "0.5000"],
        ["images/s", "–", "1,500"],
    ):
        assert words in lines
    assert not any("weight" in line or "name" in line for line in lines)
    assert "first 0.100" in out and "second 0.500" in out and "second 0.750" in out
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")
    assert main(["compare", "first", "second", "--storage", storage, "--json"]) == 0
    assert [run["options"] for run in last_line(capsys)["runs"]] == [{"translate": 4}, {"translate": 2}]
    assert main(["compare", "first", "--storage", storage]) == 2
    assert "takes two runs or more" in capsys.readouterr().err
    assert main(["compare", "first", "first", "--storage", storage]) == 2  # twice the same


def test_the_printed_train_command_has_the_options_of_the_run(storage: str, trained: list[TrainConfig]) -> None:
    config = read_config(open_run(storage, "first"))
    assert main(shlex.split(train_command(config))[1:]) == 0
    assert [again.scaled_to(2) for again in trained] == [config]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (alexnet_transfer(data="photos", weights=None), "--weights none"),
        (cifar10_fast(data="photos", ema_decay=None), "--ema-decay none"),
    ],
)
def test_the_printed_train_command_has_options_that_are_none(
    config: TrainConfig, words: str, trained: list[TrainConfig]
) -> None:
    assert words in train_command(config)
    assert main(shlex.split(train_command(config))[1:]) == 0
    assert trained == [config]


def test_the_printed_train_command_of_a_run_whose_images_chose_its_options_has_them(trained: list[TrainConfig]) -> None:
    chosen = dataclasses.replace(auto(data="photos"), open_options=(), model="efficientnet_b0", epochs=3)
    assert main(shlex.split(train_command(chosen))[1:]) == 0
    assert trained == [dataclasses.replace(chosen, recipe="custom")]


def test_the_printed_train_command_of_open_options_has_those_that_were_given(trained: list[TrainConfig]) -> None:
    half_open = auto(data="photos", model="resnet18", weights=None)  # as the recipe has them while they are open
    assert main(shlex.split(train_command(half_open))[1:]) == 0
    assert trained == [half_open]


@pytest.mark.not_quick
def test_the_readme_picture_can_be_drawn_from_a_run(storage: str, tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / ".github" / "picture.py"
    subprocess.run(
        [sys.executable, script, "first", "--storage", storage, "--output", tmp_path / "run.svg"], check=True
    )
    svg = (tmp_path / "run.svg").read_text()
    assert "step&#160;20/90" in svg
    assert "url(http" not in svg
    assert len(svg) < 100_000


@pytest.mark.not_quick
def test_a_reader_that_has_seen_enough_hears_of_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "raytrain", "train", "--help"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_a_project_on_a_full_disk_leaves_no_file_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def copy(source: Path, target: Path) -> None:
        target.touch()
        raise OSError(errno.ENOSPC, "No space left on device", str(source), None, str(target))

    monkeypatch.setattr(shutil, "copyfile", copy)  # no test may fill the disk
    assert main(["new", f"{tmp_path}/my project"]) == 2
    assert capsys.readouterr().err == (
        f"raytrain: The disk of {tmp_path}/my project is full; free space or choose another place.\n"
    )
    assert not [*(tmp_path / "my project").iterdir()]

    monkeypatch.undo()
    assert main(["new", f"{tmp_path}/my project"]) == 0
    assert f"cd '{tmp_path}/my project' && " in capsys.readouterr().out


@pytest.mark.not_quick
def test_a_current_folder_that_is_gone_is_one_sentence(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from raytrain.cli.main import run; run()", "runs"]
    line = f"rmdir {shlex.quote(str(tmp_path))}; {shlex.join(command)}"
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "raytrain: The current folder is gone; change to another one.\n")


@pytest.mark.not_quick
@pytest.mark.parametrize(
    ("redirected", "code", "sentence"),
    [
        (">&-", 0, ""),  # standard output is closed
        ("<&- >&- 2>&-", 0, ""),
        ("| true; exit ${PIPESTATUS[0]}", 128 + signal.SIGPIPE, ""),
        pytest.param(
            ">/dev/full",
            1,
            "raytrain: The output cannot be written (No space left on device).",
            marks=pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux"),
        ),
    ],
)
def test_an_output_that_takes_nothing_is_no_traceback(storage: str, redirected: str, code: int, sentence: str) -> None:
    line = f"{shlex.join([sys.executable, '-m', 'raytrain', 'show', 'first', '--storage', storage])} {redirected}"
    done = subprocess.run(["bash", "-c", line], stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr.strip()) == (code, sentence)


def test_serve_says_what_its_start_waits_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def serve(run: str, *, ready: Callable[[str], object], **options: object) -> None:
        STARTUP.info("waiting for Ray on this machine …")
        ready(f"http://127.0.0.1:8000/{run}")

    monkeypatch.setattr(raytrain, "serve", serve)
    assert main(["serve", "first"]) == 0
    printed = capsys.readouterr()
    assert printed.err == "waiting for Ray on this machine …\n" and printed.out.startswith("Serving at http://127.0")
