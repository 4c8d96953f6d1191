"""The parser: options reach their function, a resumed run keeps its own, and a mistake is one sentence."""

from __future__ import annotations

import dataclasses
import importlib
import re
import shlex
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Annotated

import pytest
from tyro.conf import Positional, arg

from raytrain.cli.parser import parse
from raytrain.cli.tyro_parser import Without
from raytrain.config import TrainConfig
from raytrain.config.option_marks import Mark
from raytrain.errors import UsageError
from raytrain.recipes import RECIPES
from raytrain.runs.documents import run_store, write_config


def train(config: TrainConfig) -> TrainConfig:
    """Train."""
    return config


def sweep(config: TrainConfig, vary: tuple[str, ...] = ()) -> TrainConfig:
    """Sweep."""
    return config


def find_rate(
    config: Annotated[TrainConfig, Without(Mark.SET_BY_FIND_RATE)],
    rates: Annotated[tuple[float, ...], arg(help="Rates to try.")],
    output: str = "",
) -> TrainConfig:
    """Find a rate."""
    return config


def stop(name: Annotated[Positional[str], arg(help="Name of the run.")], storage: str = "./runs") -> tuple[str, str]:
    """Stop a run."""
    return name, storage


COMMANDS = {"train": train, "sweep": sweep, "find-rate": find_rate, "stop": stop}


def parsed(line: str) -> TrainConfig:
    config = parse(shlex.split(line), COMMANDS)()
    assert isinstance(config, TrainConfig)
    return config


def test_the_flags_of_no_command_are_known_to_a_typo() -> None:
    assert "did you mean --version" in refused("--verison")
    assert refused("train --data x digits").startswith("digits is a recipe, which comes first, as in `raytrain train d")
    assert refused("stop first --hlep") == "There is no option --hlep (did you mean --help?)."


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("--amp", "--precision"),
        ("--arch vgg11", "--model"),
        ("--val_dir x", "--validation-data"),
        ("--gpus=2", "--workers"),
        ("--runs-dir x", "--storage"),
    ],
)
def test_a_flag_of_another_trainer_is_answered_with_the_option(words: str, meant: str) -> None:
    assert refused(f"train digits --data x {words}").endswith(f" (did you mean {meant}?).")


def test_a_flag_that_is_cut_off_is_taken_before_that_of_another_trainer_and_no_argument_for_a_flag() -> None:
    assert refused("find-rate digits --rates 0.1 --data x --out y").endswith(" (did you mean --output?).")
    assert refused("stop first --names") == "There is no option --names."


def test_images_without_their_flag_are_recognised(tmp_path: Path) -> None:
    assert refused(f"train digits {tmp_path}").endswith(f"images are given as --data {tmp_path}.")
    (tmp_path / "config.json").touch()
    assert refused(f"train digits --resume {tmp_path}").endswith(
        f"a run is given as --name {tmp_path.name} --storage {tmp_path.parent}."
    )
    assert refused("train digits s3://b/x").endswith("images are given as --data s3://b/x.")
    for name in ("cat", "dog", "owl"):
        (tmp_path / name).mkdir()
    paths = [str(tmp_path / name) for name in ("cat", "dog", "owl")]  # a shell has replaced photos/*
    for words in (" ".join(paths[:2]), " ".join(paths)):
        assert refused(f"train digits --data {words}").endswith(f"with all images below it, such as --data {tmp_path}.")


def test_an_empty_word_of_a_shell_is_refused() -> None:
    assert refused("train digits --data x --name ''") == "The value of --name is empty; give one, or leave it out."
    assert refused("sweep digits --data x --test-data=").startswith("The value of --test-data is empty")
    assert refused("train digits --data x --tag a ''").startswith("The value of an argument is empty")
    assert refused("stop ''").startswith("The value of an argument is empty")
    assert parsed("train digits --data x --note ''").note == ""


