"""Each kind of refused input, with the real command in a fresh process: one sentence, exit 2, on one or both backends.

Tests in one process cannot see this: there, all imports are done. A command may be refused while a thread of it still
imports Ray and torch, which takes longest in a new installation, whose modules are not compiled yet.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

REFUSED = {
    "no folder": (["--data", "nowhere"], "There is no folder"),
    "an empty folder": (["--data", "empty"], "There are no images below"),
    "images without class folders": (["--data", "flat"], "class"),
    "one class": (["--data", "one"], "class"),
    "an unsorted test folder": (["--data", "unsorted"], "test"),
    "a test folder of other classes": (["--data", "good", "--test-data", "others"], "cow"),
    "no prefix in a bucket": (
        ["--data", "s3://localhost-has-no-such-bucket/nowhere"],
        "http://127.0.0.1:9 cannot be reached",
    ),
    "no such network": (["--data", "good", "--model", "no_such_net"], "--model no_such_net"),
    "no such loop": (["--data", "good", "--loop", "nowhere.py:train"], "--loop"),
    "a name in a loop": (["--data", "good", "--loop", "typo.py:train"], "NameError: name 'modle' is not defined"),
    "a number as a loop": (
        ["--data", "good", "--loop", "typo.py:width"],
        "--loop typo.py:width is no function (typo.py",
    ),
    "weights of torchvision": (["--data", "good", "--weights", "DEFAULT"], "torchvision's weights for resnet18 cannot"),
    "weights of a repository": (["--data", "good", "--weights", "hf://some/net"], "hf://some/net cannot be downloaded"),
    "no such weights": (["--data", "good", "--weights", "nowhere.pt"], "--weights nowhere.pt"),
    "a bad number": (["--data", "good", "--epochs", "0"], "epochs"),
    "an option twice": (
        ["--data", "good", "--epochs", "1", "--epochs", "2"],
        "--epochs 1 and --epochs 2 are both given",
    ),
    "a warm-up longer than the run": (
        ["--data", "good", "--warmup-epochs", "20"],
        "--warmup-epochs is 20 and --epochs 10",
    ),
    "a negative seed": (["--data", "good", "--seed", "-1"], "--seed is -1; it must be at least 0"),
    "a seed of many digits": (["--data", "good", "--seed", "9" * 23], "at least 0 and at most 9223372036854775807"),
    "a variable that is not set": (["--data", "good", "--name", ""], "The value of --name is empty"),
    "a loop without its function": (["--data", "good", "--loop", "typo.py"], "--loop typo.py names no function"),
    "an address of mail": (["--data", "good", "--notify", "me@example.com"], "--notify is no URL"),
    "a file as images": (["--data", "good/cat/1.png"], "good/cat/1.png is a file, but should be a folder"),
    "no such policy": (["--data", "good", "--auto-augment", "rand-m9-mstd0.5"], "give randaugment, or rand-m9-n2"),
    "a mistake in a file of options": (["--config", "bad.yaml"], "bad.yaml, line 2: there is no option epohs"),
    "a GPU that decodes, without a GPU": (
        ["--data", "good", "--decoder", "gpu", "--device", "cpu"],
        "--decoder is gpu, by this command or as the run began, and the device is a CPU; give --decoder cpu",
    ),
    "a metric that is not measured": (["--data", "good", "--until", "acc=0.5"], "measure accuracy, loss, balanced_"),
    "too many workers": (["--data", "good", "--workers", "5000"], "--workers is 5000"),
    "a run without a name": (["--resume"], "--resume needs --name"),
    "storage where no folder can be made": (["--data", "good", "--storage", "/dev/null"], "/dev/null is a file, but"),
    "no such run": (["--resume", "--name", "never-was"], "never-was"),
}

# Waits for each module of Ray and torch: to compile them, as a new installation does, takes seven seconds of a core.
SLOW_IMPORTS = """
import sys
import time

class Slow:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.startswith(("ray.", "torch.")):
            time.sleep(0.005)

sys.meta_path.insert(0, Slow)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("refused")
    training = ("one/cat", "good/cat", "good/dog", "unsorted/train/cat", "unsorted/train/dog")
    for name in (*training, "flat", "others/cow", "unsorted/test"):
        (found / name).mkdir(parents=True)
        for number in range(6):
            Image.new("RGB", (16, 16), (40 * number, 9, 9)).save(found / name / f"{number}.png")
    (found / "empty").mkdir()
    (found / "bad.yaml").write_text("data: good\nepohs: 3\n")
    (found / "typo.py").write_text(
        "def train(run):\n    model = run.build_model()\n    run.prepare(modle)\nwidth = 5\n"
    )
    return found


def words(backend: str, options: list[str], recipe: str = "custom") -> list[str]:
    """Return the arguments of the command that trains with ``options``."""
    found = ["train", *recipe.split(), *([] if "--workers" in options else ["--workers", "1"])]
    found += ["--image-size", "16"] if recipe else []
    return [*found, *(["--backend", "local"] if backend == "local" else ["--address", "local"]), *options]


