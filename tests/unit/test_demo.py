"""The demo: what it does to this process and to the machine, and the commands that it gives away."""

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
from raytrain.demo.s3_server import serve
from raytrain.errors import UsageError
from raytrain.storage.open import open_store


def printed(result: Any, **places: str) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(demo.outcome(result, **places))
    return console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


RESULT: Any = SimpleNamespace(
    name="demo-2",
    status="finished",
    steps=144,
    seconds=41.0,
    test_accuracy=0.9912,
    checkpoint=os.path.abspath("some where/demo-2/checkpoints/step-000000144.pt"),
    run_dir=os.path.abspath("some where/demo-2"),
)


def test_the_users_own_aws_configuration_is_out_of_the_way_and_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "a user's")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "https://a.user.example")
    (tmp_path / "own").mkdir()
    before = dict(os.environ)
    with serve(tmp_path) as server, demo._only(server.environment()):
        open_store("s3://own").check_readable()
        assert "AWS_SESSION_TOKEN" not in os.environ
    assert dict(os.environ) == before


def test_a_second_demo_gets_a_name_of_its_own(tmp_path: Path) -> None:
    for name in ("demo", "demo-2", "demo-3"):
        assert demo._free_name(str(tmp_path)) == name
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")


def test_a_bucket_for_the_runs_is_refused() -> None:
    with pytest.raises(UsageError, match="--storage is s3://bucket/runs; the demo keeps its run in a folder"):
        demo.demo(storage="s3://bucket/runs")


def test_the_outcome_gives_accuracy_places_and_commands_that_the_command_line_understands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UV", raising=False)
    text = printed(RESULT, storage="some where", images="my images")
    assert "99.12%" in text
    assert "run         some where/demo-2\n" in text
    commands = re.findall(r"^ +raytrain (.+)$", text, re.MULTILINE)
    bound = [parse(shlex.split(command), COMMANDS) for command in commands]
    assert [command.func.__name__ for command in bound] == ["show", "evaluate", "predict"]  # pyright: ignore[reportFunctionMemberAccess]
    assert all(command.keywords["run"] == "demo-2" and command.keywords["storage"] == "some where" for command in bound)  # pyright: ignore[reportFunctionMemberAccess]
    assert bound[1].keywords["data"] == "my images/test"  # pyright: ignore[reportFunctionMemberAccess]


def test_a_user_of_uv_gets_commands_for_uv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV", "/usr/bin/uv")
    assert len(re.findall(r"^ +uv run raytrain ", printed(RESULT), re.MULTILINE)) == 3
