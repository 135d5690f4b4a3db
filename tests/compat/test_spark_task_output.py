"""What a Spark task prints of its ranks' encoded lines: nothing, in the task's own process only."""

from __future__ import annotations

import io
import pickle
import sys
import types

import pytest

from jupyter_distrib.compat.spark import lines
from jupyter_distrib.compat.spark.task_output import Token


def printed(monkeypatch: pytest.MonkeyPatch, *, in_task: bool) -> str:
    """What comes of a rank's line, of one with another token and of a plain one, after the token has arrived."""
    context = types.SimpleNamespace(TaskContext=types.SimpleNamespace(get=lambda: object() if in_task else None))
    monkeypatch.setitem(sys.modules, "pyspark.taskcontext", context)  # type: ignore[arg-type]
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    token = pickle.loads(pickle.dumps(Token("1f76fbe7a601e371")))
    assert type(token) is str
    for each in (token, "another"):
        for line in lines.of_text(each, 0, "stdout", "hello\n"):
            sys.stdout.write(line)
    sys.stdout.write("plain\n")
    sys.stdout.flush()
    return stream.getvalue()


def test_a_task_prints_no_lines_with_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    text = printed(monkeypatch, in_task=True)
    assert "1f76fbe7a601e371" not in text
    assert ("another" in text, text.endswith("plain\n")) == (True, True)


def test_a_rank_still_prints_its_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "1f76fbe7a601e371" in printed(monkeypatch, in_task=False)
