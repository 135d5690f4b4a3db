"""Which GPUs a kernel may have: what CUDA_VISIBLE_DEVICES lets through, who waits for whom, and who is told what."""

from __future__ import annotations

import os
import platform
import secrets
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jupyter_distrib.agent import server
from jupyter_distrib.agent.gpus import devices
from jupyter_distrib.agent.gpus.devices import Gpu, Inventory, visible
from jupyter_distrib.agent.gpus.torch_build import TorchBuild
from jupyter_distrib.agent.groups.worker_group import NodeWorkerGroup
from jupyter_distrib.agent.ranks import starter
from jupyter_distrib.agent.server import Agent
from jupyter_distrib.server.server import Server
from jupyter_distrib.server.worker_group import Client
from jupyter_distrib.system import control_groups
from jupyter_distrib.wire import messages as m
from jupyter_distrib.wire.descriptors import Descriptors
from jupyter_distrib.wire.link import Link
from tests.agent.lease_holder import Holder
from tests.processes import wait_until

TAG = secrets.token_hex(4)
"""Leases hold on the whole machine, where other tests may run."""
GPUS = [
    Gpu(index=i, uuid=f"GPU-{letter * 4}{TAG}", name="NVIDIA H200", memory_bytes=1, used_bytes=0)
    for i, letter in enumerate("abcd")
]


@pytest.mark.parametrize(
    ("chosen", "indices"),
    [
        (None, [0, 1, 2, 3]),
        ((), []),
        (("0", "2"), [0, 2]),
        (("3", "1"), [3, 1]),
        ((f"GPU-cccc{TAG}",), [2]),
        (("GPU-b", "0"), [1, 0]),
        (("-1", "0"), []),
        (("NoDevFiles",), []),
        (("1", "NoDevFiles"), [1]),
        ((" 1 ", "0"), [1, 0]),
        (("0", "0", "1"), [0, 1]),
    ],
)
def test_visible(chosen: tuple[str, ...] | None, indices: list[int]) -> None:
    assert [gpu.index for gpu in visible(GPUS, chosen)] == indices


@pytest.mark.parametrize("chosen", [("0", "9", "1"), ("GPU", "0"), ("MIG-7",), ("all",), ("1", "x")])
def test_a_word_that_names_no_gpu_is_an_error(chosen: tuple[str, ...]) -> None:
    with pytest.raises(devices.UnknownDevice):
        visible(GPUS, chosen)


# ---------------------------------------------------------------------------------------------------- the agent