def refused(line: str) -> str:
    with pytest.raises(UsageError) as error:
        parse(shlex.split(line), COMMANDS)
    return str(error.value)


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainConfig:
    """The options of an existing run called ``first`` in ./runs."""
    monkeypatch.chdir(tmp_path)
    config = RECIPES["cifar10"](name="first", data="s3://b/train", epochs=3, seed=7, workers=2, device="cuda:0")
    write_config(run_store("runs", "first"), config)
    return config


@pytest.mark.parametrize("command", ["train", "sweep"])
@pytest.mark.parametrize(
    "words",
    [
        "--name first --resume",
        "--name=first --resume",
        "--resume --name=first",
        "--name=first --storage=./runs --resume",
        "--storage runs --name first --resume",
    ],
)
def test_a_resumed_run_keeps_its_own_options_however_they_are_typed(
    command: str, words: str, stored: TrainConfig
) -> None:
    config = parsed(f"{command} cifar10 {words} --epochs=4")
    anew = {"workers": "auto", "device": "auto", "resume": True, "storage": config.storage}
    assert config == dataclasses.replace(stored, epochs=4, **anew)
    assert config.storage in ("runs", "./runs")


def test_a_launcher_may_resume_a_run_that_does_not_exist_yet(stored: TrainConfig) -> None:
    config = parsed("train cifar10 --name=second --resume --data s3://b/other")
    assert config == RECIPES["cifar10"](name="second", resume=True, data="s3://b/other")


def test_resuming_a_run_that_does_not_exist_is_a_mistake_unless_data_is_given(stored: TrainConfig) -> None:
    assert "There is no run 'frist' in ./runs (did you mean first?)" in refused("train cifar10 --name=frist --resume")


def test_workers_and_device_are_chosen_anew_for_each_resume(stored: TrainConfig) -> None:
    config = parsed("train cifar10 --name=first --resume --workers=3 --device cuda:0,1,2")
    assert (config.workers, config.device, config.gpus, config.seed) == (3, "cuda:0,1,2", "0,1,2", 7)


@pytest.mark.parametrize("words", ["--name first", "--name first --no-resume"])
def test_a_new_run_has_the_options_of_the_recipe(words: str, stored: TrainConfig) -> None:
    assert parsed(f"train cifar10 {words}") == RECIPES["cifar10"](name="first")


def test_a_command_that_never_resumes_has_the_options_of_the_recipe(stored: TrainConfig) -> None:
    assert parsed("find-rate cifar10 --name=first --rates 1 2") == RECIPES["cifar10"](name="first")


@pytest.mark.parametrize("command", ["train", "sweep"])
def test_a_run_is_not_resumed_as_another_recipe(command: str, stored: TrainConfig) -> None:
    assert "cifar10, not as digits; continue with `raytrain " + command in refused(
        f"{command} digits --name=first --resume"
    )


@pytest.mark.parametrize("words", ["", "cifar10 "])
def test_a_run_of_a_recipe_that_is_unknown_here_needs_the_version_that_knows_it(
    words: str, stored: TrainConfig
) -> None:
    document = Path("runs/first/config.json")
    document.write_text(document.read_text().replace('"cifar10"', '"of-2031"'))
    sentence = refused(f"train {words}--name=first --resume")
    assert "was started as of-2031, a recipe that this version of raytrain does not have" in sentence
    assert "continue with the version that `raytrain show first` names" in sentence


def test_a_run_that_does_not_exist_is_not_resumed(stored: TrainConfig) -> None:
    assert "There is no run 'frist' in ./runs" in refused("train cifar10 --name=frist --resume")


def test_without_a_recipe_auto_is_trained_or_the_run_resumed_as_it_was(stored: TrainConfig) -> None:
    expected = RECIPES["auto"](data="cifar10", image_size=(64, 64), learning_rate=0.5, batch_size=8)
    assert parsed("train --data cifar10 --image-size 64 --lr 0.5 --bs=8") == expected
    assert parsed("train --debug --data=cifar10 --image-size 64 --lr 0.5 --bs 8") == expected
    resumed = parsed("train --name first --resume --epochs 4")
    assert (resumed.recipe, resumed.seed, resumed.epochs) == ("cifar10", 7, 4)


