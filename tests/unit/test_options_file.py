"""`--config FILE`: what it says counts unless a flag says otherwise, and a mistake is a sentence with its line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raytrain.cli.commands import COMMANDS
from raytrain.cli.options_file import read_options_file
from raytrain.cli.parser import parse
from raytrain.config import TrainConfig
from raytrain.errors import UsageError
from raytrain.launch.job_files import job_files
from raytrain.recipes import cifar10
from raytrain.runs.documents import run_store, write_config


def options(*words: str) -> TrainConfig:
    config = parse(words, COMMANDS).keywords["config"]
    assert isinstance(config, TrainConfig)
    return config


def refused(*words: str) -> str:
    with pytest.raises(UsageError) as error:
        parse(words, COMMANDS)
    return str(error.value)


def written(folder: Path, text: str, name: str = "run.yaml") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


YAML = """\
# as people write it
recipe: cifar10
data: photos
learning-rate: 1e-3
image_size: 64
mean: [0.5, .5, 5e-1]
tag: [night, 2]
patience: None
max_time: 2h
compile: true
"""


def test_a_file_of_yaml_is_as_if_its_options_were_typed(tmp_path: Path) -> None:
    config = options("train", "--config", written(tmp_path, YAML))
    assert config == cifar10(
        data="photos",
        learning_rate=1e-3,
        image_size=(64, 64),
        mean=(0.5, 0.5, 0.5),
        tag=("night", "2"),
        patience=None,
        max_time="2h",
        compile=True,
    )


@pytest.mark.parametrize("command", ["train", "sweep", "find-rate", "look", "profile"])
def test_what_is_typed_wins(tmp_path: Path, command: str) -> None:
    file = written(tmp_path, YAML)
    config = options(command, "cifar10", "--no-compile", "--momentum", "0.3", f"--config={file}", "--data", "others")
    assert (config.momentum, config.data, config.compile, config.max_time) == (0.3, "others", False, "2h")


def test_a_flag_may_replace_an_option_that_contradicts_another_one(tmp_path: Path) -> None:
    file = written(tmp_path, "random_resized_crop: true\ncache: memory\n")
    assert "--cache is memory" in refused("train", "--config", file)
    assert options("train", "--config", file, "--cache", "none").cache == "none"


def test_json_has_the_same_options(tmp_path: Path) -> None:
    file = written(tmp_path, '{"recipe": "digits", "epochs": 3, "image_size": [28, 30], "until": null}', "run.json")
    config = options("train", "--config", file)
    assert (config.recipe, config.epochs, config.image_size, config.until) == ("digits", 3, (28, 30), None)


MISTAKES = {
    "learning_rte: 3": "line 2: there is no option learning_rte (did you mean learning_rate?)",
    "lr: 3": "line 2: there is no option lr (did you mean learning_rate?)",
    "open_options: [epochs]": "line 2: there is no option open_options",
    "vary: [1]": "line 2: there is no option vary",
    "epochs: ten": "line 2: --epochs is 'ten'; give a whole number",
    "epochs: 0": "line 2: --epochs is 0; it must be at least 1",
    "compile: yes": "line 2: --compile is 'yes'; give True or False",
    "channels: 2": "line 2: --channels is 2; give 1, 3",
    "recipe: [digits]": "line 2: there is no recipe ['digits']",
    "recipe: cifr10": "line 2: there is no recipe 'cifr10' (did you mean cifar10?)",
    "epochs: 1\nepochs: 2": "line 3: epochs is given already",
    "batch-size: 1\nbatch_size: 2": "line 3: batch_size is given already",
    "optimisation:\n  epochs: {last: 2}": "line 2: the value is nested",
    "dataset:\n  data: photos\n  epochs: 2": "line 2: dataset is a section, and options are not divided into sections",
    f"epochs: {'9' * 5000}": "line 2: --epochs is inf",
    "model-option: {a: 1, b: 2, a: 3}": "line 2: 'a' is given twice",
    "data: [a": "this is no YAML",
    "- epochs": "no names of options",
    "name: {a: 1}": "line 2: --name is {'a': 1}; give text",
    "AWS_SECRET_ACCESS_KEY: hunter22": "line 2: AWS_SECRET_ACCESS_KEY looks like a secret",
}


@pytest.mark.parametrize("text", MISTAKES)
def test_a_mistake_is_a_sentence_with_its_line(tmp_path: Path, text: str) -> None:
    sentence = refused("train", "--config", written(tmp_path, f"# first\n{text}\n"))
    assert "run.yaml" in sentence and MISTAKES[text] in sentence
    assert "hunter22" not in sentence


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"epochs": 3,}', "line 1: this is no JSON"),
        ('{"epohs": 3}', "there is no option epohs (did you mean epochs?)"),
        ('{"epochs": 3, "epochs": 4}', "epochs is given already"),
        ('{"class-weights": {"cat": 1, "dog": 2, "cat": 3}}', "class-weights: 'cat' is given twice"),
        ('{"training": {"epochs": 3, "lr": 1}}', "move what it contains to the top level: epochs, lr"),
        ("[]", "no JSON object"),
        (f'{{"data": {"[" * 50_000}{"]" * 50_000}}}', "nested too deeply"),
        (f'{{"data": {"[" * 900}{"]" * 900}}}', "nested too deeply"),
        ('{"epochs": ' + "9" * 5000 + "}", "a number of thousands of digits"),
        ('{"storage": null}', "--storage is None; give text"),
        ('{"data": ["a", "b"]}', "--data is ['a', 'b']; give text"),
        ('{"loop": true}', "--loop is True; give text"),
    ],
)
def test_a_mistake_in_json_names_the_key(tmp_path: Path, text: str, says: str) -> None:
    assert says in refused("train", "--config", written(tmp_path, text, "run.json"))


def test_texts_and_numbers_in_json_are_what_the_option_takes(tmp_path: Path) -> None:
    config = options("train", "digits", "--config", written(tmp_path, '{"name": 128, "tag": [1, "b"]}', "run.json"))
    assert (config.name, config.tag) == ("128", ("1", "b"))


def test_a_file_that_cannot_be_options_is_refused(tmp_path: Path) -> None:
    assert "ends in .yaml, .yml, .json" in refused("train", "--config", written(tmp_path, "", "run.toml"))
    assert "for the recipe cifar10, and the command for digits" in refused(
        "train", "digits", "--config", written(tmp_path, YAML)
    )
    # A small file may stand for gigabytes of the same list.
    layers = "".join(f"x{n}: &x{n} [{', '.join([f'*x{n - 1}'] * 9) if n else '1'}]\n" for n in range(9))
    assert "line 2: the value is nested" in refused("train", "--config", written(tmp_path, layers))


def stored_run(folder: Path, **changes: object) -> str:
    config = cifar10(data="photos", loop="loop.py:train", workers=2, track=("tensorboard",), **changes)
    resolved = config.resolve(name="first", num_workers=2, device="cuda", mean=(0.5,) * 3, std=(0.2,) * 3)
    write_config(run_store(str(folder), "first"), resolved)
    return f"{folder}/first/config.json"


def test_of_a_run_it_takes_what_the_run_computes(tmp_path: Path) -> None:
    file = stored_run(tmp_path, tag=("old",), note="old", resume=True, epochs=7)
    config = options("train", "--config", file, "--loop", "loop.py:train")
    assert (config.recipe, config.epochs, config.batch_size, config.data) == ("cifar10", 7, 512, "photos")
    assert (config.name, config.storage, config.resume, config.tag, config.note) == (None, "./runs", False, (), None)
    assert (config.workers, config.device, config.track) == ("auto", "auto", ())


def test_code_that_only_a_stored_run_names_needs_trust(tmp_path: Path) -> None:
    file = stored_run(tmp_path)
    assert f"{file} names --loop loop.py:train" in refused("train", "--config", file)
    assert options("train", "--config", file, "--trust").loop == "loop.py:train"
    own = written(tmp_path, "data: photos\nloop: loop.py:train\n")
    assert options("train", "--config", own).loop == "loop.py:train"


def test_an_option_that_a_newer_version_wrote_is_ignored_in_a_run_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = Path(stored_run(tmp_path))
    file.write_text(json.dumps({**json.loads(file.read_bytes()), "from_the_future": 1}))
    assert options("train", "--config", str(file), "--trust").recipe == "cifar10"
    assert "ignores: ['from_the_future']" in caplog.text


def test_a_run_resumes_with_what_the_file_says_and_its_own_options_else(tmp_path: Path) -> None:
    stored_run(tmp_path, epochs=7, momentum=0.5)
    text = f"storage: {tmp_path}\nname: first\nresume: true\nepochs: 9\nlearning_rate: 0.1\n"
    file = written(tmp_path, text)
    config = options("train", "--config", file, "--trust", "--lr", "0.2")
    assert (config.recipe, config.epochs, config.learning_rate, config.momentum) == ("cifar10", 9, 0.2, 0.5)


def test_a_job_gets_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path, YAML)
    config = TrainConfig(data="s3://bucket/train", batch_size=1)
    assert job_files(config, config_file="run.yaml").paths == (Path("run.yaml"),)
    assert job_files(config, config_file="s3://bucket/run.yaml").paths == ()
    with pytest.raises(UsageError, match=r"--config: \.\./run.yaml is not in the current folder"):
        job_files(config, config_file="../run.yaml")


def test_every_option_can_be_in_a_file(tmp_path: Path) -> None:
    config = cifar10(data="photos", freeze=("layer1",), max_time="2h", until="accuracy=0.9")
    file = read_options_file(written(tmp_path, json.dumps(vars(config)), "all.json"))
    assert TrainConfig(**file.values, recipe=file.recipe or "") == config
