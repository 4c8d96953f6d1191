from __future__ import annotations

import atexit
import functools
import gc
import logging
import os
import sys
import tarfile
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import hypothesis
import psutil
import pytest
from botocore.loaders import JSONFileLoader

import raytrain
from raytrain import TrainResult
from raytrain.demo.s3_server import S3Server
from raytrain.launch.local.local_launch import AgentProcess
from raytrain.launch.ray.connection import end_own_ray
from raytrain.launch.ray.own_cluster import lean, lean_imports, token_settings
from raytrain.loader.decoder_processes import NewProcess
from tests.helpers.azurite import Azurite, azurite
from tests.helpers.file_by_file import FileByFile, num_processes
from tests.helpers.google_storage import GoogleStorage, google_storage
from tests.helpers.quick import is_quick, no_processes

# The same values as in raytrain/launch/ray. They are set here too because Ray reads them once, at import.
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")

# Otherwise each process that a test starts would compile all that it imports, torch and Ray included.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

_NEW_AGENT, _NEW_DECODER = AgentProcess.__init__, NewProcess.__init__

_SLOW_TIMEOUT_S = 900  # of one test; pyproject.toml has that of the others

_cluster = ExitStack()  # ends the cluster of this process

_collecting = ExitStack()
_collecting.enter_context(lean_imports())  # test modules import Ray, which takes twice as long with that package

gc.disable()  # until the first test: collections while the tests are imported find next to nothing

hypothesis.settings.register_profile("any machine", deadline=None)  # no test asserts a timing
hypothesis.settings.load_profile("any machine")


@pytest.fixture(autouse=True)
def _no_configuration_of_clouds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the developer's configuration of clouds, and AWS's metadata service, from every test."""
    _forget_clouds(monkeypatch)


@pytest.fixture(autouse=True)
def _quick_tests_start_no_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with no_processes(monkeypatch) if request.node.get_closest_marker("quick") else nullcontext():
        yield


@pytest.fixture(autouse=True)
def _log_level() -> Iterator[None]:
    """Undo what ``--debug`` does: other tests look at the log."""
    logger = logging.getLogger("raytrain")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture(autouse=True, scope="session")
def _quick_process() -> None:
    """Compute with one thread, as several only wait for each other with arrays this small."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    gc.freeze()  # otherwise the first collections would look at all that has been imported, for a second each
    gc.enable()
    # Libraries complain of objects that exist at the very end. Pytest's own five collections come before that.
    atexit.register(gc.unfreeze)


@pytest.fixture(autouse=True, scope="module")
def _small_heap() -> None:
    """Keep garbage collections, and whatever else goes over all objects, from all that tests before have imported."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _no_ray_of_others() -> Iterator[None]:
    """Hide clusters that others, or another process of tests, have started on this machine with ``ray start``."""
    with (
        pytest.MonkeyPatch.context() as monkeypatch,
        # Not in TMPDIR, whose path may be too long for sockets.
        tempfile.TemporaryDirectory(prefix="rt-", dir="/tmp", ignore_cleanup_errors=True) as folder,
    ):
        monkeypatch.setenv("RAY_TMPDIR", folder)
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        token_settings()  # on a new machine, `ray start` of a test would lack the token, which no Ray has made yet
        yield


@pytest.fixture(autouse=True, scope="session")
def _descriptions_of_services() -> Iterator[None]:
    """Have botocore read each description of a service once: every test of a bucket has new sessions, which read half
    a megabyte of JSON each.
    """
    read = functools.cache(JSONFileLoader().load_file)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(JSONFileLoader, "load_file", lambda loader, path: read(path))
        yield


@pytest.fixture(autouse=True, scope="session")
def _forked_agents() -> Iterator[None]:
    """Fork the agents of this process's runs, and the decoding processes of its loaders, from one that has imported
    torch: ``new_agents`` and ``new_decoders`` say otherwise.
    """

    def start(agent: AgentProcess, environment: Mapping[str, str]) -> None:
        from tests.helpers.forked_agents import start_forked  # deferred: it imports torch

        start_forked(agent, environment)

    def start_decoder(decoder: NewProcess, imports: Sequence[str]) -> None:
        from tests.helpers.forked_agents import start_forked_decoder

        start_forked_decoder(decoder, imports)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(AgentProcess, "__init__", start)
        monkeypatch.setattr(NewProcess, "__init__", start_decoder)
        yield


@pytest.fixture
def new_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start the agents of a test's runs as a user's runs start them."""
    monkeypatch.setattr(AgentProcess, "__init__", _NEW_AGENT)


