"""The overview that front ends get: a golden one is checked here and in `labextension/src/tests/`.

Written anew with `python -m tests.kernel.sidebar.test_overview`, after a look at the difference.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jupyter_distrib.kernel.record.record import RunRecord
from jupyter_distrib.kernel.session.pools.kernel_identity import KernelIdentity
from jupyter_distrib.kernel.session.pools.pool_manager import RankStart
from jupyter_distrib.kernel.session.runs.run import PoolLink, Run
from jupyter_distrib.kernel.session.session import Session
from jupyter_distrib.kernel.session.status import PoolStatus
from jupyter_distrib.kernel.settings.cell_options import GroupSize, Options
from jupyter_distrib.kernel.settings.settings import NamedPool
from jupyter_distrib.kernel.sidebar import overview as module
from jupyter_distrib.kernel.sidebar.overview import UnchangedParts, overview
from jupyter_distrib.system import gpu_devices
from jupyter_distrib.wire import messages as m
from tests.kernel.record.golden_run import golden_record

GOLDEN = Path(__file__).parent / "golden_overview.json"


def golden_overview() -> dict[str, Any]:
    session = Session()
    session.identity = KernelIdentity(name="a1b2c3", pid=4000)
    session.runs.all = (Run(golden_record(), PoolLink(pool="local"), cell_id="cell-5"),)
    session.choices.pick(pool="local", strategy="ddp", size=GroupSize(count=4, gpus=False))
    gpu = m.GpuStatus(
        index=2,
        number="2",
        name="NVIDIA A100-SXM4-80GB",
        memory_bytes=85899345920,
        used_bytes=31000000000,
        holder="",
    )
    node = m.NodeStatus(name="node", cpus=16, memory_bytes=128 * 2**30, gpus=1, free_gpus=1, gpu_type=gpu.name)
    workers = tuple(m.WorkerInfo(rank=rank, pid=1, device="cpu") for rank in range(2))
    other = m.GroupStatus(
        group="g", session="other", holder="b.ipynb (kernel 7)", workers=workers, label="Cell In[3]", kept={"r/x": 0.0}
    )
    server = m.ServerStatus(state="forkserver ready", name="node", nodes=(node,), gpus=(gpu,), groups=(other,))
    status = replace(PoolStatus.of("local", server, session), at_s=1800000000.0)
    seen = overview(session, session.settings, {"local": status})
    for run in seen["runs"]:
        run["began_at_s"] = 1800000000.0
    seen["pools"] = [pool for pool in seen["pools"] if pool["kind"] in ("local", "inline")]
    return {
        **seen,
        "strategies": ["none", "ddp"],
        "label": "a.ipynb (kernel 4000)",
        "route": "control",
        "doing": None,
        "trouble": None,
    }


@pytest.fixture(autouse=True)
def _bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpu_devices, "DEVICES", tmp_path / "dev")
    for name in [name for name in os.environ if name in ("JUPYTER_DISTRIB_POOL", "JUPYTER_DISTRIB_STRATEGY")]:
        monkeypatch.delenv(name)


def test_a_machine_without_devices_of_gpus_is_known_to_have_none_before_anything_starts(tmp_path: Path) -> None:
    session = Session()
    session.choices.add(NamedPool(name="far", kind="ssh", options={"hosts": "a"}, origin="the notebook"))

    def without_gpu() -> dict[str, bool]:
        return {pool["name"]: pool["no_gpu"] for pool in overview(session, session.settings, {})["pools"]}

    found = without_gpu()
    assert (found["local"], found["inline"], found["far"]) == (True, True, False)
    (tmp_path / "dev" / "dxg").mkdir(parents=True)
    assert without_gpu()["local"] is False


def test_parts_are_taken_over_until_what_they_show_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    session, unchanged = Session(), UnchangedParts()
    ended, going = (Run(golden_record(), PoolLink(pool="local")) for _ in range(2))
    ended.clock.stop()
    ended.clock.ended.set()
    session.runs.all = (ended, going)
    written: list[Options] = []
    monkeypatch.setattr(module, "to_line", lambda options: str(written.append(options)))

    first, second = (overview(session, session.settings, {}, unchanged) for _ in range(2))
    assert first == second == overview(session, session.settings, {})
    assert second["runs"][1] is first["runs"][1]
    assert second["runs"][0] is not first["runs"][0]
    assert len(written) == 2  # one for each `unchanged`

    session.choices.pick(strategy="ddp")
    session.runs.remove(ended)
    assert overview(session, session.settings, {}, unchanged)["next"]["strategy"] == "ddp"
    assert unchanged.ended == {}


def test_a_start_is_listed_from_the_search_for_its_pool_on_and_not_when_ranks_are_up() -> None:
    session = Session()

    def starts() -> Any:
        return overview(session, session.settings, {})["starts"]

    with session.pools.starting(RankStart(pool="local", label="Cell In[3]", cell="c-3")):
        (start,) = starts()
        assert (start["pool"], start["label"], start["cell"], start["run"]) == ("local", "Cell In[3]", "c-3", "")
    assert starts() == []


def test_a_run_says_which_numbers_are_nan_at_its_end() -> None:
    session, record = Session(), RunRecord(run="r", label="Cell In[3]", ranks=[0, 1], world_size=2)
    for step, loss, norm in ((1, 0.5, math.inf), (2, math.nan, 1.0)):
        record.apply(m.Measured(run="r", rank=1, step=step, values={"loss": loss, "norm": norm}, at_s=step))
    session.runs.all = (Run(record, PoolLink(pool="local")),)
    (run,) = overview(session, session.settings, {})["runs"]
    assert run["not_finite"] == {"loss": "nan from step 2"}


def test_nodes_of_a_cluster_are_reported_with_the_ranks_on_them(tmp_path: Path) -> None:
    (tmp_path / "jupyter_distrib.toml").write_text('[pools.lab]\nkind = "ray"\n')
    session = Session()
    node = {"cpus": 4.0, "free_cpus": 2.0, "memory_bytes": 8 * 10**9, "gpus": 2, "free_gpus": 1, "gpu_type": "A10"}
    nodes = tuple(m.NodeStatus(name=name, **node) for name in ("10.0.0.7", "10.0.0.8"))  # type: ignore[arg-type]
    ranks = tuple(m.WorkerInfo(rank=rank, pid=1, device="cpu", node="10.0.0.7") for rank in range(2))
    group = m.GroupStatus(group="g", holder="", session=session.identity.name, workers=ranks)
    server = m.ServerStatus(state="joined", name="Ray at 10.0.0.7:6379", nodes=nodes, groups=(group,))

    def told(server: m.ServerStatus) -> Any:
        pools = overview(session, session.settings, {"lab": PoolStatus.of("lab", server, session)})["pools"]
        return next(pool["node"] for pool in pools if pool["name"] == "lab")

    assert told(server)["nodes"] == [
        {"name": "10.0.0.7", **node, "ranks": [0, 1], "state": "", "holders": []},
        {"name": "10.0.0.8", **node, "ranks": [], "state": "", "holders": []},
    ]
    assert told(replace(server, nodes=None)) is None, "it is not known yet what there is"


def test_the_overview_is_what_javascript_is_tested_with() -> None:
    assert json.loads(json.dumps(golden_overview())) == json.loads(GOLDEN.read_text())


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(golden_overview(), indent=2, sort_keys=False) + "\n")
