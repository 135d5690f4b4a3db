"""`%distributed_status --doctor`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jupyter_distrib.errors import PoolError, page
from jupyter_distrib.kernel.history import run_files
from jupyter_distrib.kernel.history.saved_run import SavedRun
from jupyter_distrib.kernel.notebook import doctor
from jupyter_distrib.kernel.notebook.doctor import Finding, Report
from jupyter_distrib.kernel.session.session import Session
from tests.notebook import Notebook


def test_a_real_kernel_is_told_all_that_matters(shared_notebook: Notebook) -> None:
    shared_notebook.ok("import os; os.environ['SOME_TOKEN'] = 'canary'; os.environ['JUPYTER_DISTRIB_VIEW'] = 'html'")
    outcome = shared_notebook.ok("%distributed_status --doctor")
    for words in (
        "jupyter_distrib",
        sys.executable,
        "torch 2.",
        "ipykernel ",
        "IPythonKernel",
        "html:",
        "control channel",
        "agent ",
        "GPU driver",
    ):
        assert words in outcome.result, words
    assert "canary" not in outcome.result
    assert "as text, to copy" in outcome.result_html
    loaded = shared_notebook.ok("import sys; print('torch' in sys.modules)").stdout
    assert loaded == "False\n"


def test_a_missing_numpy_is_a_finding_with_its_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "version", lambda name: "" if name == "numpy" else "1.0")
    (finding,) = [each for each in doctor._versions() if each.advice]
    assert str(finding).startswith("is not installed\n-> pip install numpy")
    assert page("install", "what-is-missing") in str(finding)


def test_without_a_folder_for_logs_and_history_there_is_a_report(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As in a container with a random user and a home folder that nobody may write to."""
    taken = tmp_path / "taken"
    taken.write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(taken))
    monkeypatch.delenv("JUPYTER_DISTRIB_LOG_DIR", raising=False)
    assert list(doctor._dry_runs()) == []
    finding = list(doctor._machine())[-1]
    assert (finding.topic, finding.text) == ("logs", "in a temporary folder; runs are not saved in the history")
    assert "Set XDG_STATE_HOME to another one" in finding.advice


def test_a_part_that_cannot_be_made_is_a_finding() -> None:
    def part() -> Iterator[Finding]:
        yield Finding(topic="system", text="Linux")
        raise PermissionError(13, "Permission denied")

    assert [(each.topic, each.advice) for each in doctor._whole(part())] == [
        ("system", ""), ("report", "[Errno 13] Permission denied"),
    ]  # fmt: skip


def a_run_with(real_bytes: int | None, predicted_bytes: int | None) -> SavedRun:
    return SavedRun(
        number=1, run="a-1", label="", notebook="", began_at_s=0.0, elapsed_s=1.0, state="done",
        peak_tensor_bytes=real_bytes, predicted_bytes=predicted_bytes,
    )  # fmt: skip


def test_real_peaks_are_shown_beside_those_of_dry_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    near = [a_run_with(real_bytes, 1000) for real_bytes in (990, 1010, 1020)]
    others = [a_run_with(5000, None), a_run_with(None, 1000)]
    monkeypatch.setattr(run_files, "load", lambda: [*near, *others])
    (finding,) = doctor._dry_runs()
    assert finding.text.startswith(
        "in 3 runs on GPUs, the real peak of tensors was +1.0% relative to that of the dry run"
    )
    assert "at most +2.0%" in finding.text
    assert finding.advice == ""
    monkeypatch.setattr(run_files, "load", lambda: [*near, a_run_with(1250, 1000)])
    (finding,) = doctor._dry_runs()
    assert finding.advice == "take a dry run that needs more than 80% of a GPU as one that does not fit"
    assert page("dry-run", "how-close-it-is") in str(finding)
    monkeypatch.setattr(run_files, "load", lambda: others)
    assert list(doctor._dry_runs()) == []


def test_another_word_is_refused(shared_notebook: Notebook) -> None:
    assert shared_notebook.fails("%distributed_status --docter").ename == "OptionsError"


def test_a_pool_that_does_not_answer_is_a_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def connect(pool: str) -> None:
        raise PoolError("the agent did not start: no space left on device.")

    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    session = Session()
    monkeypatch.setattr(session.pools, "connect", connect)
    report = Report.of(session, None)
    assert not report.ok
    assert "-> the agent did not start: no space left on device." in repr(report)
    assert page("errors", "poolerror") in repr(report)
    assert "lines as they come" in repr(report)


def test_a_settings_file_that_is_wrong_is_one_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    (tmp_path / "pools.toml").write_text("\nwrong = 1\n")
    monkeypatch.setenv("JUPYTER_DISTRIB_CONFIG", str(tmp_path / "pools.toml"))
    report = Report.of(Session(), None)
    assert [finding.topic for finding in report.findings if "line 2" in finding.advice] == ["settings"]


def test_the_sidebar_is_found_where_jupyter_looks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "labextensions" / doctor.SIDEBAR
    folder.mkdir(parents=True)
    (folder / "package.json").write_text("{}")
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    assert [finding.text for finding in doctor._sidebar()] == [str(folder)]


@pytest.mark.parametrize(("version", "told"), [((6, 31, 0), 0), ((7, 0, 1), 1), ((7, 3, 0), 1), ((7, 4, 0), 0)])
def test_an_ipykernel_that_may_lose_a_cell_is_named(
    monkeypatch: pytest.MonkeyPatch, version: tuple[int, ...], told: int
) -> None:
    monkeypatch.setattr("ipykernel.version_info", version)
    assert len(list(doctor._ipykernel_fault())) == told


def test_html_of_a_report_is_escaped() -> None:
    report = Report(findings=(Finding(topic="pool", text="<script>", advice="<b>"),))
    assert "<script>" not in report._repr_html_()
    assert "&lt;b&gt;" in report._repr_html_()