@pytest.fixture
def new_decoders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start the decoding processes of a test's loaders as a user's loaders start them."""
    monkeypatch.setattr(NewProcess, "__init__", _NEW_DECODER)


@pytest.fixture(autouse=True)
def _own_ray() -> Iterator[None]:
    """End the Ray that a test has started in this process."""
    yield
    end_own_ray()


def _forget_clouds(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("AWS_", "AZURE_", "GOOGLE_", "STORAGE_EMULATOR_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    return num_processes(config)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FileByFile:
    return FileByFile(config, log)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With ``-m quick``, import no test that can't be one."""
    folder = collection_path.parent == Path(__file__).parent and collection_path.name
    return True if config.option.markexpr == "quick" and folder not in (False, "unit") else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests on the session's Ray cluster first: one process has them all, while the others have work.

    Mark those that are quick, and give slow ones more time.
    """
    items.sort(key=_needs_ray, reverse=True)
    for item in items:
        if is_quick(item):
            item.add_marker(pytest.mark.quick)
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(_SLOW_TIMEOUT_S))


def pytest_collection_finish() -> None:
    """Give the package that Ray does without to the tests that want it."""
    _collecting.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> Iterator[None]:
    """End the cluster after the last test on it: the others need a process that is connected to none."""
    try:
        yield
    finally:
        if nextitem is None or not _needs_ray(nextitem):
            _cluster.close()


def _needs_ray(item: pytest.Item) -> bool:
    backend = (
        item.callspec.params.get("backend") if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ""
    )
    return backend == "ray" or "ray_cluster" in getattr(item, "fixturenames", ())


@pytest.fixture(scope="session")
def ray_cluster() -> None:
    """Start a local Ray cluster with 2 CPUs and no AWS configuration, and connect this process to it."""
    with pytest.MonkeyPatch.context() as monkeypatch, lean_imports():
        _forget_clouds(monkeypatch)
        monkeypatch.setenv("PYTHONPATH", lean(os.environ)["PYTHONPATH"])
        _cluster.callback(_start_ray())


def _start_ray() -> Callable[[], None]:
    """Connect to a new cluster; returns what ends it."""
    import ray

    from raytrain.launch.ray.own_cluster import TOO_SLOW
    from raytrain.launch.ray.private_api import read_variables

    read_variables()  # a test before this one may have had Ray read others, such as no RAY_AUTH_MODE
    for tries_left in reversed(range(5)):  # Ray gives it 30 s to start, which is little on a busy machine
        before = psutil.Process().children()
        try:
            ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
            break
        except Exception as error:
            if TOO_SLOW not in str(error) or not tries_left:
                raise
            ray.shutdown()
            for process in psutil.Process().children():  # Ray leaves those of the node that was too slow
                if process not in before:
                    process.kill()
    return ray.shutdown


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """90 PNGs of 12x12 in three class folders."""
    from tests.helpers.small_runs import make_images

    return make_images(tmp_path_factory.mktemp("images"))


@pytest.fixture(params=["local", "ray"])
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend in turn: what a run does when something happens to it must not depend on who launched it."""
    if request.param == "ray":
        request.getfixturevalue("ray_cluster")
    return request.param


@pytest.fixture(scope="session")
def undisturbed(images: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    """A cached run on two workers without faults, on the local backend: the reference for runs on either backend."""
    from tests.helpers.small_runs import config

    return raytrain.train(config(images, tmp_path_factory.mktemp("undisturbed"), backend="local"))


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """An S3 server for all tests, with a bucket ``tests``. The fixture ``s3`` adds it to the environment."""
    directory = tmp_path_factory.mktemp("s3")
    (directory / "tests").mkdir()
    with S3Server(directory) as server:
        yield server


@pytest.fixture
def s3(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The S3 server, with the AWS environment variables of this process pointing to it."""
    for name, value in s3_server.environment().items():
        monkeypatch.setenv(name, value)
    return s3_server


@pytest.fixture
def s3_url(s3: S3Server) -> str:
    """An empty prefix on the server. Write to it through S3: the server sees new files in its folder a second late."""
    return f"s3://tests/{uuid.uuid4().hex[:8]}"


@pytest.fixture(scope="session")
def azurite_server() -> Iterator[Azurite]:
    """Azure's emulator for all tests. The fixture ``azure`` adds it to the environment."""
    with azurite() as server:
        yield server


@pytest.fixture
def azure(azurite_server: Azurite, monkeypatch: pytest.MonkeyPatch) -> Azurite:
    """The emulator, with the Azure environment variables of this process pointing to it."""
    for name, value in azurite_server.environment().items():
        monkeypatch.setenv(name, value)
    return azurite_server


@pytest.fixture
def azure_url(azure: Azurite) -> str:
    """An empty prefix of a container in the emulator."""
    return f"az://tests/{uuid.uuid4().hex[:8]}"


@pytest.fixture
def google(monkeypatch: pytest.MonkeyPatch) -> Iterator[GoogleStorage]:
    """A stand-in for Google Cloud Storage, with the variable of this process that points to it."""
    with google_storage() as storage:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", storage.endpoint_url)
        yield storage


@pytest.fixture
def google_url(google: GoogleStorage) -> str:
    """An empty prefix of its bucket."""
    return f"gs://tests/{uuid.uuid4().hex[:8]}"


@pytest.fixture(scope="session")
def cifar10_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real images: ``train`` with 30 and ``test`` with 10 of each CIFAR-10 class, 32×32 JPEG."""
    return extract_cifar10(tmp_path_factory.mktemp("cifar10"), num_train=30, num_validation=10)


def extract_cifar10(folder: Path, num_train: int, num_validation: int) -> Path:
    """Extract the first CIFAR-10 images of each class to ``folder``; skip the test if the archive is missing."""
    archive = Path(os.environ.get("RAYTRAIN_TEST_DATA", "")) / "cifar10.tgz"
    if not archive.is_file():
        pytest.skip("RAYTRAIN_TEST_DATA names no folder with cifar10.tgz")
    wanted = {
        f"{part}/{i:04d}.jpg"
        for part, num_images in (("train", num_train), ("test", num_validation))
        for i in range(num_images)
    }
    with tarfile.open(archive) as tar:
        for member in tar:
            part, _, rest = member.name.removeprefix("./").partition("/")
            if f"{part}/{rest.rpartition('/')[2]}" in wanted:
                tar.extract(member, folder, filter="data")
    return folder
