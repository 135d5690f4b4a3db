"""Addresses of services as they are shown: without what gives access to these services."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from jupyter_distrib.addresses import line_without_secrets, shown, without_secret, without_secrets
from jupyter_distrib.errors import CaptureError, OptionsError, PoolError

SECRET = "hunter2hunter2"

PLAIN = [
    ("postgresql://mlflow:{s}@db.example/mlflow", "postgresql://db.example/mlflow"),
    ("postgresql+psycopg2://u:a@{s}@db:5432/x", "postgresql+psycopg2://db:5432/x"),
    ("http://{s}@host:5000", "http://host:5000"),
    ("HTTP://U:{s}@HOST/a/b", "HTTP://HOST/a/b"),
    ("http://u:{s}@[fe80::1%25eth0]:5000/a", "http://[fe80::1%25eth0]:5000/a"),
    ("mongodb://u:{s}@a:1,b:2,c/x?replicaSet=r&password={s}", "mongodb://a:1,b:2,c/x"),
    ("redis://:{s}@host/0", "redis://host/0"),
    ("u:{s}@host:22/x", "host:22/x"),
    ("//u:{s}@host/x", "//host/x"),
    ("ray://u:{s}@head:10001", "ray://head:10001"),
    ("https://oauth2:{s}@gitlab/o/r.git", "https://gitlab/o/r.git"),
    ("jdbc:postgresql://host:5432/db?user=u&password={s}", "jdbc:postgresql://host:5432/db"),
    ("jdbc:sqlserver://host:1433;databaseName=x;user=u;password={s}", "jdbc:sqlserver://host:1433"),
    ("jdbc:oracle:thin:u/{s}@host:1521:db", "host:1521:db"),
    ("sc://host:15002/;token={s};user_id=x", "sc://host:15002/"),
    ("https://x.example/c?sig={s}&sv=1", "https://x.example/c"),
    ("https://host/#access_token={s}", "https://host/"),
    ("https://wandb.example/t/p/runs/1?apiKey={s}", "https://wandb.example/t/p/runs/1"),
    ("host=db user=u password={s} dbname=x", "host=db user=u password=... dbname=x"),
    ("host=db password = '{s} x'", "host=db password = ..."),
    ("sqlite:///x.db?key={s}", "sqlite:///x.db"),
    ("http://u:{s}@höst/ü", "http://höst/ü"),
    ("http://u%20x:{s}%21@host", "http://host"),
]
ODD = [
    ("postgresql://u:a/{s}@db:5432/x", "postgresql://...@db:5432/x"),
    ("postgresql://u:a/b@{s}/x@db:5432/x", "postgresql://...@db:5432/x"),
    ("http://u:12/{s}@h", "http://...@h"),
    ("http://u:a?{s}@h", "http://..."),
    ("http://u:a#{s}@h", "http://..."),
    ("http://u:{s};x=y@h", "http://..."),
    ("http://u:{s}", "http://..."),
    ("http://u:{s}%40host/x", "http://..."),
    ("http://u%3A{s}%2540host/x", "http://..."),
    ("http:///u:{s}@host", "http://...@host"),
    ("http:u:{s}@host", "host"),
    ("http://u:{s}@host\\@other", "http://...@other"),
    ("git+https://u:{s}@github.example/o/r@v1", "git+https://...@v1"),
    ("jdbc:sqlserver://host:1433;user=u;password=a@{s}", "jdbc:sqlserver://..."),
    ("u:a?{s}@h", "..."),
    ("u:p@host;password={s}", "..."),
]
WHOLE = [
    "databricks", "databricks://profile", "uc:databricks", "sqlite:///mlruns.db", "sqlite:////data/x.db",
    "file:///data/mlruns", "/data/@x/#1", "./mlruns", "head:6379", "[::1]:6379", "ray://head:10001", "auto",
    "http://localhost:5000/a", "https://example.com/@scope/x", "git+https://github.com/o/r@v1.0", "s3://bucket/path",
    "local-cluster[2,2,2048]", "", "a,b:2",
]  # fmt: skip


@pytest.mark.parametrize(("address", "wanted"), PLAIN + ODD)
def test_an_address_is_shown_without_secrets(address: str, wanted: str) -> None:
    assert shown(address.format(s=SECRET)) == wanted


@pytest.mark.parametrize(
    "name",
    [
        "token",
        "db_token",
        "HF_TOKEN",
        "password",
        "api_key",
        "wandb_apikey",
        "client_secret",
        "dbToken",
        "apiKey",
        "secret_key",
    ],
)
def test_the_value_of_an_argument_whose_name_is_a_secret_s_is_left_out(name: str) -> None:
    assert without_secret(name, SECRET) == "..."


@pytest.mark.parametrize(
    ("name", "value"),
    [("tokenizer", "gpt2"), ("max_tokens", "512"), ("token", 7), ("token", ""), ("key", "a"), ("db_host", "h")],
)
def test_the_value_of_another_argument_stays(name: str, value: object) -> None:
    assert without_secret(name, value) == value


@pytest.mark.parametrize("address", WHOLE)
def test_an_address_without_secrets_is_shown_as_it_is(address: str) -> None:
    assert shown(address) == address


@pytest.mark.parametrize(
    "user", ["", "u:", "u:a/", "u:1/", "u:a@", "u:a?", "u:a#", "u:;", "u:%2F", "u:\\", "u%3A", "u:é"]
)
@pytest.mark.parametrize("end", ["", "%40", "/", "@", "?x", "#", ";a=b", ":"])
@pytest.mark.parametrize("scheme", ["http://", "postgresql://", "jdbc:mysql://", "//"])
def test_no_spelling_of_a_password_is_shown(scheme: str, user: str, end: str) -> None:
    address = f"{scheme}{user}{SECRET}{end}@db.example:1/x?y=z"
    assert SECRET not in shown(address)
    assert SECRET not in without_secrets(f"cannot connect to '{address}', sorry")


@pytest.mark.parametrize("address", [each for each, _ in PLAIN + ODD])
def test_a_sentence_is_shown_without_secrets(address: str) -> None:
    said = without_secrets(f"OperationalError: ('{address.format(s=SECRET)}') is away (see https://x.example/a).")
    assert SECRET not in said
    assert said.startswith("OperationalError: ('")
    assert said.endswith(" is away (see https://x.example/a).")


@pytest.mark.parametrize(
    "text",
    [
        "the Ray cluster at head:1 asks for a token: put it into ~/.ray/auth_token or RAY_AUTH_TOKEN.",
        "host alice@n1 does not answer; --hosts alice@n1:2,bob@n2:1",
        "in cell 12:30, x = {'a': 1}  # 5 // 2",
        "mail to me@example.com: a key is missing",
        "start it with RAY_AUTH_MODE=token, or write --insecure (insecure = true) if only you can reach it.",
    ],
)
def test_other_sentences_stay(text: str) -> None:
    assert without_secrets(text) == text


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("t.py --api-key {} --lr 1", "t.py --api-key ... --lr 1"),
        ("t.py -dbToken {}", "t.py -dbToken ..."),
        ("-m t --db-password={} token={}", "-m t --db-password=... token=..."),
        ("t.py --url http://u:{}@h/x --max-tokens 8 password", "t.py --url http://h/x --max-tokens 8 password"),
        ("", ""),
    ],
)
def test_a_command_line_is_shown_without_secrets(words: str, told: str) -> None:
    assert line_without_secrets(words.replace("{}", SECRET).split()) == told


def test_the_password_of_an_address_in_the_environment_is_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries take addresses apart, and show the parts."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"postgresql://u:{SECRET}%2Fx@db/mlflow")
    assert without_secrets(f"login failed for 'u' with {SECRET}/x") == "login failed for 'u' with ..."


@pytest.mark.parametrize(
    "text", ["a" * 200_000, "a:" * 100_000, "a." * 100_000, "://" * 70_000, "token" * 40_000, ":@" * 90_000]
)
def test_a_long_text_takes_no_time(text: str) -> None:
    began_s = time.perf_counter()
    without_secrets(text)
    assert time.perf_counter() - began_s < 3


def test_our_own_errors_show_no_passwords() -> None:
    for kind in (PoolError, OptionsError):
        assert str(kind(f"RAY_ADDRESS = 'ray://u:{SECRET}@head:1' is wrong")) == "RAY_ADDRESS = 'ray://head:1' is wrong"
    assert str(CaptureError("x = 'a:b@c'")) == "x = 'a:b@c'"


def test_the_module_is_quick_to_import() -> None:
    """Every import of the package loads it."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", "import os, re, jupyter_distrib.addresses"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "urllib" not in done.stderr
