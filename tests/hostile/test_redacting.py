"""No secret of this process's environment, and nothing that is built like one, is in a text that leaves it."""

from __future__ import annotations

import base64
import html
import json
import re
import string
import time
import timeit
from collections.abc import Callable
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raytrain.cli import main as cli
from raytrain.runs.redact import redact

KEY_LINES = "MIIEvQIBADANBgkqhkiG9w0BAQEF", "AASCBKcwggSjAgEAAoIBAQC7VJTU"
PEM = "\n".join(("-----BEGIN PRIVATE KEY-----", *KEY_LINES, "-----END PRIVATE KEY-----", ""))

ENCODINGS: dict[str, Callable[[str], str]] = {
    "raw": str,
    "url": lambda text: quote(text, safe=""),
    "path": quote,
    "form": quote_plus,
    "lower-case url": lambda text: re.sub("%..", lambda found: found[0].lower(), quote(text, safe="")),
    "url twice": lambda text: quote(quote(text, safe=""), safe=""),
    "json": lambda text: json.dumps(text)[1:-1],
    "json in json": lambda text: json.dumps(json.dumps(text)[1:-1])[1:-1],
    "unicode json": lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    "html": html.escape,
    "json in html": lambda text: html.escape(json.dumps(text)[1:-1]),
    "repr": lambda text: repr(text)[1:-1],
    "repr of bytes": lambda text: repr(text.encode())[2:-1],
    "hex": lambda text: text.encode().hex(),
    "base64": lambda text: base64.b64encode(text.encode()).decode(),
    "base64 for urls": lambda text: base64.urlsafe_b64encode(text.encode()).decode().rstrip("="),
    "base64 url-encoded": lambda text: quote(base64.b64encode(text.encode()).decode(), safe=""),
}
SECRETS = st.text(string.ascii_letters + string.digits + string.punctuation + "äß€😀", min_size=8, max_size=60)


