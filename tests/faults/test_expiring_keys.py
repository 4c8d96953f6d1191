"""A run survives expiring credentials; revoked credentials end it with one sentence, and it can be resumed."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

import raytrain
from raytrain import TrainingFailed
from raytrain.demo.s3_server import S3Server
from raytrain.runs.records import read_run
from raytrain.storage.clouds.s3 import S3
from raytrain.storage.open import open_store
from tests.helpers.key_issuer import LIFE_S, Issuer, issuing_s3
from tests.helpers.small_object_store import options as large_images
from tests.helpers.small_runs import assert_same_weights, loop_with, put_images
from tests.helpers.waiting import wait_for

pytestmark = pytest.mark.slow

STEPS = 90
WAIT_S = 120.0


def options(data: Path | str, storage: Path | str, backend: str) -> raytrain.TrainConfig:
    return large_images(  # Few large images are prefetched, so reading lasts as long as the run.
        data,
        storage,
        backend=backend,
        mean=(0.5,) * 3,
        std=(0.25,) * 3,
        flip="none",
        translate=0,
        epochs=STEPS,
        max_steps=STEPS,
        cache="none",
        evaluate_every=0,
        checkpoint_every=("1ep", "15st"),
    )


@pytest.fixture(scope="module")
def unhindered(images: Path, tmp_path_factory: pytest.TempPathFactory) -> raytrain.TrainResult:
    """The same run from a folder into a folder."""
    return raytrain.train(options(images, tmp_path_factory.mktemp("unhindered"), "local"))


@pytest.fixture
def issuer(
    s3_server: S3Server, s3: S3Server, s3_url: str, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Issuer]:
    """Issues all credentials of this process. The images are at ``s3_url``."""
    put_images(images, open_store(s3_url, cloud=S3(s3.endpoint_url, "us-east-1")))
    (tmp_path / "issued").mkdir()
    issuer = Issuer(tmp_path / "issued")
    with issuing_s3(s3_server, issuer) as url:
        for name in s3.environment():
            monkeypatch.delenv(name)
        for name, value in issuer.environment(url).items():
            monkeypatch.setenv(name, value)
        yield issuer


def wait_until_keys_expire(run: raytrain.Run, batch: raytrain.Batch, issuer: Issuer) -> None:
    """In some steps, wait until all credentials that were issued before them have expired."""
    if run.rank == 0 and batch.step % (STEPS // 3) == 1:
        last = max(float(keys["expires"]) for keys in issuer.issued())
        wait_for(lambda: time.time() > last, "credentials do not expire", WAIT_S)


def revoke(run: raytrain.Run, batch: raytrain.Batch, issued: Path) -> None:
    if (run.rank, batch.step) == (0, 20):
        (issued / "revoked").touch()


def test_a_run_survives_expiring_credentials(
    backend: str, unhindered: raytrain.TrainResult, issuer: Issuer, s3_url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    loop = partial(loop_with, before_step=partial(wait_until_keys_expire, issuer=issuer))  # pyright: ignore
    result = raytrain.train(options(s3_url, f"{s3_url}-runs", backend), loop=loop)
    assert (result.status, result.steps, result.num_skipped) == ("finished", STEPS, 0)
    expired = [keys for keys in issuer.issued() if float(keys["expires"]) < time.time()]
    assert len(expired) >= 3 and result.seconds > 2 * LIFE_S
    assert_same_weights(result, unhindered)
    assert raytrain.audit("run", storage=f"{s3_url}-runs").clean
    assert "failed" not in capfd.readouterr().err


REVOKED = {
    "ray": r"does not know the access key …(\w{4}); check AWS_ACCESS_KEY_ID.*",
    "local": r"could not be obtained \(.*AccessDenied.*()\); check its role or profile\..*",  # each asks its issuer
}


def test_revoked_credentials_end_a_run_with_one_sentence_and_new_ones_resume_it(
    backend: str, unhindered: raytrain.TrainResult, issuer: Issuer, s3_url: str, tmp_path: Path
) -> None:
    wanted = options(s3_url, tmp_path / "runs", backend)
    loop = partial(loop_with, before_step=partial(revoke, issued=issuer.folder))  # pyright: ignore
    with pytest.raises(TrainingFailed) as raised:
        raytrain.train(wanted, loop=loop)
    sentence = str(raised.value)
    said = re.search(
        REVOKED[backend] + r" resume with raytrain\.train, the same loop, name='run' and resume=True$", sentence
    )
    assert said, sentence
    assert raised.value.exit_code == 1 and "\n" not in sentence
    assert any(keys["AccessKeyId"].endswith(said[1]) for keys in issuer.issued())
    assert not any(
        keys[name] in sentence
        for keys in issuer.issued()
        for name in ("SecretAccessKey", "SessionToken", "AccessKeyId")
    )
    assert 20 <= read_run(wanted.storage, "run").status.step < STEPS
    issuer.revoke(False)
    resumed = raytrain.train(dataclasses.replace(wanted, resume=True))
    assert (resumed.status, resumed.steps) == ("finished", STEPS)
    assert_same_weights(resumed, unhindered)
    assert raytrain.audit("run", storage=wanted.storage).clean
