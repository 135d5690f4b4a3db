"""The source lines in tracebacks, whose file names have come from ranks."""

from __future__ import annotations

import linecache
import os
from pathlib import Path

import pytest

from jupyter_distrib.kernel.session.runs import cell_sources
from jupyter_distrib.kernel.session.runs.cell_sources import CellSources
from jupyter_distrib.wire import messages as m


def texts(sources: CellSources, filename: str) -> tuple[str, object]:
    """Return the line that a failure on a rank shows, and the lines around it."""
    frame = m.Frame(filename=filename, line=1, function="f")
    failure = m.Failure(type_name="KeyError", message="'lr'", frames=(frame,))
    named = sources.named(m.Failed(run="aaa-1", rank=0, failure=failure, at_s=1.0))
    assert isinstance(named, m.Failed)
    return named.failure.frames[0].text, sources.source_of(filename)


def test_a_module_of_this_machine_is_shown_with_the_lines_around(tmp_path: Path) -> None:
    (tmp_path / "utils.py").write_text("a = b\nc = d\n")
    assert texts(CellSources({}), str(tmp_path / "utils.py")) == ("a = b", ["a = b\n", "c = d\n"])


def test_a_cell_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(linecache.cache, "/tmp/ipykernel_1/2.py", (6, None, ["a = b\n"], "/tmp/ipykernel_1/2.py"))
    assert texts(CellSources({}), "/tmp/ipykernel_1/2.py") == ("a = b", ["a = b\n"])
    assert texts(CellSources({"Cell In[2]": ["c\n"]}), "Cell In[2]")[1] == ["c\n"]


def test_a_host_has_no_other_file_quoted_in_the_notebook(tmp_path: Path) -> None:
    (tmp_path / ".netrc").write_text("machine a login b password c\n")
    assert texts(CellSources({}), str(tmp_path / ".netrc")) == ("", None)


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.py")
    (tmp_path / "endless.py").symlink_to("/dev/zero")
    for path in ("/dev/zero", str(tmp_path / "fifo.py"), str(tmp_path / "endless.py"), "<string>", ""):
        assert texts(CellSources({}), path) == ("", None)


def test_a_host_cannot_send_causes_without_end() -> None:
    failure = m.Failure(type_name="KeyError", message="0")
    for number in range(1, 5000):
        failure = m.Failure(type_name="KeyError", message=str(number), cause=failure)
    named = CellSources({}).named(m.Failed(run="aaa-1", rank=0, failure=failure, at_s=1.0))
    assert isinstance(named, m.Failed)
    messages = []
    left: m.Failure | None = named.failure
    while left is not None:
        messages.append(left.message)
        left = left.cause
    assert messages == [str(number) for number in range(4999, 4999 - cell_sources.MOST_CAUSES - 1, -1)]