def run(folder: Path, command: list[str | Path], **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a fresh process, for which no bucket and no weights can be reached."""
    endpoint = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    # No weights are on this machine, and none can be downloaded.
    offline = {"HTTPS_PROXY": "http://127.0.0.1:9", "TORCH_HOME": str(folder), "HF_HOME": str(folder)}
    variables = {**os.environ, **endpoint, **offline, "AWS_REGION": "us-east-1", "AWS_MAX_ATTEMPTS": "1", **environment}
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=280, check=False)


def refused(folder: Path, backend: str, options: list[str], recipe: str = "custom", **environment: str) -> str:
    """Train with ``options`` in a fresh process, and return what it says; it has to end with exit code 2."""
    command = [Path(sys.executable).with_name("raytrain"), *words(backend, options, recipe)]
    done = run(folder, command, **environment)
    sentence = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 2, done.stderr
    assert sentence.startswith("raytrain: "), done.stderr
    assert "unexpected" not in done.stderr and "Traceback" not in done.stderr, done.stderr
    return sentence


# These are refused where "one class" is; on Ray a cluster has begun to start by then, which takes ten seconds.
LIKE_ONE_CLASS = ("images without class folders", "an unsorted test folder", "a test folder of other classes")
# These are refused by the options alone: the command does not get as far as a backend. They are asked once, on Ray: one
# kind for each place that refuses some in a process of its own, and all others one after the other in one process.
OF_PLACES = ("a bad number", "a mistake in a file of options", "a name in a loop", "no such weights", "no such run")
TOGETHER = (
    *("a negative seed", "a seed of many digits", "a variable that is not set"),
    *("no such policy", "an option twice", "a warm-up longer than the run"),
    *("no such network", "no such loop", "a number as a loop", "a loop without its function"),
    *("an address of mail", "a GPU that decodes, without a GPU", "a metric that is not measured"),
    "a run without a name",
)
ALL_TOGETHER = """
import json
import sys
from raytrain.cli.main import main

for words in json.loads(sys.argv[1]):
    print(main(words), end="\\n\\n", file=sys.stderr)
"""
# The quick tests ask each kind on one backend, and the slow ones on both: without Ray, it is refused at the same place.
# "one class" itself is refused on Ray below, where it is harder. Weights that cannot be had are asked for by the
# photographs below, too, each time with an import of torchvision.
SLOW_ON_RAY = (*LIKE_ONE_CLASS, "weights of torchvision")
ON_RAY = [
    pytest.param(kind, marks=pytest.mark.slow if kind in SLOW_ON_RAY else ())
    for kind in REFUSED
    if kind not in ("one class", *TOGETHER)
]
WITHOUT_RAY = [
    pytest.param(kind, marks=() if kind in ("one class", *LIKE_ONE_CLASS) else pytest.mark.slow)
    for kind in REFUSED
    if kind not in (*OF_PLACES, *TOGETHER, "weights of torchvision")
]


@pytest.mark.parametrize("kind", WITHOUT_RAY)
def test_bad_input_is_refused_in_a_sentence_without_ray(folder: Path, kind: str) -> None:
    options, says = REFUSED[kind]
    assert says in refused(folder, "local", options)


@pytest.mark.parametrize("kind", ON_RAY)
def test_bad_input_is_refused_in_a_sentence_on_ray(folder: Path, kind: str) -> None:
    options, says = REFUSED[kind]
    assert says in refused(folder, "ray", options)


def test_what_the_options_alone_refuse_is_refused_in_a_sentence(folder: Path) -> None:
    asked = json.dumps([words("ray", REFUSED[kind][0]) for kind in TOGETHER])
    *answers, rest = run(folder, [sys.executable, "-c", ALL_TOGETHER, asked]).stderr.split("\n\n")
    assert rest == "" and len(answers) == len(TOGETHER)
    for kind, answer in zip(TOGETHER, answers, strict=True):
        *_, sentence, code = answer.splitlines()
        assert sentence.startswith("raytrain: ") and REFUSED[kind][1] in sentence, answer
        assert code == "2" and "unexpected" not in answer and "Traceback" not in answer, answer


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["an empty folder", "one class"])
def test_it_is_refused_while_imports_are_slow(folder: Path, kind: str, tmp_path: Path) -> None:
    options, says = REFUSED[kind]
    (tmp_path / "sitecustomize.py").write_text(SLOW_IMPORTS)
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    assert says in refused(folder, "ray", options, PYTHONPATH=path)


def test_photographs_need_weights_that_can_be_had(folder: Path) -> None:
    for number in range(12):
        (folder / f"photographs/{number % 2}").mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (80, 90), (20 * number, 9, 9)).save(folder / f"photographs/{number % 2}/{number}.png")
    sentence = refused(folder, "local", ["--data", "photographs"], recipe="")
    assert "torchvision's weights for efficientnet_b0 cannot be downloaded" in sentence
    assert "give --weights FILE, with --model; or give --weights none to begin with random ones" in sentence


def test_a_job_says_on_which_machine_it_is_refused(folder: Path) -> None:
    bucket = ["--data", "s3://bucket/train", "--storage", "s3://bucket/runs"]
    no_keys = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "", "AWS_CONFIG_FILE": os.devnull}
    in_job = {"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}", "AWS_SHARED_CREDENTIALS_FILE": os.devnull}
    sentence = refused(folder, "local", bucket, **no_keys, **in_job)
    assert "On the cluster's head" in sentence and "There are no AWS credentials for s3://bucket/runs;" in sentence
