"""Each option of each kind of pool, with values that make no sense, in a settings file: one sentence with file and line.
Reading a file starts nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jupyter_distrib.errors import OptionsError
from jupyter_distrib.kernel.settings import config_files, find_files
from jupyter_distrib.kernel.settings.available import POOLS, STRATEGIES
from jupyter_distrib.kernel.settings.pool_definitions import options_of
from jupyter_distrib.options import Option
from jupyter_distrib.pools.machines.options import command
from tests.kernel.settings.test_config_files import FILE

KINDS = ("ssh", "slurm", "kubernetes", "ray", "spark", "command", "local")
WRONG = {
    "a table": "{ a = 1 }",
    "a list of tables": "[{ a = 1 }]",
    "a list in a list": '[["a"]]',
    "true": "true",
    "empty": '""',
    "blank": '"  "',
    "an empty list": "[]",
    "a date": "2026-01-01",
    "no number": "nan",
    "a word for a switch": '"no"',
    "negative": "-1",
    "negative as text": '"-1"',
    "a line break": json.dumps("a\nb"),
    "a zero byte": json.dumps("a\0b"),
    "very large": "9223372036854775807",
    "very large as text": json.dumps("9" * 1000),
    "very long": json.dumps("x" * 100_000),
}
TEXTS = {"TYPE", "COMMAND", "NAME", "GRES", "FEATURES", "IMAGE", "WHERE", "URL", "PATH", "OPTIONS", "HOSTS"}
"""What names of options' values are texts, in which a number is one."""


def makes_sense(option: Option, what: str) -> bool:
    """Return whether an option may have such a value."""
    match what:
        case "a word for a switch":
            return bool(option.metavar)
        case "a table":
            return option.metavar == "JSON"
        case "true":
            return not option.metavar
        case "very large":
            return option.metavar in TEXTS
        case "very large as text":
            return option.metavar in TEXTS
        case "negative" | "negative as text":
            return option.metavar in ("PATH", "OPTIONS")  # a file of this name, an option of salloc
        case "a line break":
            return option.read is command  # of sh
    return False


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / ".config" / "jupyter_distrib" / "pools.toml"
    path.parent.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("XDG_CONFIG_HOME", "JUPYTER_DISTRIB_CONFIG", "JUPYTER_DISTRIB_POOL", "JUPYTER_DISTRIB_STRATEGY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(find_files, "LOOK_ROUND_S", 1e-9)
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_value_is_one_sentence_with_file_line_and_option(file: Path, kind: str) -> None:
    problems = []
    for option in options_of(kind, POOLS, STRATEGIES):
        key = "wait" if option.name == "wait_s" else option.name
        for what, value in WRONG.items():
            file.write_text(f'[pools.lab]\nkind = "{kind}"\n\n{key} = {value}\n')
            said = refusal()
            if makes_sense(option, what):
                continue
            begins = f"{FILE.removeprefix('~/')}, line 4: {key}"
            if not said.startswith(begins) or "\n" in said or len(said) > 300:
                problems.append(f"{key}: {what}: {said[:300] or 'it is taken'}")
    assert not problems, "\n".join(["", *problems])


def refusal() -> str:
    """Return what is said of the file; nothing if it is taken."""
    try:
        config_files.load(POOLS, STRATEGIES)
    except OptionsError as error:
        return str(error)
    return ""
