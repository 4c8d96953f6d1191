"""Objects whose names are no paths do not hide the others, and no listing is shorter than the server's."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable

import pytest

from raytrain.data.labels.folders import build_manifest
from raytrain.data.labels.manifest import Manifest
from raytrain.datasets.sources import Labelling, labelled_source
from raytrain.errors import StorageError
from raytrain.storage.bucket import BucketStore
from raytrain.storage.clouds.s3 import S3
from raytrain.storage.open import open_store
from tests.helpers.scripted_bucket import listing, scripted, source
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


@pytest.mark.parametrize(
    ("slashed", "num_left_out"),
    [
        (["/stray.jpg"], 1),
        (["/prefix/cat/000.jpg", "/prefix/dog/000.jpg"], 2),  # obstore would list them as those without the slash
        (["/"], 0),  # a marker of a console
        (["/", "/prefix/", "/a.jpg", "//b.jpg"], 3),
        ([f"/prefix/cat/{number:03d}.jpg" for number in range(130)], 130),
    ],
)
@pytest.mark.parametrize("good", [GOOD, []])
def test_names_that_begin_with_a_slash_are_left_out_and_counted(
    good: list[str], slashed: list[str], num_left_out: int, caplog: pytest.LogCaptureFixture
) -> None:
    with scripted_s3(lambda request: Answer(body=listing([*good, *slashed], request))) as (url, requests):
        found = sorted(stored.path for stored in open_store("s3://bucket", source(), S3(url)).list())
        assert found == good and len(requests) < 20
    names = [name.rstrip("/") for name in sorted(slashed) if name != "/"]
    assert caplog.messages == [
        f"{num_left_out} objects below s3://bucket are left out, because their names cannot be used, "
        f"such as {name!r}; rename them."
        for name in names[:1]
    ]


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


# Servers that do not say how a listing goes on after its first page.


def without_token(keys: list[str], request: Request) -> bytes:
    return re.sub(b"<NextContinuationToken>.*?</NextContinuationToken>", b"", listing(keys, request))


def with_marker_of_version_1(keys: list[str], request: Request) -> bytes:
    return listing(keys, request).replace(b"NextContinuationToken>", b"NextMarker>")


def the_first_page_for_ever(keys: list[str], request: Request) -> bytes:
    path = re.sub("continuation-token=[^&]*&?", "", request.path)
    return listing(keys, dataclasses.replace(request, path=path))


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (without_token, "no NextContinuationToken"),
        (with_marker_of_version_1, "no NextContinuationToken"),
        (the_first_page_for_ever, "the same page again for its NextContinuationToken"),
    ],
)
@pytest.mark.parametrize("keys", [GOOD, [*GOOD, *BAD], [f"prefix/{i:02d}/{j}.jpg" for i in range(40) for j in "ab"]])
def test_a_listing_that_breaks_off_is_refused(
    keys: list[str], answer: Callable[[list[str], Request], bytes], fault: str
) -> None:
    with scripted_s3(lambda request: Answer(body=answer(keys, request))) as (url, requests):
        for ask in (lambda store: list(store.list()), lambda store: store.check_readable()):
            with pytest.raises(StorageError) as raised:
                ask(scripted(url))
            assert str(raised.value) == (
                f"{url} breaks off its listing of s3://bucket/prefix after 60 names, which are not all: it sends "
                f"IsTruncated=true and {fault}; update that server, or copy the objects to another one."
            )
        assert len(requests) < 10


def without_token_later(keys: list[str], request: Request) -> bytes:
    is_first = "continuation-token" not in request.path and "start-after" not in request.path
    return listing(keys, request) if is_first else without_token(keys, request)


@pytest.mark.parametrize("folders", ["cat", "cat dog", "cat dog/a dog/b"])
@pytest.mark.parametrize("number", [60, 121])
def test_a_listing_that_breaks_off_later_goes_on_behind_its_last_name(folders: str, number: int) -> None:
    keys = [f"prefix/{folder}/{image:03d}.jpg" for folder in folders.split() for image in range(number)]
    with scripted_s3(lambda request: Answer(body=without_token_later(keys, request))) as (url, _):
        assert sorted(f"prefix/{found.path}" for found in scripted(url).list()) == keys


@pytest.mark.parametrize("bad", [[], ["prefix/100//7.jpg"]])
def test_folders_whose_listing_breaks_off_later_are_all_found(bad: list[str]) -> None:
    good = [f"prefix/{folder:03d}/{image}.jpg" for folder in range(130) for image in range(2)]
    keys = [*good, *bad]

    def answer(request: Request) -> Answer:
        later = "delimiter" in request.path and "continuation-token" in request.path
        return Answer(body=without_token(keys, request) if later else listing(keys, request))

    with scripted_s3(answer) as (url, _):
        assert sorted(f"prefix/{found.path}" for found in scripted(url).list()) == good


@pytest.mark.parametrize("source", ["s3://bucket/tars/*.tar", "s3://bucket/tars"])
@pytest.mark.parametrize("answer", [without_token, the_first_page_for_ever])
def test_archives_of_a_listing_that_breaks_off_are_refused(
    answer: Callable[[list[str], Request], bytes], source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tars = [f"tars/{number:03d}.tar" for number in range(70)]
    with scripted_s3(lambda request: Answer(body=answer(tars, request))) as (url, _):
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        with pytest.raises(StorageError, match="after 60 names"), labelled_source(source, Labelling()):
            pass


@pytest.mark.parametrize("answer", [without_token, the_first_page_for_ever])
def test_a_listing_of_one_page_is_complete_whatever_the_server_does_with_more(
    answer: Callable[[list[str], Request], bytes],
) -> None:
    with scripted_s3(lambda request: Answer(body=answer(GOOD[:60], request))) as (url, _):
        assert len(list(scripted(url).list())) == 60


def test_errors_are_said_as_always() -> None:
    def answer(request: Request) -> Answer:
        is_first = request.number == 0
        return Answer(body=listing(BAD[:1], request)) if is_first else refusal(403, "AccessDenied")

    refused = pytest.raises(StorageError, match="has no permission for s3://bucket/prefix")
    with scripted_s3(answer) as (url, _), refused:
        list(scripted(url).list())
