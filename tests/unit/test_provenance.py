"""What a run was made of: found out, stored without secrets, and compared with the attempt before."""

from __future__ import annotations

import dataclasses
import json
import platform
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest

from raytrain.cli.main import main
from raytrain.config import TrainConfig
from raytrain.display.page.watched_runs import WatchedRuns
from raytrain.launch.gather_provenance import COMMIT_VARIABLE, Gathering, GitStatus
from raytrain.recipes import custom
from raytrain.runs.documents import PROVENANCE, is_run_file, run_store, write_config
from raytrain.runs.provenance import Provenance, provenance_at, read_provenance, record_provenance

pytestmark = pytest.mark.not_quick  # git is a process

MADE_OF = Provenance(
    first_step=0,
    started_at="2026-11-28T00:00:00+00:00",
    command="raytrain train --data photos",
    python="3.12.1",
    packages={"numpy": "2.1.0", "ray": "2.53.0", "raytrain": "0.1.0", "torch": "2.11.0"},
    commit="1a2b3c4d5e6f7a8b",
)


def git(folder: Path, *words: str) -> str:
    person = ("-c", "user.name=a", "-c", "user.email=a@b")
    return subprocess.run(
        ["git", *person, *words], cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "loop.py").write_text("def train(run):\n    password = 'hunter2222'\n")
    (tmp_path / "other.py").write_text("x = 1\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "one")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(COMMIT_VARIABLE, raising=False)
    return tmp_path


def gathered(**options: object) -> Provenance:
    return Gathering(TrainConfig(batch_size=1, **options), None, 0).finish()  # pyright: ignore[reportArgumentType]


def test_versions_commit_command_and_code_are_found_out(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/usr/bin/raytrain", "train", "--data", "s3://b", "--note", "token=hunter2222"])
    made_of = gathered(loop="loop.py:train")
    assert made_of.commit == git(repository, "rev-parse", "HEAD")
    assert made_of.changed_files == []
    assert (made_of.python, made_of.packages["torch"]) == (platform.python_version(), version("torch"))
    assert {"raytrain", "ray", "numpy", "pyarrow"} <= made_of.packages.keys()
    assert made_of.command == "raytrain train --data s3://b --note token=…"
    assert made_of.code["loop.py"].startswith("def train(run):") and "hunter" not in made_of.code["loop.py"]


def test_a_secret_at_the_end_of_the_code_that_is_kept_is_removed_whole(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (repository / "long.py").write_text(f"{'x' * 199_990}Zq8rT4wLm2Pd9Kx\n")
    monkeypatch.setenv("MY_TOKEN", "Zq8rT4wLm2Pd9Kx")
    code = gathered(loop="long.py:train").code["long.py"]
    assert "x" * 199_990 + "…" in code and "Zq8" not in code


def test_a_tree_is_not_clean_with_changed_files_and_code_that_git_does_not_know(repository: Path) -> None:
    (repository / "notes.txt").write_text("of no importance")
    assert gathered(loop="loop.py:train").changed_files == []
    (repository / "other.py").write_text("x = 2\n")
    (repository / "mine").mkdir()
    (repository / "mine" / "new.py").write_text("def train(run): ...\n")
    assert gathered(loop="mine/new.py:train").changed_files == ["mine/", "other.py"]


def test_a_folder_that_git_does_not_know_is_not_that_of_the_code_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path of the repository, too, has a folder ``src``, and another repository a file ``loop.py``."""
    project = tmp_path / "src" / "project"
    (project / "src").mkdir(parents=True)
    (project / "loop.py").write_text("def train(run): ...\n")
    git(project, "init", "-q")
    git(project, "add", "loop.py")
    git(project, "commit", "-qm", "one")
    (project / "src" / "notes.txt").write_text("of no importance")
    (project / "weights.py").write_text("of no importance")
    (tmp_path / "weights.py").write_text("def train(run): ...\n")
    monkeypatch.delenv(COMMIT_VARIABLE, raising=False)
    assert GitStatus([project / "loop.py", tmp_path / "weights.py"]).result()[1] == []


def test_names_of_changed_files_are_not_quoted(repository: Path) -> None:
    """As git prints them otherwise, "l\\303\\266\\303\\266p.py" is no file that anybody knows."""
    name = 'lööp "new".py'
    (repository / name).write_text("def train(run): ...\n")
    assert GitStatus([repository / name]).result()[1] == [name]
    git(repository, "add", name)
    assert GitStatus([]).result()[1] == [name]


def test_a_repository_without_a_commit_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    git(tmp_path, "init", "-q")
    made_of = gathered()
    assert (made_of.commit, made_of.no_commit) == (None, "the repository has none yet")
    assert made_of.summary().startswith("no commit: the repository has none yet; raytrain ")
    # A folder that somebody else has prepared, such as one that a container mounts.
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    assert gathered().no_commit == "git does not read the repository of another user"
    shutil.rmtree(tmp_path / ".git")
    (tmp_path / ".git").mkdir()
    assert gathered().no_commit == "git cannot read the repository"


def test_more_files_than_are_named_have_changed(repository: Path) -> None:
    for number in range(101):
        (repository / f"{number}.txt").touch()
    git(repository, "add", ".")
    assert " with 100 or more changed files; raytrain" in gathered().summary()


def test_without_a_repository_there_is_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert GitStatus([]).result() == (None, [])


def test_without_git_there_is_no_commit(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(repository))
    status = GitStatus([])
    assert (*status.result(), status.problem) == (None, [], "there is no program git")


def test_a_job_has_the_commit_of_the_machine_that_submitted_it(
    repository: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    (repository / "other.py").write_text("x = 2\n")
    commit = git(repository, "rev-parse", "HEAD")
    monkeypatch.setenv(COMMIT_VARIABLE, GitStatus([]).to_variable() or "")
    monkeypatch.chdir(tmp_path_factory.mktemp("job"))
    assert GitStatus([]).result() == (commit, ["other.py"])


def test_code_is_read_when_the_attempt_begins(repository: Path) -> None:
    gathering = Gathering(TrainConfig(batch_size=1, loop="loop.py:train"), None, 0)
    (repository / "loop.py").write_text("changed while the workers start")
    assert gathering.finish().code["loop.py"].startswith("def train(run):")


def test_two_files_of_the_same_name_are_both_kept(repository: Path) -> None:
    for folder, name in (("nets", "network"), ("changes", "change")):
        (repository / folder).mkdir()
        (repository / folder / "mine.py").write_text(f"def {name}(): ...\n")
    made_of = gathered(loop="loop.py:train", model="nets/mine.py:network", transforms="changes/mine.py:change")
    assert sorted(made_of.code) == ["changes/mine.py", "loop.py", "mine.py"]
    assert {"def network(): ...\n", "def change(): ...\n"} < set(made_of.code.values())


def test_the_source_of_a_loop_that_is_a_function_is_kept(repository: Path) -> None:
    def my_loop(run: object) -> None:
        print("a line of the loop")

    made_of = Gathering(TrainConfig(batch_size=1), my_loop, 0).finish()
    assert 'print("a line of the loop")' in made_of.code["test_provenance.py"]


def test_an_attempt_is_added_only_if_it_differs(tmp_path: Path) -> None:
    store = run_store(str(tmp_path), "first")
    assert read_provenance(store) == ()
    assert record_provenance(store, MADE_OF) == ""
    later = dataclasses.replace(MADE_OF, first_step=10, started_at="later")
    assert record_provenance(store, later) == ""
    assert read_provenance(store) == (MADE_OF,)
    resumed = dataclasses.replace(later, command="raytrain train --resume")
    assert record_provenance(store, resumed) == ""
    assert read_provenance(store) == (MADE_OF, resumed)
    assert provenance_at(read_provenance(store), 10) == MADE_OF
    assert provenance_at(read_provenance(store), 11) == resumed
    assert is_run_file(PROVENANCE)


def test_what_is_different_is_said_in_a_line(tmp_path: Path) -> None:
    packages = {**MADE_OF.packages, "torch": "2.12.0", "numpy": "2.2.0", "timm": "1.0"}
    now = dataclasses.replace(
        MADE_OF, python="3.12.2", packages=packages, changed_files=["a.py", "b.py"], code={"loop.py": "new"}
    )
    assert now.difference_from(MADE_OF) == (
        "commit 1a2b3c4d5e with 2 changed files instead of commit 1a2b3c4d5e, another loop.py, "
        "Python 3.12.2 instead of 3.12.1, timm 1.0 instead of none, torch 2.12.0 instead of 2.11.0, "
        "1 other package (numpy 2.2.0 instead of 2.1.0)"
    )
    assert (
        dataclasses.replace(MADE_OF, commit=None).difference_from(MADE_OF) == "no commit instead of commit 1a2b3c4d5e"
    )


def test_show_and_the_page_tell_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = run_store(str(tmp_path), "first")
    config = custom(mean=(0.5,) * 3, std=(0.2,) * 3, learning_rate=0.1, batch_size=8)
    write_config(store, config.resolve(name="first", num_workers=1, device="cpu", mean=(), std=()))
    later = dataclasses.replace(MADE_OF, first_step=400, commit="5d6e7f8a90b1", changed_files=["loop\x1b.py"])
    other_loop = dataclasses.replace(later, first_step=500, code={"loop.py": "new"})
    other_command = dataclasses.replace(other_loop, first_step=600, command="raytrain train --name first --resume")
    for made_of in (MADE_OF, later, other_loop, other_command):
        record_provenance(store, made_of)
    assert main(["show", "first", "--storage", str(tmp_path)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "made of commit 1a2b3c4d5e; raytrain 0.1.0, torch 2.11.0" in shown
    assert "after step 400 commit 5d6e7f8a90 with 1 changed file instead of commit 1a2b3c4d5e" in shown
    assert "after step 500 another loop.py" in shown and "after step 600" not in shown
    assert main(["show", "first", "--storage", str(tmp_path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["provenance"][1]["packages"] == MADE_OF.packages
    assert WatchedRuns(str(tmp_path), ["first"]).documents("first")["made_of"] == later.summary()


def test_it_is_summed_up_in_a_line() -> None:
    text = "raytrain 0.1.0, torch 2.11.0, Ray 2.53.0, Python 3.12.1"
    assert MADE_OF.summary() == f"commit 1a2b3c4d5e; {text}"
    assert dataclasses.replace(MADE_OF, commit=None).summary() == text


@pytest.mark.parametrize("content", ["", "[]", '{"attempts": 3}', '{"attempts": [{"first_step": "x"}, 3, {}]}'])
def test_a_damaged_document_is_left_out(tmp_path: Path, content: str) -> None:
    store = run_store(str(tmp_path), "first")
    store.put(PROVENANCE, content.encode())
    assert read_provenance(store) == ()
    assert record_provenance(store, MADE_OF) == ""
    assert read_provenance(store) == (MADE_OF,)