@pytest.mark.parametrize("words", ["--optimizer sgd", "--optimizer=sgd", "--no-nesterov --bs 8", "--weights none"])
def test_what_is_typed_is_not_left_to_auto_also_if_it_is_the_default(words: str, stored: TrainConfig) -> None:
    names = {"--optimizer": "optimizer", "--no-nesterov": "nesterov", "--weights": "weights"}
    name = names[words.partition(" ")[0].partition("=")[0]]
    assert name in parsed("train --data x").open_options
    assert name not in parsed(f"train --data x {words}").open_options


def test_a_resumed_run_of_auto_keeps_what_was_chosen(stored: TrainConfig) -> None:
    chosen = {"batch_norm": "frozen", "head_epochs": 1, "optimizer": "adamw", "learning_rate": 5e-4}
    write_config(run_store("runs", "second"), RECIPES["auto"](name="second", data="x", open_options=(), **chosen))
    for words in (
        "train --name second --resume",
        "train auto --name second --resume",
        "train --config runs/second/config.json",
    ):
        config = parsed(words)
        assert {name: getattr(config, name) for name in chosen} == chosen and config.open_options == ()


def test_a_loop_of_ones_own_gets_the_plain_options(stored: TrainConfig) -> None:
    assert parsed("train --data x --loop mine.py:train") == RECIPES["custom"](data="x", loop="mine.py:train")


def test_a_flag_of_several_values_may_be_repeated(stored: TrainConfig) -> None:
    command = parsed("train --data x --tag a --epochs 3 --tag b c --learning-rate 1 --tag d")
    assert (command.tag, command.epochs, command.learning_rate) == (("a", "b", "c", "d"), 3, 1.0)


def test_several_values_may_be_given_in_each_way_of_writing_a_flag(stored: TrainConfig) -> None:
    assert parsed("train --data x --tag=a --tag b --tag=c d").tag == ("a", "b", "c", "d")
    assert parsed("train --data x --test_views flip --test-views shift").test_views == ("flip", "shift")


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("train --data x --epochs 1 --epochs 2", "--epochs 1 and --epochs 2 are both given; leave one of them out."),
        ("train --data x --epochs=1 --epochs 2", "--epochs=1 and --epochs 2 are both given; leave one of them out."),
        ("train --data x --lr 1 --learning_rate 2", "--lr 1 and --learning_rate 2 are both given; leave"),
        ("train --data x --epochs 1 --seed 0 --epochs 1", "--epochs is given twice; leave one of them out."),
        ("train --data x --image-size 8 9 --image-size 10", "--image-size 8 9 and --image-size 10 are both given"),
        ("train --data x --trace --no-trace", "--trace and --no-trace are both given; leave one of them out."),
        ("train --data x --compile --no-compile", "--compile and --no-compile are both given; leave one of them"),
        ("train --data x --compile default --compile", "--compile default and --compile are both given; leave one"),
        ("train --config a.yaml --config b.yaml", "--config a.yaml and --config b.yaml are both given; leave one"),
        ("train --data x --json --json", "--json is given twice; leave one of them out."),
        ("train --data x --notify https://a/s --notify https://b/t", "--notify is given twice; leave one of them out."),
        ("--json train --data x --seed 1 --seed 2", "--seed 1 and --seed 2 are both given; leave one of them out."),
        ("stop first --storage a --storage b", "--storage a and --storage b are both given; leave one of them out."),
    ],
)
def test_an_option_of_one_value_is_not_given_twice(stored: TrainConfig, line: str, sentence: str) -> None:
    assert sentence in refused(line)