@pytest.mark.parametrize("encoding", ENCODINGS)
@given(secret=SECRETS)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_a_secret_of_the_environment_never_leaves_in_any_encoding(
    encoding: str, secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = ENCODINGS[encoding](secret)
    monkeypatch.setenv("SOME_API_KEY", secret)
    assert redact(f"before <{encoded}> after") == "before <…> after"


@pytest.mark.parametrize(
    ("name", "value", "secret"),
    [
        ("DB_PASS", "hunter22", "hunter22"),
        ("SSHPASS", "hunter22", "hunter22"),
        ("MYSQL_PWD", "hunter22", "hunter22"),
        ("AZURE_CONNECTION_STRING", "AccountName=me;AccountKey=c2VjcmV0c2VjcmV0==;X=y", "c2VjcmV0c2VjcmV0=="),
        (
            "GOOGLE_CREDENTIALS",
            '{"private_key": "line1line1line1line1\\nline2line2line2line2"}',
            "line2line2line2line2",
        ),
        ("DATABASE_URL", "postgres://me:pa/s%40word@host/db", "pa/s@word"),
        ("HTTPS_PROXY", "http://me:passw@rd@proxy:3128", "passw@rd"),
        ("TLS_KEY", PEM, KEY_LINES[0]),
        ("TLS_KEY", PEM, KEY_LINES[1]),
    ],
)
def test_values_by_their_variable_and_their_parts(
    name: str, value: str, secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    assert redact(f"it is {secret} here") == "it is … here"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("at postgres://u:pa/ss@h/db", "at postgres://…@h/db"),
        ("at postgres://u:p@ss@h/db", "at postgres://…@h/db"),
        ("at postgres://me@mail.com:p/s@h", "at postgres://…@h"),
        ("at https://ghp_abc@github.com/x", "at https://…@github.com/x"),
        ("DB_PASS=hunter22 next", "DB_PASS=… next"),
        ('"AZURE_CONNECTION_STRING": "AccountKey=abcdef==;x"', '"AZURE_CONNECTION_STRING": "…"'),
        ("?X-Amz-Signature=0123456789abcdef&x=1", "?X-Amz-Signature=…&x=1"),
        ("aws_secret_access_key = abcdefgh", "aws_secret_access_key = …"),
        ("Authorization: Bearer abc.def", "Authorization: …"),
        ("x?sv=2022-11-02&sig=Zq8LmN3vRt6YxW2pKs9B%2Fa%3D&se=1", "x?sv=2022-11-02&sig=…&se=1"),
        (
            "python train.py --wandb-key Zq8LmN3v --token 'Zq8LmN3v' --epochs 3",
            "python train.py --wandb-key … --token '…' --epochs 3",
        ),
        ('login("hf_Zq8LmN3vRt6YxW2pKs9B")', 'login("…")'),
        ("ghp_Zq8LmN3vRt6YxW2pKs9BZq8LmN3vRt6YxW2p", "…"),
        (f'wandb.login(key="{"0123456789" * 4}")', 'wandb.login(key="…")'),
        (f"Bearer {'Zq8LmN3v' * 4}.a-b.c==", "Bearer …"),
        ("a eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.Zq8LmN3v_R b", "a … b"),
        ("POST https://hooks.slack.com/services/T01/B01/Zq8LmN3vRt6Y", "POST https://hooks.slack.com/…"),
        ('Cookie: id=hunter22; a="b c"; d', "Cookie: …"),
        ("{'Set-Cookie': 'id=hunter22; Path=/', 'b': 1}", "{'Set-Cookie': '…', 'b': 1}"),
        ('"cookie": "a=\\"b\\"; c=d", "e"', '"cookie": "…", "e"'),
        ("<RequestsCookieJar[<Cookie id=hunter22 for h/>]>", "<RequestsCookieJar[<Cookie …"),
        ("Bearer abc123 x", "Bearer … x"),
        ("Authorization: hunter22", "Authorization: …"),
        ("password='correct horse, battery' x", "password='…' x"),
        ('{"password": "a,b&c d", "e": 1}', '{"password": "…", "e": 1}'),
        ("SECRET_KEY = 'x y z hunter'", "SECRET_KEY = '…'"),
        ("train --notify-token 'correct horse' x", "train --notify-token '…' x"),
        ("logging in with password hunter22, as me", "logging in with password …, as me"),
        ("the secret is hunter22", "the secret is …"),
        ("curl -u me:hunter --user 'me:hunter' https://h", "curl -u me:… --user 'me:…' https://h"),
        ("npm_Zq8LmN3vRt6YxW2pKs9BZq8L", "…"),
        ("wandb: wandb_v1_Zq8LmN3vRt6YxW2pKs9B_Zq8L is invalid", "wandb: … is invalid"),
        ("cannot refresh ya29.a0Zq8LmN3vRt6YxW2pKs9B-x", "cannot refresh …"),
        (f"key {PEM.strip()} end", "key … end"),
        (repr(PEM.strip()), "'…'"),
    ],
)
def test_what_is_built_like_a_secret(text: str, expected: str) -> None:
    assert redact(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "s3://bucket/me@home/data",
        "monkey: 0.123456",
        "tokens: 123456 key: cat/000001.jpg",
        "raytrain train --key-column path --labels key --tag token sig=0.12345678901",
        'rows(key="validation_accuracy", sort_key=0.1) --key --token --epochs',
        "bearer of bad news, hf_hub_download and sk-learn-of-this-experiment-0",
        "the secret is in AWS_SECRET_ACCESS_KEY; set it",
        "password required; token 0.123456, token s3://bucket2/key, no cookie: none, docker run -u 1000:1000 x",
    ],
)
def test_other_text_stays(text: str) -> None:
    assert redact(text) == text


@pytest.mark.parametrize(
    "piece",
    [
        "://",
        "://a:",
        "://a/@",
        "ab12+/",
        "-----BEGIN PRIVATE KEY-----",
        "password=",
        "authorization:a",
        "--token",
        "eyJ",
        "eyJ-",
        "eyJaaaaaaaa.",
        "a.hf_",
        "cookie:",
        "cookie:a=;",
        "<Cookie a",
        "password='",
        "password 1",
        "password\t",
        "bearer a",
        "-u a",
    ],
)
def test_a_long_line_takes_time_that_is_linear_in_its_length(piece: str) -> None:
    def fastest_s(num_characters: int) -> float:
        line = piece * (num_characters // len(piece))
        # CPU time, which does not count what other processes do.
        return min(timeit.repeat(lambda: redact(line), timer=time.process_time, number=1, repeat=5))

    # A search that starts again at each piece would take 256 times as long for 16 times the length.
    assert fastest_s(16 * 5_000) < 100 * fastest_s(5_000)


def test_a_value_that_is_no_text_is_redacted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DB_PASS", "hunter\udcff22")
    assert redact("a hunter\udcff22 b hunter%FF22") == "a … b …"


def test_names_of_files_are_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", "/var/run/token")
    monkeypatch.setenv("SSH_AUTH_SOCK", "/tmp/agent.sock")
    assert redact("/var/run/token /tmp/agent.sock") == "/var/run/token /tmp/agent.sock"


def test_an_error_of_a_command_shows_none(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("DB_PASS", "hunter/22")
    assert cli.main(["show", "hunter%2F22", "--storage", "/nowhere/hunter/22", "--json"]) != 0
    printed = "".join(capsys.readouterr())
    assert "hunter" not in printed and "…" in printed