class Stage:
    """An agent with a faked list of GPUs, whose worker groups are recorded instead of started."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gpus = list(GPUS)
        monkeypatch.setattr(server, "torch_build", lambda: TorchBuild(cuda="12.8"))
        monkeypatch.setattr(NodeWorkerGroup, "open", lambda group: None)
        self.folder = folder
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(folder / "a.sock"))
        self.told: list[object] = []
        monkeypatch.setattr(Server, "send", lambda agent, client, event, fds=(): self.told.append(event))
        self.agent = Agent(self.listener, folder, "a")
        monkeypatch.setattr(self.agent._gpus, "ask", lambda answered, **_: answered(Inventory(gpus=tuple(self.gpus))))
        self.ends: list[socket.socket] = []

    def client(self, label: str) -> Client:
        ours, theirs = socket.socketpair()
        self.ends.append(theirs)
        hello = m.Hello(protocol=m.PROTOCOL, session=label, pid=1, label=label, python="", torch="", cloudpickle="")
        client = Client(link=Link(ours), hello=hello)
        self.agent.server.clients.append(client)
        return client

    def open(
        self,
        client: Client,
        name: str,
        size: int,
        *,
        gpus: bool = True,
        visible: tuple[str, ...] | None = None,
        gpu_type: str = "",
    ) -> NodeWorkerGroup | str:
        self.agent.open(client, m.OpenWorkerGroup(group=name, size=size, gpus=gpus, visible=visible, gpu_type=gpu_type))
        if self.told and isinstance(self.told[-1], m.WorkerGroupRefused):
            return self.told.pop().reason  # type: ignore[attr-defined, no-any-return]
        group = client.groups.get(name)
        if group is not None:
            group.ran_s = 1.0  # its first cell has been
        return group or "waits"


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    here = Stage(tmp_path, monkeypatch)
    yield here
    for group in list(here.agent.server.groups):
        here.agent.server.close(group, force=True)
    for client in here.agent.server.clients:
        client.link.close()
    for end in (*here.ends, here.listener):
        end.close()
    here.agent._forkservers._log.close()
    here.agent._calls.close()
    here.agent.server.loop._selector.close()


def indices(group: NodeWorkerGroup | str) -> list[int]:
    assert isinstance(group, NodeWorkerGroup), group
    return [gpu.index for gpu in group.gpus]


def test_each_rank_gets_a_gpu_of_its_own(stage: Stage) -> None:
    me = stage.client("a.ipynb (kernel 1)")
    group = stage.open(me, "c1", 2)
    assert indices(group) == [0, 1]
    assert isinstance(group, NodeWorkerGroup)
    assert starter.worker_order(group.command, 1, 1, group.gpus, 2).visible_devices == f"GPU-aaaa{TAG},GPU-bbbb{TAG}"
    assert starter.worker_order(group.command, 1, 1, group.gpus, 2).device == "cuda:1"


def test_no_number_means_all_of_them(stage: Stage) -> None:
    assert indices(stage.open(stage.client("a"), "c1", 0)) == [0, 1, 2, 3]


def test_only_visible_gpus_are_given(stage: Stage) -> None:
    assert indices(stage.open(stage.client("a"), "c1", 0, visible=("3", "1"))) == [3, 1]
    assert indices(stage.open(stage.client("b"), "c2", 2, visible=())) == [], "none visible: CPU ranks"


def test_too_few_gpus_are_an_error_never_fewer_ranks(stage: Stage) -> None:
    me = stage.client("a")
    assert stage.open(me, "c1", 5) == "--gpus 5 but 4 GPUs are visible here; ask for at most that many."
    assert stage.open(me, "c2", 2, visible=("2",)) == (
        "--gpus 2 but 1 GPU is visible here (CUDA_VISIBLE_DEVICES=2); ask for at most that many, or change the variable in "
        "the notebook."
    )
    assert "1 to 1000 ranks, not -1" in stage.open(me, "c3", -1)
    assert not me.groups
    assert indices(stage.open(me, "c3", 4)) == [0, 1, 2, 3], "nothing stays leased after a refusal"


def test_cpu_ranks_need_no_lease(stage: Stage) -> None:
    group = stage.open(stage.client("a"), "c1", 3, gpus=False)
    assert indices(group) == []
    assert isinstance(group, NodeWorkerGroup)
    assert starter.worker_order(group.command, 0, 1, group.gpus, 2).visible_devices is None


def test_more_cpu_ranks_than_a_machine_can_use_are_refused(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """A typing error such as 1000 would occupy the machine for half a minute."""
    here, me = platform.node(), stage.client("a")
    monkeypatch.setattr(control_groups, "cores", lambda: 2)
    monkeypatch.setattr(control_groups, "free_memory_bytes", lambda: 500_000_000)
    assert stage.open(me, "c1", 257, gpus=False) == (
        f"257 ranks are too many for {here}, which has 2 cores: ask for at most 256."
    )
    assert stage.open(me, "c2", 32, gpus=False) == (
        f"32 ranks need at least 512.0 MB of memory, and {here} has 500.0 MB free; ask for fewer."
    )
    assert not me.groups
    assert isinstance(stage.open(me, "c3", 31, gpus=False), NodeWorkerGroup)
    monkeypatch.setattr(control_groups, "free_memory_bytes", lambda: 0)
    assert isinstance(stage.open(me, "c4", 2, gpus=False), NodeWorkerGroup), "one for each core may always be tried"


def test_a_range_that_ends_beyond_use_begins_with_what_there_is(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_groups, "cores", lambda: 2)
    stage.agent.open(client := stage.client("a"), m.OpenWorkerGroup(group="c1", size=900, least=1, gpus=False))
    assert client.groups["c1"].command.size == 2


def test_idle_ranks_yield_at_once(stage: Stage) -> None:
    first, second = stage.client("a"), stage.client("b.ipynb (kernel 2)")
    taken = stage.open(first, "c1", 4)
    assert indices(stage.open(second, "c2", 1)) == [0]
    assert isinstance(taken, NodeWorkerGroup)
    assert taken.closed
    assert stage.told == [m.WorkerGroupClosed(group="c1", reason="its GPUs went to b.ipynb (kernel 2)")]
    assert "c1" not in first.groups


def test_free_gpus_are_given_before_idle_ranks_have_to_yield(stage: Stage) -> None:
    first, second = stage.client("a"), stage.client("b")
    group = stage.open(first, "c1", 2)
    assert indices(stage.open(second, "c2", 2)) == [2, 3]
    assert isinstance(group, NodeWorkerGroup)
    assert not group.closed


def test_nobody_yields_in_vain(stage: Stage) -> None:
    """Ranks that would not make enough room stay warm."""
    first, second, third = stage.client("a"), stage.client("b.ipynb"), stage.client("c")
    idle = stage.open(first, "c1", 2)
    keeping = stage.open(second, "c2", 2)
    assert isinstance(idle, NodeWorkerGroup)
    assert isinstance(keeping, NodeWorkerGroup)
    keeping.kept = {"x-1/model": 0.0}
    assert "only 0 of 4 GPUs are free" in str(stage.open(third, "c3", 3))
    assert not idle.closed
    assert indices(stage.open(third, "c4", 2)) == [0, 1]


def test_kept_values_do_not_yield_and_are_named(stage: Stage) -> None:
    first, second = stage.client("a.ipynb (kernel 1)"), stage.client("b")
    group = stage.open(first, "c1", 3)
    assert isinstance(group, NodeWorkerGroup)
    group.kept = {"x-1/model": 0.0, "x-1/opt": 0.0}
    reason = stage.open(second, "c2", 2)
    now = time.strftime("%H:")
    assert isinstance(reason, str)
    assert reason.startswith("--gpus 2, but only 1 of 4 GPUs are free. GPUs 0-2: a.ipynb (kernel 1) since " + now)
    assert " (keeps model, opt). Wait for them with --wait S, or free them: `%distributed_pool stop`" in reason
    assert not group.closed
    assert indices(stage.open(second, "c3", 1)) == [3]


def test_a_running_cell_does_not_yield(stage: Stage) -> None:
    group = stage.open(stage.client("a"), "c1", 4)
    assert isinstance(group, NodeWorkerGroup)
    command = SimpleNamespace(run="a1-1", label="Cell In[3]", detached=False)
    group.pending = SimpleNamespace(command=command)  # type: ignore[assignment]
    reason = stage.open(stage.client("b"), "c2", 1)
    assert isinstance(reason, str)
    assert "(run a1-1 of Cell In[3] is on)" in reason
    group.pending = None


def test_gpus_of_another_agent_are_left_alone(stage: Stage, holder: Holder) -> None:
    """Another environment's agent has its own worker groups; only the lease connects the two."""
    holder.hold(GPUS[0])
    assert indices(stage.open(stage.client("a"), "c1", 2)) == [1, 2]
    reason = stage.open(stage.client("b"), "c2", 4)
    assert isinstance(reason, str)
    assert "GPU 0: other.ipynb (kernel 7) since" in reason