def test_options_may_come_before_the_command(stored: TrainConfig) -> None:
    assert parse(["--json", "stop", "first"], COMMANDS)() == ("first", "./runs")
    assert parsed("--json --debug train --data x").recipe == "auto"  # as if they came behind it
    assert refused("--json trian --data x").startswith("There is no command 'trian' (did you mean train?)")
    assert parsed("train --debug cifar10 --epochs 3").epochs == 3


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (
            "trian cifar10",
            "There is no command 'trian' (did you mean train?); the commands are train, sweep, find-rate, stop.",
        ),
        ("help", "There is no command 'help' (did you mean --help?); the commands are train, sweep, find-rate, stop."),
        ("--json", "Choose one of train, sweep, find-rate, stop."),
        ("train .", "There is no recipe '.' (images are given as --data .); the recipes are "),
        ("train s3://b/x", "There is no recipe 's3://b/x' (images are given as --data s3://b/x); the recipes are "),
        ("train 's3://b/my photos'", "(images are given as --data 's3://b/my photos'); the recipes are "),
        ("train resnet18", "There is no recipe 'resnet18' (a network is given as --model resnet18); the recipes are "),
        ("train timm:vit_tiny --data x", "(a network is given as --model timm:vit_tiny)"),
        (
            "train custom resnet18 --data x",
            "one argument too many: 'resnet18'; a network is given as --model resnet18.",
        ),
        ("train mine.py:train", "(a loop of your own is given as --loop mine.py:train)"),
        ("train data=x lr=0.1", "(an option is given as --data x)"),
        ("train cifar10 lr=0.1", "one argument too many: 'lr=0.1'; an option is given as --learning-rate 0.1."),
        ("train cifar11", "There is no recipe 'cifar11' (did you mean cifar10?); the recipes are "),
        ("train", "Images are missing: give --data FOLDER; a recipe may stand before it: digits, "),
        ('train cifar10 --epochs "don\'t"', '--epochs is "don\'t"; it must be a whole number.'),
        ("train cifar10 --epoch 3", "There is no option --epoch (did you mean --epochs?)."),
        ("train cifar10 --num-workers 4", "There is no option --num-workers: all CPUs that are free read images"),
        ("train cifar10 --jsn", "There is no option --jsn (did you mean --json?)."),
        ("train --recipe digits", "There is no option --recipe: a recipe stands before all options, as in `raytrain"),
        ("find-rate cifar10 --rates 1 --resume", "There is no option --resume here; `raytrain train` and `raytrain sw"),
        ("find-rate cifar10 --rates 1 --lr 1", "`raytrain find-rate` takes no --learning-rate: it sets that itself"),
        ("train cifar10 --rates 1", "There is no option --rates here; `raytrain find-rate` has it."),
        ("train cifar10 --epochs many", "--epochs is 'many'; it must be a whole number."),
        ("train cifar10 --max-steps 1.5", "--max-steps is '1.5'; it must be a whole number."),
        ("train cifar10 --weight-decay x", "--weight-decay is 'x'; it must be a number."),
        ("train cifar10 --mean a b", "--mean is 'a b'; it must be numbers."),
        ("train cifar10 --image-size 3 x", "--image-size is '3 x'; it must be H W|SIDE|MIN..MAX."),
        ("train cifar10 --image-size 3 4 5", "--image-size is '3 4 5'; it must be H W|SIDE|MIN..MAX."),
        ("train cifar10 --name", "--name needs a value after it."),
        ("train cifar10 --flip", "--flip needs a value: none, random, alternating."),
        (
            "train cifar10 --optimizer Adam",
            "--optimizer is 'Adam' (did you mean adamw?); it must be one of sgd, adamw, lamb, lion.",
        ),
        ("stop", "`raytrain stop` needs NAME; see `raytrain stop --help`."),
        (
            "stop --storag s3://b",
            "NAME is missing; it is given without an option before it, as in `raytrain stop NAME`.",
        ),
        (
            "--data photos train",
            "--data is an option of a command, which comes first, as in `raytrain train --data …`.",
        ),
        ("train --data x --learning-rate inf", "--learning-rate is inf; give a finite number."),
        (
            "stop first again",
            "There is one argument too many: 'again'; `raytrain stop --help` says what it takes, and a value with spa",
        ),
        ("train cifar10 --nesterov true", "--nesterov takes no value such as true; write --nesterov or --no-nesterov."),
        (
            "train cifar10 --lr=1 --nesterov=1",
            "--nesterov takes no value such as 1; write --nesterov or --no-nesterov.",
        ),
        ("train cifar10 --json=yes", "There is one argument too many: 'yes'; `raytrain train --help` says what it"),
        ("find-rate cifar10", "`raytrain find-rate` needs --rates; see `raytrain find-rate --help`."),
    ],
)
def test_a_mistake_is_one_sentence(line: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    error = refused(line)
    assert sentence in error
    assert error.endswith(".") and len(error.splitlines()) == 1
    assert capsys.readouterr() == ("", "")


def test_the_private_names_of_tyro_exist() -> None:
    used = {
        "ParseErrorEvent": {"prog"},
        "UnrecognizedArgs": {"tokens"},
        "MissingArgs": {"missing_arguments", "unrecognized_tokens"},
        "MissingSubcommand": {"subcommand_spec"},
        "BadValue": {"argument"},
        "InvalidChoice": {"argument", "value", "choices"},
        "InstantiationFailure": {"argument", "message"},
    }
    errors = importlib.import_module("tyro._errors")
    gone = [f"{name}.{field}" for name, fields in used.items() for field in fields - fields_of(errors, name)]
    gone += [] if hasattr(errors, "on_parse_error") else ["on_parse_error"]
    assert not gone, f"tyro {version('tyro')} has no {', '.join(gone)} in tyro._errors, which cli/parser.py reads."


def fields_of(module: ModuleType, name: str) -> set[str]:
    event = getattr(module, name, None)
    return {field.name for field in dataclasses.fields(event)} if event else set()


@pytest.mark.parametrize(
    ("words", "compiled", "channels_last"),
    [
        ("", None, "auto"),
        ("--compile", "default", "auto"),
        ("--compile --channels-last --epochs 3", "default", True),
        ("--compile reduce-overhead --no-channels-last", "reduce-overhead", False),
        ("--no-compile --channels_last auto", None, "auto"),
        ("--compile=max-autotune", "max-autotune", "auto"),
    ],
)
def test_a_switch_may_have_a_word(words: str, compiled: str | None, channels_last: object) -> None:
    config = parse(["train", "custom", "--bs", "8", *words.split()], COMMANDS).keywords["config"]
    assert (config.compile_mode, config.channels_last) == (compiled, channels_last)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            "--compile fast",
            "--compile is 'fast'; it must be one of default, reduce-overhead, max-autotune, "
            "max-autotune-no-cudagraphs, or have no value.",
        ),
        ("--gradient-dtype float16", "--gradient-dtype is 'float16'; it must be bfloat16."),
        ("--resize foo", "--resize is 'foo'; it must be stretch, crop, pad."),
    ],
)
def test_a_word_that_is_none_of_an_option_is_named_once(words: str, sentence: str) -> None:
    with pytest.raises(UsageError) as error:
        parse(["train", "custom", "--bs", "8", *words.split()], COMMANDS)
    assert str(error.value).startswith(sentence)


def test_an_option_that_python_3_10_makes_optional_twice_keeps_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    def logs(worker: Annotated[int | None, arg(help="Show this one.")] | None = None) -> None:
        """Show the logs."""

    with pytest.raises(SystemExit):
        parse(["logs", "--help"], {"logs": logs})
    assert re.search(r"--worker INT +Show this one\.", capsys.readouterr().out)
    with pytest.raises(UsageError, match=r"^--worker is 'x'; it must be a whole number\.$"):
        parse(["logs", "--worker", "x"], {"logs": logs})
