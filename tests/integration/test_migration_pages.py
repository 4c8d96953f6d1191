"""The pages for users of Lightning and timm: their scripts run as they stand, and the options that they name exist."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from raytrain.cli.commands import COMMANDS
from raytrain.cli.parser import parse
from raytrain.config.options import TrainConfig
from tests.helpers.scripts import run

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.slow
@pytest.mark.parametrize("page", ["from-lightning", "from-timm"])
def test_the_script_of_a_page_trains(page: str, images: Path, tmp_path: Path) -> None:
    (script,) = re.findall(r"```python title=\"train.py\"\n(.*?)```", (DOCS / f"{page}.md").read_text(), re.DOTALL)
    (tmp_path / "photos").symlink_to(images)
    (tmp_path / "train.py").write_text(script)
    assert re.search(r"validation accuracy \d\.\d\d", run(tmp_path, sys.executable, "train.py"))


def test_the_first_command_for_users_of_timm_has_the_options_of_theirs() -> None:
    diff = re.findall(r"^\+(.*)$", (DOCS / "from-timm.md").read_text().partition("\n## timm")[0], re.MULTILINE)
    command = parse(shlex.split(" ".join(diff))[1:], COMMANDS)
    (config,) = [value for value in command.keywords.values() if isinstance(value, TrainConfig)]
    assert (config.model, config.weights, config.batch_size) == ("timm:convnextv2_tiny", "DEFAULT", "64/worker")
    assert (config.mixup, config.cutmix, config.random_erasing, config.ema_decay) == (0.8, 1.0, 0.25, 0.999)


@pytest.mark.parametrize("page", ["from-lightning", "from-timm"])
def test_the_options_in_the_tables_exist(page: str) -> None:
    """The last column of each row has raytrain's words, of which those that begin with dashes are options."""
    rows = re.findall(r"^\|.*\| *(.*?) *\|$", (DOCS / f"{page}.md").read_text(), re.MULTILINE)
    codes = [code for row in rows for code in re.findall(r"`[^`]*`", row)]
    options = {option for code in codes for option in re.findall(r"--[a-z-]+", code)}
    known = {f"--{no}{name.replace('_', '-')}" for name in TrainConfig.__dataclass_fields__ for no in ("", "no-")}
    known |= {"--watch", "--config"}
    assert len(options) > 15
    assert options <= known, options - known
