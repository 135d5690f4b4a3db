"""`cuda:0` in a cell with a strategy: the own device of each rank. Devices are named only, none is used."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from textwrap import dedent
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from jupyter_distrib.cells import cell
from jupyter_distrib.wire import messages as m
from jupyter_distrib.worker.autoparallel.patches import Patches
from jupyter_distrib.worker.autoparallel.training.device_remapping import DeviceRemapping, misplaced

OWN = torch.device("cuda:3")
FIRST = torch.device("cuda:0")


class Rank:
    """A rank whose device is `cuda:3`, and what its run is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.own = DeviceRemapping(OWN, self.notes.append)
        self.patches = Patches()
        self.calls: list[Any] = []
        self.moves: list[Any] = []

    def run(self, source: str, **captured: object) -> object:
        names: dict[str, object] = {"torch": torch, "nn": nn, **captured}
        self.own.begin(names, self.patches)
        return cell.execute(m.Cell(source=source, filename="Cell In[1]"), names, self.own.adapted)


def moving(original: Any, moves: list[Any]) -> Any:
    """Return a `to` that notes moves to GPUs, of which there are none."""

    def to(thing: Any, *args: Any, **keywords: Any) -> Any:
        device = keywords.get("device", args[0] if args else None)
        if isinstance(device, torch.device | int | str) and device != "cpu":
            moves.append(device)
            return thing
        return original(thing, *args, **keywords)

    return to


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    rank = Rank()
    monkeypatch.setattr(torch.cuda, "set_device", rank.calls.append)
    for owner in (torch.Tensor, nn.Module):
        monkeypatch.setattr(owner, "cuda", lambda thing, device=None: rank.calls.append(device))
        monkeypatch.setattr(owner, "to", moving(owner.to, rank.moves))
    yield rank
    rank.patches.undo()


CELLS = {
    "a text": "str(torch.device('cuda:0' if rank is None else 'cpu'))",
    "in a function": dedent("""\
        def on():
            return [str(torch.device('cuda:0'))][0]
        on()"""),
    "in a method": dedent("""\
        class Trainer:
            def device(self): return torch.device('cuda:0')
        str(Trainer().device())"""),
    "in a default": "def on(device='cuda:0'): return device\non()",
}


@pytest.mark.parametrize("what", CELLS)
def test_a_cell_that_names_the_first_gpu_gets_its_own(rank: Rank, what: str) -> None:
    assert rank.run(CELLS[what], rank=None) == "cuda:3"
    assert rank.notes == ["cuda:0 in this cell means each rank's own device"]


@pytest.mark.parametrize(
    "source",
    [
        "torch.cuda.set_device(0)",
        "torch.cuda.set_device('cuda:0')",
        "nn.Linear(1, 1).cuda(0)",
        "torch.ones(1).cuda(0)",
        "torch.ones(1).cuda(device=0)",
        "torch.cuda.set_device(device)",
        "torch.ones(1).cuda(f'cuda:{number}')",
    ],
)
def test_a_call_that_names_the_first_gpu_is_for_the_own_one(rank: Rank, source: str) -> None:
    rank.run(source, device=FIRST, number=0)
    rank.patches.undo()
    assert torch.device(rank.calls[0]) == OWN
    torch.cuda.set_device(0)
    assert rank.calls[1:] == [0]  # as it was


@pytest.mark.parametrize(
    "source",
    [
        "torch.device(f'cuda:{number}')",
        "torch.device('cuda', number)",
        "torch.device(type='cuda', index=0)",
        "torch.device(number)",
        "torch.device(torch.device('cuda', 0))",
        "of_torch(number)",
        "[torch.device('cuda:%d' % number) for _ in range(1)][0]",
    ],
)
def test_a_device_that_the_cell_makes_is_the_own_one(rank: Rank, source: str) -> None:
    assert rank.run(source, number=0, of_torch=torch.device) == OWN
    assert rank.notes == ["cuda:0 in this cell means each rank's own device"]


@pytest.mark.parametrize("named", ["0", "f'cuda:{number}'", "device=0", "device, torch.float64"])
def test_what_is_moved_to_the_first_gpu_goes_to_the_own_one(rank: Rank, named: str) -> None:
    rank.run(f"torch.ones(1).to({named})", device=FIRST, number=0)
    rank.run(f"nn.Linear(1, 1).to({named})", device=FIRST, number=0)
    assert [torch.device(each) for each in rank.moves] == [OWN, OWN]
    assert rank.run("torch.ones(1).to(torch.float64).dtype, torch.ones(1).to('cpu').device.type") == (
        torch.float64,
        "cpu",
    )


