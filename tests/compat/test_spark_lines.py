"""What the ranks of a Spark task tell in lines arrives, also with foreign lines between; needs no Spark."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from jupyter_distrib.compat.spark import lines
from jupyter_distrib.wire import messages as m
from tests.notebook import ROOT

TOKEN = "0123456789abcdef"
TASK = f"""
import os
from jupyter_distrib import report
from jupyter_distrib.compat.spark.entry import execute
def train(name):
    report(loss=0.5)
    print("half a line", end="", flush=True)
    os.system("echo from a child")
    raise LookupError(name)
execute("r-1", {TOKEN!r}, train, ("nothing",), {{}})
"""


def text_of(found: list[object], stream: str) -> str:
    return "".join(each.text for each in found if isinstance(each, lines.Printed) and each.stream == stream)


@pytest.mark.parametrize(
    "text", ["one\n", "no end", "\n\n", "  spaces  \n", "10%\r20%\r", "\x1e\x1f\x85|", "é" * 5000 + "\n"]
)
def test_output_arrives_as_it_was_in_short_lines(text: str) -> None:
    sent = list(lines.of_text(TOKEN, 3, "stdout", text))
    assert all(line.endswith("\n") and line.count("\n") == 1 for line in sent)
    assert max(len(line.encode()) for line in sent) <= 4096
    reader = lines.Reader(token=TOKEN)
    found = [reader.read(line.rstrip()) for line in sent]
    assert "".join(each.text for each in found if isinstance(each, lines.Printed)) == text
    assert {each.rank for each in found if isinstance(each, lines.Printed)} == {3}


def test_events_of_several_ranks_arrive_though_their_parts_mix() -> None:
    events = [m.Measured(run="r", rank=rank, step=1, values={"x" * 5000: 1.0}, at_s=0.0) for rank in (0, 1)]
    both = [lines.of_event(TOKEN, event.rank, event) for event in events]
    reader = lines.Reader(token=TOKEN)
    found = [reader.read(line.rstrip()) for pair in zip(*both, strict=True) for line in pair]
    assert [each for each in found if each is not None] == events


def test_lines_without_the_token_are_text_of_nobody() -> None:
    (line,) = lines.of_event("another", 0, m.Started(run="r", rank=0, pid=1, device="cpu", at_s=0.0))
    for foreign in (line.rstrip(), "plain", f"\x1e{TOKEN} x O y|", f"\x1e{TOKEN} 0 V not base64|"):
        found = lines.Reader(token=TOKEN).read(foreign)
        assert found is None or (isinstance(found, lines.Printed) and found.rank == -1)


@pytest.mark.slow
def test_a_task_tells_what_it_prints_reports_and_raises() -> None:
    env = {**os.environ, "RANK": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", TASK], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == ""
    reader = lines.Reader(token=TOKEN)
    found = [reader.read(line.rstrip()) for line in done.stdout.split("\n")[:-1]]
    assert isinstance(found[0], m.Started)
    assert [each.values for each in found if isinstance(each, m.Measured)] == [{"loss": 0.5}]
    assert text_of(found, "stdout") == "half a linefrom a child\n"
    assert isinstance(found[-1], m.Failed)
    assert (found[-1].failure.type_name, found[-1].failure.message) == ("LookupError", "nothing")
