"""The GPU kit itself: its rows and files, its limits, and that it goes on; whatever its steps find."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from textwrap import dedent

import pytest

from benchmarks.gpu_kit import report, run
from benchmarks.gpu_kit.report import Row
from benchmarks.gpu_kit.step import STEPS, Check, Findings, Step, Where, read
from tests.notebook import ROOT
from tests.processes import is_alive

ABOUT = {"day": "2026-01-02", "gpus": "1 NVIDIA H200", "torch": "2.11.0", "driver": "", "took": "3 s"}
HOLDS, BROKEN, FIGURE = (Check(what="it | holds", ok=ok, measured="1 s") for ok in (True, False, None))


def row(verdict: report.Verdict = "PASS", where: Where = "gpu", reason: str = "", *checks: Check) -> Row:
    return Row(step="K0", title="all is well", verdict=verdict, where=where, reason=reason, took_s=1.6, checks=checks)


@pytest.mark.parametrize(
    ("checks", "broke", "skipped", "verdict"),
    [
        ([HOLDS, FIGURE], "", "", "PASS"),
        ([HOLDS, BROKEN], "", "", "FAIL"),
        ([HOLDS], "not done within its limit", "", "FAIL"),
        ([], "it raised", "", "FAIL"),
        ([], "", "no compiler", "SKIP"),
        ([BROKEN], "", "no compiler", "FAIL"),
        ([FIGURE], "", "", "SKIP"),
        ([], "", "", "SKIP"),
    ],
)
def test_verdict(checks: list[Check], broke: str, skipped: str, verdict: str) -> None:
    assert report.verdict(checks, broke, skipped) == verdict


def test_the_page_has_a_line_for_each_step_and_says_what_failed() -> None:
    text = report.page(ABOUT, [row("FAIL", "gpu", "", HOLDS, BROKEN), row("SKIP", "gpu", "no\ntime")])

    assert "- torch: 2.11.0" in text
    assert "driver" not in text
    assert "1 FAIL, 1 SKIP." in text
    assert "| K0 | FAIL | GPU | 2 | all is well | it \\| holds: 1 s |" in text
    assert "| K0 | SKIP | GPU | 2 | all is well | no time |" in text
    assert "- **does not hold**: it | holds: 1 s" in text


@pytest.mark.parametrize(("where", "warned"), [("gpu", False), ("bed", True), ("cpu", True)])
def test_rows_without_a_gpu_are_never_proof_for_one(where: Where, warned: bool) -> None:
    assert ("no proof for a GPU" in " ".join(report.page(ABOUT, [row("PASS", where)]).split())) is warned


def test_both_files_are_whole_after_each_row(tmp_path: Path) -> None:
    page = report.save(tmp_path, ABOUT, [row()])
    report.save(tmp_path, ABOUT, [row(), row("FAIL", "bed", "why")])

    assert page.name == "gpu-kit-2026-01-02-1-nvidia-h200.md"
    assert {path.name for path in tmp_path.iterdir()} == {page.name, page.with_suffix(".json").name}
    kept = json.loads(page.with_suffix(".json").read_text())
    assert kept["machine"] == ABOUT
    assert [(each["verdict"], each["where"], each["reason"]) for each in kept["rows"]] == [
        ("PASS", "gpu", ""),
        ("FAIL", "bed", "why"),
    ]


def test_findings_of_a_step_that_was_killed_while_it_wrote_are_read(tmp_path: Path) -> None:
    path = tmp_path / "findings"
    find = Findings(path)
    assert find.within("a cell", 1.0, 2.0)
    assert not find.that("a value", False, 3)
    find.figure("memory", "4 MB")
    with path.open("a") as file:
        file.write('{"what": "half')

    assert [(check.what, check.ok, check.measured) for check in read(path)] == [
        ("a cell within 2 s", True, "1.00 s"),
        ("a value", False, "3"),
        ("memory", None, "4 MB"),
    ]
    assert read(tmp_path / "nothing") == []


def step(without_gpu: Where | None, gpus: int) -> Step:
    return Step(name="", title="", limit_s=1, without_gpu=without_gpu, gpus=gpus, run=lambda place, find: None)


@pytest.mark.parametrize(
    ("without_gpu", "needs", "there", "where", "reason"),
    [
        ("cpu", 1, 0, "cpu", ""),
        ("bed", 2, 0, "bed", ""),
        (None, 1, 0, None, "needs a GPU"),
        ("cpu", 1, 1, "gpu", ""),
        ("cpu", 2, 1, None, "needs 2 GPUs, and 1 is here"),
        (None, 2, 8, "gpu", ""),
    ],
)
def test_a_step_runs_on_gpus_if_they_are_there_and_else_only_where_it_makes_sense(
    without_gpu: Where | None, needs: int, there: int, where: Where | None, reason: str
) -> None:
    assert run.place_of(step(without_gpu, needs), there) == (where, reason)


def test_what_tells_most_comes_first_and_no_step_is_left_out() -> None:
    assert tuple(run.in_order()[: len(run.FIRST)]) == run.FIRST
    assert sorted(run.in_order()) == sorted(STEPS)


def test_all_steps_are_there() -> None:
    """One for each thing that only a GPU can show."""
    wanted = [f"K{number}" for number in range(1, 32) if number != 8] + [f"K8{letter}" for letter in "abcde"]
    assert set(wanted) <= set(STEPS)
    assert sum(one.limit_s >= 10 for one in STEPS.values()) == len(STEPS)


def kit(tmp_path: Path, *arguments: str) -> tuple[int, dict[str, dict[str, object]], str]:
    """The exit status of a run of the kit, its rows by step, and what it printed."""
    command = [sys.executable, "-m", "benchmarks.gpu_kit.run", "--bed", "--results", str(tmp_path), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=170)
    (path,) = tmp_path.glob("*.json")
    return done.returncode, {each["step"]: each for each in json.loads(path.read_text())["rows"]}, done.stdout


@pytest.mark.slow
def test_the_kit_goes_on_whatever_becomes_of_a_step(tmp_path: Path) -> None:
    names = ["raises", "hangs", "dies", "skips", "needs", "goes on"]
    status, rows, printed = kit(tmp_path, "--also", "tests.gpu_kit.steps", "--only", *names)

    assert status == 1
    assert {name: rows[name]["verdict"] for name in names} == dict(
        zip(names, ["FAIL", "FAIL", "FAIL", "SKIP", "SKIP", "FAIL"], strict=True)
    )
    assert rows["raises"]["reason"] == "ValueError: what it raised"
    assert [check["ok"] for check in rows["raises"]["checks"]] == [True]  # type: ignore[attr-defined]
    assert rows["hangs"]["reason"] == "not done within its limit of 6 s"
    assert rows["dies"]["reason"] == "status -9"
    assert rows["skips"]["reason"] == "there is no such thing here"
    assert rows["needs"]["reason"] == "needs a GPU"
    with tarfile.open(tmp_path / run.LOGS) as logs:
        kept = {name.partition("/")[0] for name in logs.getnames()}
        assert kept == {name for name in names if rows[name]["verdict"] == "FAIL"}
        (output,) = [each for each in logs.getnames() if each == "raises/output"]
        assert b"ValueError: what it raised" in logs.extractfile(output).read()  # type: ignore[union-attr]
    assert [check["ok"] for check in rows["goes on"]["checks"]] == [False, True]  # type: ignore[attr-defined]
    (child,) = rows["hangs"]["checks"]  # type: ignore[misc]
    assert not is_alive(int(child["measured"]))
    assert [line.split(" (")[0] for line in printed.splitlines() if line.startswith(("PASS", "FAIL", "SKIP"))] == [
        f"{rows[name]['verdict']} {name}" for name in names
    ]


@pytest.mark.slow
def test_steps_run_on_feigned_gpus_and_on_cpu_ranks_and_end_when_time_is_up(tmp_path: Path) -> None:
    _, rows, _ = kit(tmp_path, "--only", "K1", "K8a", "K15", "K19")

    assert {name: (each["verdict"], each["where"]) for name, each in rows.items()} == {
        "K1": ("PASS", "bed"),
        "K8a": ("PASS", "cpu"),
        "K15": ("PASS", "bed"),
        "K19": ("SKIP", "gpu"),
    }
    status, rows, _ = kit(tmp_path, "--total-s", "1", "--only", "K1", "K8a")
    assert (status, [each["reason"] for each in rows.values()]) == (0, ["no time left", "no time left"])


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_two_ranks_share_one_feigned_gpu(tmp_path: Path, backend: str) -> None:
    """By the kit's `sitecustomize`, which changes what NVML says and what torch is asked for."""
    from benchmarks.gpu_kit.place import Place

    with Place("bed") as place, place.notebook(twice=backend) as book:  # type: ignore[arg-type]
        seen = "import os\nos.environ['CUDA_VISIBLE_DEVICES'], str(device), local_rank"
        uuid = place.bed.gpus[0]["uuid"]
        assert book.values("--gpus 2", seen) == [(uuid, "cuda:0", 0), (uuid, "cuda:0", 1)]
        three = book.cell("%%distributed --gpus 3\n1")
        assert "2 GPUs are visible" in three.text
        meets = dedent("""\
            import os, torch.distributed as dist
            dist.init_process_group('cpu:gloo,cuda:gloo')
            hosts = [None, None]
            dist.all_gather_object(hosts, os.environ['NCCL_HOSTID'])
            hosts""")
        assert book.values("--gpus 2", meets) == [["kit0", "kit1"]] * 2
        status = book.ok("%distributed_status").text
        assert len(re.findall("NVIDIA H100", status)) >= 2