def test_the_first_gpu_as_a_context_is_the_own_one(rank: Rank) -> None:
    assert rank.run("torch.cuda.device(0).idx, torch.cuda.device('cuda:0').idx, torch.cuda.device(2).idx") == (3, 3, 2)


def test_devices_that_the_cell_makes_are_torchs_own(rank: Rank) -> None:
    """Code that looks at classes of devices notices nothing, and torch's own calls mean what they say."""
    found = rank.run(
        dedent("""\
            import copy, pickle
            made = torch.device('cuda', 0)
            isinstance(made, torch.device), type(made) == torch.device, issubclass(type(made), torch.device), copy.deepcopy(made), pickle.loads(pickle.dumps(made)), pickle.loads(pickle.dumps(torch.device)), {torch.device: 1}[type(made)]""")
    )
    rank.patches.undo()

    assert found == (True, True, True, OWN, OWN, torch.device, 1)
    assert type(torch.device("cuda:0")) is torch.device


@pytest.mark.versions
def test_a_device_of_torchs_own_code_is_left_alone(rank: Rank) -> None:
    rank.run("1")
    of_torch = compile("torch.device('cuda:' + '0')", torch.__file__, "eval")
    assert eval(of_torch, {"torch": torch}) == FIRST
    assert rank.notes == []


@pytest.mark.slow
def test_compiled_functions_are_traced_as_always(rank: Rank) -> None:
    """In one graph, without a break at the class of devices or at `to`."""
    found: Any = rank.run(
        dedent("""\
            def made(x):
                device = torch.device('cpu')
                assert isinstance(x.device, torch.device)
                return x.to(device).to(torch.float64) + torch.ones(2, device=device)
            torch.compile(made, backend='eager', fullgraph=True)(torch.ones(2))""")
    )
    assert found.tolist() == [2.0, 2.0]


def test_a_class_of_devices_that_outlives_the_cell_is_torchs_again(rank: Rank) -> None:
    kept: Any = rank.run("torch.device")
    rank.patches.undo()
    assert kept("cuda", 0) == FIRST


@pytest.mark.parametrize(
    "source",
    ["torch.cuda.set_device(2)", "nn.Linear(1, 1).cuda()", "torch.ones(1).cuda('cuda:1')", "'cuda:00', 'on cuda:0'"],
)
def test_other_devices_and_texts_are_left_as_they_are(rank: Rank, source: str) -> None:
    rank.run(source)
    assert rank.calls in ([2], [None], ["cuda:1"], [])
    assert rank.notes == []


def made(source: str) -> Any:
    """What a cell of the notebook has defined, as it is on a rank."""
    names: dict[str, Any] = {"__name__": "__main__", "torch": torch}
    exec(source, names)
    return names["made"]


def test_what_the_notebook_has_sent_means_the_own_device(rank: Rank) -> None:
    function = made("def made(device='cuda:0'): return device")
    trainer = made(
        dedent("""\
            class Trainer:
              def __init__(self): self.device = torch.device('cuda:0')
            made = Trainer()""")
    )
    options = argparse.Namespace(device="cuda:0", size=1), SimpleNamespace(device=FIRST), {"device": "cuda:0"}

    found = rank.run(
        "device, name, made(), trainer.device, args.device, more.device, config['device']",
        device=FIRST, name="cuda:0", made=function, trainer=trainer, args=options[0], more=options[1], config=options[2],
    )  # fmt: skip

    assert isinstance(function, FunctionType)
    assert isinstance(found, tuple)
    assert [str(each) for each in found] == ["cuda:3"] * 7
    assert len(rank.notes) == 1


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_ranks_for_which_it_is_the_same_change_nothing(device: str) -> None:
    notes: list[str] = []
    own = DeviceRemapping(torch.device(device), notes.append)
    names: dict[str, object] = {"device": FIRST}
    code = compile("x = 'cuda:0'", "Cell In[1]", "exec")

    own.begin(names, Patches())

    assert own.adapted(code) is code
    assert names == {"device": FIRST}
    assert notes == []


def test_parameters_on_the_device_of_another_rank_are_found() -> None:
    parameters = [SimpleNamespace(device=torch.device(name)) for name in ("cpu", "meta", "cuda:3", "cuda:0")]
    found: Any = misplaced(parameters, OWN)  # type: ignore[arg-type]
    assert found is parameters[3]
    assert misplaced(parameters[:3], OWN) is None  # type: ignore[arg-type]
