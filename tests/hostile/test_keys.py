"""Objects whose names are no paths do not hide the others."""

from __future__ import annotations

import logging

import pytest

from raytrain.data.labels.folders import build_manifest
from raytrain.data.labels.manifest import Manifest
from raytrain.errors import StorageError
from raytrain.storage.bucket import BucketStore
from tests.helpers.scripted_bucket import listing, scripted
from tests.helpers.scripted_s3 import Answer, Request, refusal, scripted_s3

GOOD = [f"prefix/{name}/{number:03d}.jpg" for name in ("cat", "dog") for number in range(70)]
BAD = ["prefix/cat//7.jpg", "prefix/cat/../8.jpg", "prefix/cat/a/./9.jpg", "prefix/cat/007.jpg//"]


def listed(keys: list[str]) -> list[str]:
    with scripted_s3(lambda request: Answer(body=listing(keys, request))) as (url, _):
        return sorted(f"prefix/{found.path}" for found in scripted(url).list())


@pytest.mark.parametrize("bad", [*BAD, "prefix//x.jpg", "prefix/../x.jpg", "prefix/elk//x.jpg"])
def test_one_strange_name_does_not_hide_the_others(bad: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "raytrain"):
        assert listed([*GOOD, bad]) == GOOD
    name = bad.removeprefix("prefix/").removesuffix("/")
    assert caplog.messages == [
        "1 objects below s3://bucket/prefix are left out, because their names cannot be used, "
        f"such as {name!r}; rename them."
    ]


def test_strange_names_are_said_in_one_number(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "raytrain"):
        assert listed([*GOOD, *BAD, "prefix/", "prefix/cat/", "prefix/dog//1.jpg"]) == ["prefix/cat", *GOOD]
    (message,) = caplog.messages
    assert message.startswith("5 objects below s3://bucket/prefix are left out")


def test_a_data_set_with_strange_names_can_be_used(caplog: pytest.LogCaptureFixture) -> None:
    with scripted_s3(lambda request: Answer(body=listing([*GOOD, *BAD], request))) as (url, _):
        manifest = build_manifest_of(url)
    assert len(manifest) == len(GOOD) and manifest.classes == ("cat", "dog")


def build_manifest_of(url: str) -> Manifest:
    class WithoutIndex(BucketStore):  # the scripted server answers every request with a listing
        def get(self, path: str, etag: str = "") -> bytes:
            raise FileNotFoundError(path)

    store = scripted(url)
    assert isinstance(store, BucketStore)
    return build_manifest(WithoutIndex(store.url, store.cloud, store.credentials, store.connection_id))


def test_without_strange_names_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    assert listed(GOOD) == GOOD and caplog.messages == []


def test_errors_are_said_as_always() -> None:
    def answer(request: Request) -> Answer:
        is_first = request.number == 0
        return Answer(body=listing(BAD[:1], request)) if is_first else refusal(403, "AccessDenied")

    refused = pytest.raises(StorageError, match="has no permission for s3://bucket/prefix")
    with scripted_s3(answer) as (url, _), refused:
        list(scripted(url).list())