def test_a_group_that_ends_gives_its_gpus_back(stage: Stage) -> None:
    me = stage.client("a")
    group = stage.open(me, "c1", 4)
    assert isinstance(group, NodeWorkerGroup)
    group.kept = {"x-1/model": 0.0}
    stage.agent.server._gone(me)
    assert group.closed
    assert indices(stage.open(stage.client("b"), "c2", 4)) == [0, 1, 2, 3]
    assert os.listdir(stage.folder)


def rank(number: int, *, early: bool = False) -> Any:
    """A rank whose process lives until it is reaped."""
    process = SimpleNamespace(living=True, mark="")
    return SimpleNamespace(number=number, pid=number + 1, state="idle", early=early, process=process, end=lambda: None)


def test_a_gpu_is_free_when_the_process_that_had_it_is_reaped_and_not_before(stage: Stage) -> None:
    """The driver takes seconds to free a large memory after SIGKILL."""
    me = stage.client("a")
    group = stage.open(me, "c1", 4)
    assert isinstance(group, NodeWorkerGroup)
    killed = rank(0)
    group.ranks.put(killed)
    stage.agent.server._gone(me)
    second = stage.client("b")
    stage.agent.open(second, m.OpenWorkerGroup(group="c2", size=4, gpus=True))
    assert not second.groups, "it waits"
    assert not stage.told, "and is not refused"
    killed.process.living = False
    stage.agent._release_closed()
    for call in stage.agent.server.loop._soon:
        call()
    assert indices(second.groups["c2"]) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("gpus", "ran_s", "exchanged"),
    [
        pytest.param(True, 0.0, [], id="a second CUDA context would take memory beside the first"),
        pytest.param(False, 0.001, [], id="what a cell has left in its process would be lost"),
        pytest.param(False, 0.0, ["c1"], id="cpu"),
    ],
)
def test_only_cpu_ranks_that_have_run_nothing_are_exchanged_for_those_of_the_preloaded_forkserver(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, gpus: bool, ran_s: float, exchanged: list[str]
) -> None:
    names: list[str] = []
    group = stage.open(stage.client("a"), "c1", 1, gpus=gpus)
    assert isinstance(group, NodeWorkerGroup)
    monkeypatch.setattr(group.starts, "replace_all", lambda: names.append(group.name))
    group.ranks.put(rank(0, early=True))
    group.ran_s = ran_s
    stage.agent._exchange_early()
    assert names == exchanged
    group.ranks._current.clear()


