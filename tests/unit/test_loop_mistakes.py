"""Mistakes in a loop that its text shows are refused without importing it, and what may be right is not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raytrain.errors import UsageError
from raytrain.training.loop_checks.loop_mistakes import check_loop_function, check_named_function, run_attributes

REFUSED = {
    "a syntax error": (
        "def train(run):\n    for epoch in run.epochs()\n",
        r"SyntaxError: expected ':' \(loop.py, line 2",
    ),
    "a package that is not there": ("import no_such_package\ndef train(run): ...", "No module named 'no_such_package'"),
    "one from which is imported": ("from no_such.inner import it\ndef train(run): ...", "No module named 'no_such'"),
    "a file of a package": (
        "from .config import load\ndef train(run): load()",
        r"is a file of a package, .*loop.py, line 1: .*name its module, as in --loop \w+.loop:train",
    ),
    "another function": ("def trian(run): ...", r"loop.py has no function 'train' \(did you mean trian"),
    "two arguments": ("def train(run, config): ...", "needs 2 arguments, run, config, and a loop is called with one"),
    "no argument": ("def train(): ...", "takes no argument, and a loop is called with one"),
    "one by its name": ("def train(run, *, config): ...", "needs 2 arguments, run, config"),
    "a generator": ("def train(run):\n    yield run", "has yield or async, so that a call runs nothing of it"),
    "a coroutine": ("async def train(run): ...", "has yield or async, so that a call runs nothing of it"),
    "a name": (
        "def train(run):\n    model = 1\n    print(modle)",
        r"name 'modle' is not defined \(did you mean model\?\) \(loop.py, line 3: `print\(modle\)`\)",
    ),
    "a name in what it calls": ("def train(run): helper()\ndef helper(): no_such_name", "name 'no_such_name' is not"),
    "a name when it is imported": ("size = no_such_name\ndef train(run): ...", "name 'no_such_name' is not defined"),
    "an attribute": ("def train(run):\n    run.epohcs()", r"a run has no 'epohcs' \(did you mean epochs\?\) \(loop.py"),
    "a number": ("train = 5", r"is no function \(loop.py, line 1: `train = 5`\); name one that can be called"),
    "nothing": ("train: object = None", r"is no function \(loop.py, line 1"),
    "a list of functions": ("def a(run): ...\ntrain = [a]", r"is no function \(loop.py, line 2"),
    "a function that is replaced": ("def train(run): ...\ntrain = {}", r"is no function \(loop.py, line 2"),
    "a class": (
        "class train:\n    def __init__(self, run): ...",
        "is a class, and a loop is a function of one argument",
    ),
    "a lambda of two arguments": ("train = lambda run, lr: None", "needs 2 arguments, run, lr, and a loop is called"),
    "an import that raises": ("raise ValueError(1)\ndef train(run): ...", "its import ends at loop.py, line 1: `raise"),
    "an import that exits": ("import sys\ndef train(run): ...\nsys.exit()", "its import ends at loop.py, line 3: `sys"),
}
TAKEN = {
    "a lambda": "train = lambda run, lr=0.1: run.epochs()",
    "an object that can be called": "class Loop:\n    def __call__(self, run): ...\ntrain = Loop()",
    "one of several": "import os\ntrain = None\nif os.name:\n    def train(run): ...",
    "a script of its own": "import sys\ndef train(run): ...\nif __name__ == '__main__':\n    sys.exit(train(None))",
    "all that is right": "import os\ndef train(run): os.getcwd(), run.epochs()",
    "a package that may be missing": "try:\n    import no_such\nexcept ImportError:\n    pass\ndef train(run): no_such",
    "a folder of its own": "import sys\nsys.path.insert(0, 'x')\nimport no_such\ndef train(run): ...",
    "a module beside it that may do so": "import beside\nimport no_such\ndef train(run): ...",
    "names from elsewhere": "from os.path import *\ndef train(run): join('a')",
    "names made at run time": "globals()['size'] = 1\ndef train(run): size",
    "a name that is asked for": "def train(run):\n    try:\n        size\n    except NameError:\n        pass",
    "a function that nothing calls": "def train(run): ...\ndef old(): no_such_name",
    "annotations": "from __future__ import annotations\ndef train(run: NoSuch) -> NoSuch: ...",
    "a global variable": "def train(run):\n    global size\n    size = 1\n    print(size)",
    "a class": "class Net:\n    width = 3\n    double = 2 * width\n    def f(self): __class__\ndef train(run): Net()",
    "a decorator": "def of(f): return lambda run: f(run, 1)\n@of\ndef train(run, config): ...",
    "a coroutine that is decorated": "import asyncio\ndef of(f): return lambda run: asyncio.run(f(run))\n@of\n"
    "async def train(run): ...",
    "one that is replaced": "import asyncio\nasync def train(run): ...\ninner = train\n"
    "def train(run): asyncio.run(inner(run))",
    "one in an assignment": "import asyncio\nasync def train(run): ...\ninner = train\n"
    "train = lambda run: asyncio.run(inner(run))",
    "an assignment": "import functools\ndef two(run, n): ...\ntrain = functools.partial(two, n=1)",
    "an attribute of its own": "def train(run):\n    run.best = 0\n    print(run.best)",
    "an attribute of all objects": "def train(run):\n    print(run.__dict__, run.__module__)",
    "a run of another kind": "def train(run):\n    for run in [1]: run.bit_length()",
    "defaults": "def train(run, lr=0.1, *more, **options): ...",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_mistake_is_refused(kind: str, tmp_path: Path) -> None:
    source, sentence = REFUSED[kind]
    (tmp_path / "loop.py").write_text(source)
    with pytest.raises(UsageError, match=sentence):
        check_named_function("--loop", f"{tmp_path}/loop.py:train", is_loop=True)


@pytest.mark.parametrize("option", ["--model", "--transforms"])
def test_other_functions_are_looked_at_as_well(option: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "net = 5\nasync def late(): ...\nclass Net: ...\ndef of(num_classes, width=1): ..."
    )
    with pytest.raises(UsageError, match=rf"{option} .*mine.py:net is no function \(mine.py, line 1"):
        check_named_function(option, f"{tmp_path}/mine.py:net")
    with pytest.raises(UsageError, match=r"mine.py:late has yield or async, .* give a plain function"):
        check_named_function(option, f"{tmp_path}/mine.py:late")
    check_named_function(option, f"{tmp_path}/mine.py:Net")
    check_named_function(option, f"{tmp_path}/mine.py:of")


@pytest.mark.parametrize("kind", TAKEN)
def test_what_may_be_right_is_taken(kind: str, tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(TAKEN[kind])
    (tmp_path / "beside.py").write_text("import sys")
    check_named_function("--loop", f"{tmp_path}/loop.py:train", is_loop=True)


def test_the_file_of_a_module_is_found_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "package_of_loops").mkdir()
    (tmp_path / "package_of_loops" / "inner.py").write_text("assert not __name__\ndef train(run): no_such_name")
    with pytest.raises(UsageError, match=r"--loop package_of_loops.inner:train: NameError: name 'no_such_name'"):
        check_named_function("--loop", "package_of_loops.inner:train", is_loop=True)


def with_a_wrong_name(run: Any) -> None:
    no_such_name.epochs()  # noqa: F821  # pyright: ignore


def with_a_wrong_attribute(run: Any) -> None:
    def inner() -> None:
        run.epohcs()

    inner()


def with_a_yield(run: Any) -> Any:
    yield run


def with_two_arguments(run: Any, config: Any) -> None: ...


class Loops:
    def train(self, run: Any) -> None:
        run.epochs()


@pytest.mark.parametrize(
    ("loop", "sentence"),
    [
        (with_a_wrong_name, "The loop: NameError: name 'no_such_name' is not defined"),
        (functools.partial(with_a_wrong_name), "The loop: NameError: name 'no_such_name' is not defined"),
        (with_a_wrong_attribute, r"a run has no 'epohcs' \(did you mean epochs\?\) \(test_loop_mistakes.py, line \d+"),
        (with_a_yield, "The loop has yield or async, so that a call runs nothing of it; a loop is a plain function"),
        (with_two_arguments, "The loop is called with one argument, the run, and cannot be: missing a required"),
    ],
)
def test_a_mistake_in_a_function_is_refused(loop: Callable[..., None], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        check_loop_function(loop)


def test_functions_of_every_kind_are_taken() -> None:
    def configured(loop: Callable[..., None]) -> Callable[[Any], None]:
        return functools.wraps(loop)(lambda run: loop(run, 1))  # pyright: ignore

    for loop in (Loops().train, functools.partial(with_two_arguments, config=1), configured(with_two_arguments)):
        check_loop_function(loop)


@pytest.mark.not_quick
def test_the_attributes_of_a_run_are_those_of_its_class() -> None:
    from raytrain.training.run import Run

    public = {name for name in dir(Run) if not name.startswith("_")} | Run.__dataclass_fields__.keys()
    assert public <= run_attributes()
