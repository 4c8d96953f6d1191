"""A mistake in the user's code is told apart from what another start may do without, and has its line."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ray.exceptions import RayActorError

import raytrain
from raytrain.config.named_functions import load_function, own_files
from raytrain.config.pickled_code import check_loop, pickle_own_code
from raytrain.config.user_code import describe, is_of_user, restart_may_help
from raytrain.errors import UsageError
from raytrain.training.networks.model import build_model


@pytest.mark.parametrize("error", [RayActorError(), ConnectionResetError(), EOFError(), dist.DistBackendError("NCCL")])
def test_a_loss_of_something_else_may_pass(error: Exception) -> None:
    assert restart_may_help(error)


@pytest.mark.parametrize("error", [TypeError("x"), RuntimeError("shapes differ"), KeyError("a"), FileNotFoundError()])
def test_a_mistake_does_not_pass(error: Exception) -> None:
    assert not restart_may_help(error)


def test_the_line_and_the_first_line_of_the_message_are_named() -> None:
    with pytest.raises(RuntimeError) as raised:
        raise RuntimeError("shapes differ.\nsee elsewhere")
    assert describe(raised.value).startswith("RuntimeError: shapes differ (test_user_code.py, line ")


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("def train(run)\n    pass\n", r"SyntaxError: .*\(mistaken.py, line 1\)\.$"),
        ("from .beside import train\n", r"ImportError: .* \(mistaken.py, line 1: `from .beside import train`\)\.$"),
        # A long line is cut between words, because a part of a secret would not be redacted.
        (f"raise ValueError({'7' * 80!r}, {'8' * 80!r})\n", r"ValueError: .* `raise ValueError\('7{80}', …`\)\.$"),
    ],
)
def test_a_file_that_cannot_be_imported_is_said_with_its_line(code: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "mistaken.py").write_text(code)
    with pytest.raises(UsageError, match=rf"--loop .*mistaken.py:train cannot be imported: {sentence}"):
        load_function("--loop", f"{tmp_path}/mistaken.py:train")


def test_a_file_that_wants_arguments_is_told_where_to_read_them(tmp_path: Path) -> None:
    parse = "parser = argparse.ArgumentParser()\nparser.add_argument('--lr', required=True)\nparser.parse_args()\n"
    (tmp_path / "script.py").write_text(f"import argparse\n{parse}def train(run): ...\n")
    sentence = r"^script\.py exits .* \(script\.py, line 4: `parser.parse_args\(\)`\); put what reads .* below"
    with pytest.raises(UsageError, match=sentence):
        load_function("--loop", f"{tmp_path / 'script.py'}:train")


def test_a_file_that_trains_at_its_end_is_refused_when_its_loop_is_imported(tmp_path: Path) -> None:
    call = "raytrain.train(raytrain.TrainConfig(data='photos', batch_size=8), loop=train)"
    (tmp_path / "script.py").write_text(f"import raytrain\ndef train(run): ...\n{call}\n")
    with pytest.raises(UsageError, match=r"^script\.py starts a run when it is imported for its functions; put that"):
        load_function("--loop", f"{tmp_path / 'script.py'}:train")
    with pytest.raises(UsageError, match="--learning-rate is not given"):  # code that imports nothing may train
        raytrain.train(raytrain.TrainConfig(data="photos", batch_size=8))


def test_a_network_of_the_users_that_cannot_be_built_is_said_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "network.py").write_text("def build(num_classes, channels):\n    return {}['mine']\n")
    with pytest.raises(UsageError, match=r"network.py:build cannot be built: KeyError: 'mine' \(network.py, line 2: "):
        build_model(f"{tmp_path}/network.py:build", 3, 3, seed=0)


def test_of_a_long_message_an_error_has_the_first_words() -> None:
    assert describe(ValueError("0.125 " * 100_000)) == f"ValueError: {'0.125 ' * 166}…"


def _names_classes(run: Any) -> Any:
    return torch.zeros(len(run.classes))


def test_a_loop_that_names_torch_and_the_classes_of_its_run_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    """By these two names, cloudpickle takes the module torch.classes along."""
    monkeypatch.setattr(_names_classes, "__module__", "__main__")  # it is pickled by value then
    check_loop(_names_classes)
    assert len(pickle.loads(pickle_own_code(_names_classes))(SimpleNamespace(classes=("a", "b")))) == 2


def test_files_beside_the_package_are_the_users() -> None:
    package = Path(raytrain.__file__).parent
    assert is_of_user(f"{package}_loops/loop.py") and is_of_user(f"{package}.py")
    assert not is_of_user(str(package / "errors.py"))


def test_an_error_in_a_package_of_the_users_own_folder_names_the_line_of_the_users(tmp_path: Path) -> None:
    # `pip install --user` puts packages there, and a virtual environment may use those of Debian.
    package = tmp_path / "home" / ".local" / "lib" / "python3.12" / "site-packages" / "blur.py"
    package.parent.mkdir(parents=True)
    package.write_text("def blur(size): raise ValueError('no such size')\n")
    (tmp_path / "own.py").write_text("def make(blur):\n    return blur(3)\n")
    blur, make = (
        load_function("--transforms", f"{file}:{name}")
        for file, name in ((package, "blur"), (tmp_path / "own.py", "make"))
    )
    with pytest.raises(ValueError, match="no such size") as raised:
        make(blur)
    assert describe(raised.value) == "ValueError: no such size (own.py, line 2: `return blur(3)`)"
    assert not is_of_user("/usr/lib/python3/dist-packages/numpy/core.py")


def test_a_file_is_executed_once_and_again_when_it_has_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "counted.py"
    file.write_text("print('executed')\ndef network(): ...\n")
    networks = [load_function("--model", f"{file}:network") for _ in range(2)]
    assert networks[0] is networks[1]
    file.write_text("print('executed anew')\ndef network(): ...\n")
    assert load_function("--model", f"{file}:network") is not networks[0]
    file.write_text("print('fails')\n1 / 0\n")
    for _ in range(2):
        with pytest.raises(UsageError, match="ZeroDivisionError"):
            load_function("--model", f"{file}:network")
    assert capsys.readouterr().out.split("\n") == ["executed", "executed anew", "fails", "fails", ""]


def test_a_file_that_was_removed_since_its_import_is_not_sent_to_other_processes(tmp_path: Path) -> None:
    """They would fail to import it, for a function that may have nothing to do with it."""
    file = tmp_path / "removed.py"
    file.write_text("def train(run):\n    pass\n")
    load_function("--loop", f"{file}:train")
    assert str(file) in own_files().values()
    file.unlink()
    assert str(file) not in own_files().values()