# ---------------------------------------------------------------------------------------------------- types, waiting


MIXED = [
    Gpu(index=i, uuid=f"GPU-{letter * 4}{TAG}", name=name, memory_bytes=1, used_bytes=0)
    for i, (letter, name) in enumerate(
        [("e", "NVIDIA A10"), ("f", "NVIDIA A100-SXM4-80GB"), ("g", "NVIDIA A10"), ("h", "Tesla V100")]
    )
]


@pytest.mark.parametrize(
    ("wanted", "found"),
    [("A10", [0, 2]), ("a10", [0, 2]), ("A100", [1]), ("nvidia a100 80gb", [1]), ("Tesla V100", [3]), ("H100", [])],
)
def test_a_type_is_a_word_of_the_name_in_any_case(wanted: str, found: list[int]) -> None:
    assert [gpu.index for gpu in devices.of_type(MIXED, wanted)] == found


def test_only_gpus_of_the_type_are_given(stage: Stage) -> None:
    stage.gpus = list(MIXED)
    me = stage.client("a")
    assert indices(stage.open(me, "c1", 0, gpu_type="a10")) == [0, 2]
    assert stage.open(me, "c2", 1, gpu_type="H100") == (
        "--gpu-type H100, but this machine has 2 NVIDIA A10, 1 NVIDIA A100-SXM4-80GB, 1 Tesla V100; "
        "leave it out, or use another pool."
    )
    stage.gpus = []
    assert "no GPU at all" in str(stage.open(me, "c3", 1, gpu_type="A10"))


def ask(stage: Stage, client: Client, name: str, wait_s: float) -> None:
    stage.agent.open(client, m.OpenWorkerGroup(group=name, size=3, gpus=True, wait_s=wait_s))


def test_who_waits_gets_the_gpus_when_they_are_free(stage: Stage) -> None:
    first, second = stage.client("a.ipynb (kernel 1)"), stage.client("b")
    group = stage.open(first, "c1", 3)
    assert isinstance(group, NodeWorkerGroup)
    group.kept = {"x-1/model": 0.0}
    ask(stage, second, "c2", 60)
    stage.agent._waiting.retry()
    (queued,) = stage.told
    assert isinstance(queued, m.WorkerGroupQueued)
    assert "GPUs 0-2: a.ipynb (kernel 1) since" in queued.reason
    assert not second.groups
    stage.agent.server.close(group, force=True)
    for call in stage.agent.server.loop._soon:
        call()
    assert indices(second.groups["c2"]) == [0, 1, 2]
    assert len(stage.agent._waiting) == 0


def test_who_has_waited_in_vain_is_refused(stage: Stage) -> None:
    group = stage.open(stage.client("a.ipynb (kernel 1)"), "c1", 3)
    assert isinstance(group, NodeWorkerGroup)
    group.kept = {"x-1/model": 0.0}
    ask(stage, stage.client("b"), "c2", 0.001)
    assert wait_until(lambda: stage.agent._waiting.retry() or len(stage.told) > 1)
    assert [type(event) for event in stage.told] == [m.WorkerGroupQueued, m.WorkerGroupRefused]
    assert stage.told[0].reason == stage.told[1].reason  # type: ignore[attr-defined]
    assert len(stage.agent._waiting) == 0


def test_who_leaves_does_not_wait_any_more(stage: Stage) -> None:
    group = stage.open(stage.client("a.ipynb (kernel 1)"), "c1", 3)
    assert isinstance(group, NodeWorkerGroup)
    group.kept = {"x-1/model": 0.0}
    gone, stopped = stage.client("b"), stage.client("c")
    ask(stage, gone, "c2", 60)
    ask(stage, stopped, "c3", 60)
    stage.agent.server._gone(gone)
    stage.agent.server._obey(stopped, m.CloseWorkerGroup(group="c3"), Descriptors())
    assert len(stage.agent._waiting) == 0
