"""The demo: its effect on this process and machine, and the commands that it prints."""

from __future__ import annotations

import io
import os
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from raytrain.cli.commands import COMMANDS
from raytrain.cli.parser import parse
from raytrain.demo import demo
from raytrain.demo.s3_server import S3Server
from raytrain.errors import UsageError
from raytrain.storage.open import open_store


def printed(result: Any, **folders: str) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(demo.demo_page(result, **folders))
    return console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


NEXT = ("show", "evaluate", "predict", "export", "serve")
RESULT: Any = SimpleNamespace(
    name="demo-2",
    status="finished",
    steps=144,
    seconds=41.0,
    validation_accuracy=0.9912,
    checkpoint=os.path.abspath("some where/demo-2/checkpoints/step-000000144.pt"),
    run_dir=os.path.abspath("some where/demo-2"),
)


@pytest.mark.not_quick
def test_the_users_aws_configuration_is_ignored_and_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "a user's")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "https://a.user.example")
    (tmp_path / "own").mkdir()
    before = dict(os.environ)
    with S3Server(tmp_path) as server, demo.aws_environment(server.environment()):
        open_store("s3://own").check_readable()
        assert "AWS_SESSION_TOKEN" not in os.environ
    assert dict(os.environ) == before


def test_a_second_demo_has_another_name(tmp_path: Path) -> None:
    for name in ("demo", "demo-2", "demo-3"):
        assert demo.unused_name(str(tmp_path)) == name
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")


def test_s3_as_storage_of_the_demo_is_refused() -> None:
    with pytest.raises(UsageError, match="--storage is s3://bucket/runs; the demo stores its run in a folder"):
        demo.run_demo(storage="s3://bucket/runs")


def test_too_many_workers_are_refused_before_a_digit_is_drawn(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--workers is 9999, and this machine has"):
        demo.run_demo(str(tmp_path / "runs"), workers=9999, images=str(tmp_path / "images"))
    assert not list(tmp_path.iterdir())


def test_the_summary_has_accuracy_locations_and_valid_commands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("UV", raising=False)
    text = printed(RESULT, storage="some where", images="my images")
    assert "99.12%" in text
    assert "run         some where/demo-2\n" in text
    commands = re.findall(r"^ +raytrain (.+)$", text, re.MULTILINE)
    bound = [parse(shlex.split(command), COMMANDS) for command in commands]
    assert [command.func.__name__ for command in bound] == list(NEXT)  # pyright: ignore[reportFunctionMemberAccess]
    sections = [command.keywords.get("prediction", command.keywords.get("serving")) for command in bound]
    storages = [
        getattr(section, "storage", command.keywords.get("storage"))
        for section, command in zip(sections, bound, strict=True)
    ]
    assert storages == ["some where"] * 5 and {command.keywords["run"] for command in bound} == {"demo-2"}
    assert bound[1].keywords["data"] == "my images/test"  # pyright: ignore[reportFunctionMemberAccess]


def test_with_uv_the_printed_commands_use_uv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV", "/usr/bin/uv")
    extras = re.findall(r"^ +uv run (?:--extra (\w+) )?raytrain ", printed(RESULT), re.MULTILINE)
    assert extras == ["", "", "", "onnx", "serve"]
