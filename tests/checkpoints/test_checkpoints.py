"""`save` and `load` in one process, without a process group: what goes in comes out, and what does not fit is said."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import MetadataIndex

import jupyter_distrib
from jupyter_distrib import DistributedError, load, resume, save
from jupyter_distrib.checkpoints import folder as folders
from jupyter_distrib.checkpoints import periodic

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning:torch")  # of torch, by torch.compile


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def net(width: int = 8, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 2))


def trained(seed: int = 0, steps: int = 3, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = net(seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), **{"lr": 0.01, **options})
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.arange(24.0).reshape(6, 4) / 24).pow(2).mean().backward()
    optimizer.step()


def same(one: nn.Module, other: nn.Module) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_a_model_and_its_optimizer_go_on_as_if_nothing_had_happened():
    model, optimizer = trained()
    save("here/deep", model=model, optimizer=optimizer, epoch=3)
    again, its_own = trained(seed=1, steps=0)

    plain = load("here/deep", model=again, optimizer=its_own)

    assert plain == {"epoch": 3}
    assert same(model, again)
    step(model, optimizer)
    step(again, its_own)
    assert same(model, again)


def test_options_of_the_optimizer_come_back_but_not_those_of_the_machine():
    model, optimizer = trained(lr=0.03, betas=(0.8, 0.9), foreach=True)
    save("here", model=model, optimizer=optimizer)
    again, its_own = trained(steps=0, lr=1.0, foreach=False)

    load("here", model=again, optimizer=its_own)

    assert its_own.param_groups[0]["lr"] == 0.03
    assert its_own.param_groups[0]["betas"] == (0.8, 0.9)
    assert its_own.param_groups[0]["foreach"] is False


def test_the_state_of_another_class_is_refused_and_nothing_is_loaded():
    """Its options and buffers have names in common, and would be taken for one another."""
    model, optimizer = trained()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    save("here", model=model, optimizer=optimizer, schedule=schedule)
    other = net(seed=1)
    before = other[0].weight.clone()

    for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop):
        said = refused(load, "here", model=other, optimizer=kind(other.parameters(), lr=1.0))
        assert said.startswith(
            f"`optimizer` is of the class {kind.__name__}, and the checkpoint has the state of AdamW"
        )
        assert "build one of AdamW, or leave `optimizer` out, which then begins anew; nothing was loaded." in said
    said = refused(load, "here", schedule=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9))
    assert said.startswith("`schedule` is of the class CosineAnnealingLR, and the checkpoint has the state of StepLR")
    assert torch.equal(other[0].weight, before)
    assert load("here", model=other).keys() == {"schedule"}


def test_groups_in_another_order_are_loaded_by_name_but_not_with_a_schedule_which_numbers_them():
    model = net()

    def optimizer_of(*parts: int) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": model[part].parameters(), "lr": 0.1 * part} for part in parts], lr=1)

    optimizer = optimizer_of(0, 1, 2)
    save("here", model=model, optimizer=optimizer, schedule=torch.optim.lr_scheduler.StepLR(optimizer, 2))
    again = optimizer_of(2, 1, 0)
    schedule = torch.optim.lr_scheduler.StepLR(again, 2)

    said = refused(load, "here", model=model, optimizer=again, schedule=schedule)
    load("here", model=model, optimizer=again)

    assert said.startswith(
        "`optimizer` has other parameter groups than in the checkpoint, or has them in another order"
    )
    assert [group["lr"] for group in again.param_groups] == [0.2, 0.1, 0.0]


def test_several_groups_several_models_frozen_and_unused_parameters():
    one, two = net(), net(seed=1)
    one[0].weight.requires_grad_(False)
    unused = nn.Linear(3, 3)
    two.add_module("unused", nn.Identity())
    two.unused.extra = unused
    both = torch.optim.SGD(
        [{"params": one.parameters(), "lr": 0.1}, {"params": two.parameters(), "lr": 0.2}], lr=1, momentum=0.9
    )
    for model in (one, two):
        model(torch.ones(3, 4)).sum().backward()
    both.step()
    save("here", one=one, two=two, both=both)
    kept = [parameter.detach().clone() for group in both.state.values() for parameter in group.values()]
    fresh = torch.optim.SGD([{"params": one.parameters()}, {"params": two.parameters()}], lr=5, momentum=0.5)

    load("here", one=one, two=two, both=fresh)

    assert [group["lr"] for group in fresh.param_groups] == [0.1, 0.2]
    assert fresh.param_groups[0]["momentum"] == 0.9
    now = [value for group in fresh.state.values() for value in group.values()]
    assert len(now) == len(kept)
    assert all(any(torch.equal(a, b) for b in now) for a in kept)


def test_what_has_a_state_dict_and_what_has_none():
    model, optimizer = trained(steps=1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[3, 7])
    history = {1: [0.5, 0.25], "best": {}, "tensor": torch.ones(2)}
    shadow = {"a": torch.zeros(2), "b": torch.ones(3)}
    save("here", scheduler=scheduler, history=history, shadow=shadow, one=torch.tensor(1.5), nothing=None, pair=(1,))
    other = torch.optim.lr_scheduler.MultiStepLR(torch.optim.SGD(net().parameters(), lr=1), milestones=[1])

    plain = load("here", scheduler=other)

    assert other.milestones == scheduler.milestones  # a Counter with numbers as its keys
    assert plain.keys() == {"history", "shadow", "one", "nothing", "pair"}
    assert plain["history"][1] == [0.5, 0.25]
    assert plain["history"]["best"] == {}
    assert plain["pair"] == (1,)
    whole = load("here")
    assert whole["one"] == 1.5
    assert torch.equal(whole["shadow"]["b"], torch.ones(3))
    assert model is not None


def test_everything_in_it_on_the_cpu_without_any_object():
    model, optimizer = trained()
    save("here", model=model, optimizer=optimizer, epoch=3)

    read = load("here")

    assert read["epoch"] == 3
    assert torch.equal(read["model"]["0.weight"], model[0].weight)
    assert read["optimizer"]["param_groups"][0]["lr"] == 0.01
    assert torch.equal(read["optimizer"]["state"]["0.weight"]["exp_avg"], optimizer.state[model[0].weight]["exp_avg"])


def test_torchs_own_functions_read_it():
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    model, optimizer = trained()
    save("here", model=model, optimizer=optimizer)

    dcp_to_torch_save("here", "one_file.pt")

    read = torch.load("one_file.pt", weights_only=False)
    assert torch.equal(read["model"]["0.weight"], model[0].weight)
    assert read["optimizer"]["param_groups"][0]["params"] == [name for name, _ in model.named_parameters()]


def test_a_second_save_takes_the_place_of_the_first_and_leaves_none_of_its_files():
    first, second = net(), net(seed=1)
    save("here", model=first)
    before = set(os.listdir("here"))
    save("here", model=second)

    assert not before & set(os.listdir("here")) - {".metadata"}
    load("here", model=first)
    assert same(first, second)


@pytest.mark.parametrize("stopped", [KeyboardInterrupt, OSError(28, "No space left on device")])
@pytest.mark.parametrize("at", ["_write_data", "finish"])
def test_a_save_that_is_stopped_half_way_leaves_the_earlier_checkpoint(
    at: str, stopped: BaseException, monkeypatch: pytest.MonkeyPatch
):
    first, second = net(), net(seed=1)
    save("here", model=first)
    before = set(os.listdir("here"))
    own = getattr(folders.Writer, at)

    def stop(self: Any, *args: Any, **keywords: Any) -> Any:
        if at == "_write_data":
            own(self, *args, **keywords)
        raise stopped

    expected = KeyboardInterrupt if stopped is KeyboardInterrupt else DistributedError
    with monkeypatch.context() as patched:
        patched.setattr(folders.Writer, at, stop)
        with pytest.raises(expected) as raised:
            save("here", model=second)
        with pytest.raises(expected):
            save("new", model=second)

    if stopped is not KeyboardInterrupt:
        assert "[Errno 28] No space left" in str(raised.value)
    assert set(os.listdir("here")) == before
    assert not Path("new").exists()
    load("here", model=second)
    assert same(first, second)


def test_what_a_killed_save_has_left_is_not_a_checkpoint_and_goes_with_the_next(monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patched:
        patched.setattr(folders.Writer, "finish", lambda *_, **__: 1 / 0)
        patched.setattr(folders.Writer, "clean_up", lambda _: None)  # as after SIGKILL
        with pytest.raises(DistributedError, match="ZeroDivisionError"):
            save("here", model=net())
    left = set(os.listdir("here"))
    assert left
    with pytest.raises(DistributedError, match="here is not a complete checkpoint: the save that wrote it was stopped"):
        load("here", model=net())

    save("here", model=net())

    assert not left & set(os.listdir("here"))


DIES = """
import os, pickle, signal
from jupyter_distrib import save
from jupyter_distrib.checkpoints import folder
def half(value, file):
    content = pickle.dumps(value)
    file.write(content[: len(content) // 2])
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
folder.pickle.dump = half
save("here", number=2)
"""


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["finish", "place.replace"])
def test_a_save_that_another_one_overtakes_is_an_error_and_leaves_the_other(
    moment: str, monkeypatch: pytest.MonkeyPatch
):
    """Two processes that save into one folder: the second removes the first one's files when it has ended."""
    first, second = net(seed=1), net(seed=2)
    owner, name = (folders.Writer, moment) if moment == "finish" else (folders.CheckpointFolder, "replace")
    original = getattr(owner, name)

    def overtaken(*args: Any) -> Any:
        monkeypatch.setattr(owner, name, original)
        save("ckpt", model=second)
        return original(*args)

    save("ckpt", model=net())
    monkeypatch.setattr(owner, name, overtaken)
    with pytest.raises(DistributedError, match="ckpt was saved into by another process at the same time"):
        save("ckpt", model=first)

    load("ckpt", model=first)
    assert same(first, second)


def test_a_writer_that_dies_in_the_middle_of_the_metadata_leaves_the_earlier_checkpoint():
    save("here", number=1)

    died = subprocess.run([sys.executable, "-c", DIES], check=False)

    assert died.returncode == -signal.SIGKILL
    assert len(os.listdir("here")) == 4  # the earlier data and .metadata, and those that were begun
    assert load("here") == {"number": 1}
    save("here", number=3)
    assert len(os.listdir("here")) == 2


def test_a_checkpoint_is_on_the_disk_before_it_is_valid_and_only_then_the_earlier_one_goes(
    monkeypatch: pytest.MonkeyPatch,
):
    """What a loss of power can undo is what came after the last `fsync`."""
    save("here", number=1)
    (earlier,) = Path("here").glob("__*")
    order: list[str] = []
    for name in ("fsync", "replace", "unlink"):
        own = getattr(os, name)

        def noted(what: Any, *args: Any, own: Any = own, name: str = name, **keywords: Any) -> None:
            path = Path(os.readlink(f"/proc/self/fd/{what}") if name == "fsync" else what)
            kind = "data" if path.suffix == ".distcp" else "folder" if path.name == "here" else "metadata"
            order.append(f"{name} {'earlier ' if path.name == earlier.name else ''}{kind}")
            own(what, *args, **keywords)

        monkeypatch.setattr(os, name, noted)
    save("here", number=2)

    assert order == ["fsync data", "fsync metadata", "replace metadata", "fsync folder", "unlink earlier data"]


def refused(call: Any, *args: Any, **objects: Any) -> str:
    with pytest.raises(DistributedError) as raised:
        call(*args, **objects)
    return str(raised.value)


def test_a_folder_that_cannot_be_written_is_one_sentence():
    Path("file").write_text("x")
    Path("full").mkdir()
    Path("full/notes.txt").write_text("x")

    assert refused(save, "file", a=1) == "file is a file, and a checkpoint is a folder: choose another name."
    assert refused(save, "full", a=1) == "full holds other files and is not a checkpoint: choose another folder."
    assert refused(save, "file/below", a=1) == "file/below cannot be written: Not a directory."
    assert refused(save, "/proc/nowhere", a=1).startswith("/proc/nowhere cannot be written: ")
    assert "was given nothing" in refused(save, "here")
    assert not Path("here").exists()


@pytest.mark.parametrize("keep", [None, 1])
def test_what_cannot_be_pickled_is_named_and_no_checkpoint(keep: int | None):
    said = refused(save, "new", model=net(), settings={"loss": lambda: 1}, keep=keep)

    assert said.startswith("`settings` cannot be pickled for the checkpoint: ")
    assert resume("new") == {}
    assert not keep or os.listdir("new") == []


def test_a_folder_that_cannot_be_read_is_one_sentence():
    save("one", a=1)
    Path("empty").mkdir()
    Path("damaged").mkdir()
    Path("damaged/.metadata").write_bytes(b"nonsense")

    assert "there is no checkpoint two; in " in refused(load, "two")
    assert refused(load, "two").endswith("there is damaged, one.")
    assert refused(load, "empty") == "empty is not a checkpoint: it has no .metadata file."
    assert "damaged/.metadata cannot be read: UnpicklingError" in refused(load, "damaged")


@pytest.mark.parametrize("entry", ["weights", "number"])
def test_a_bit_that_has_changed_on_the_disk_is_named(entry: str):
    save("here", **{entry: torch.arange(1000.0) if entry == "weights" else [5] * 1000})
    (file,) = Path("here").glob("__*")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)

    said = refused(load, "here")

    assert said.startswith(
        f"{file} is damaged, and `{entry}` in it cannot be loaded: it is not as it was written (Bad CRC"
    )


@pytest.mark.parametrize("lost", ["a chunk", "its place", "its bytes", "a value"])
def test_numbers_without_a_place_in_a_file_are_not_taken_from_memory(lost: str):
    save("here", weights=torch.arange(1000.0), number=[5])
    metadata = pickle.loads(Path("here/.metadata").read_bytes())
    entry = metadata.state_dict_metadata["weights"]
    match lost:
        case "a chunk":
            entry.size = torch.Size([10**15])
        case "its place":
            del metadata.storage_data[MetadataIndex("weights", torch.Size([0]))]
        case "its bytes":
            entry.size = entry.chunks[0].sizes = torch.Size([10**15])
        case "a value":
            del metadata.storage_data[MetadataIndex("number")]
    Path("here/.metadata").write_bytes(pickle.dumps(metadata))

    said = refused(load, "here")

    assert said.startswith("here/.metadata has "), said
    assert f"`{'number' if lost == 'a value' else 'weights'}`" in said
    assert said.endswith(", so here cannot be loaded: load another checkpoint.")


def test_entries_that_share_their_bytes_are_not_loaded():
    save("here", a=[1], b=[2])
    metadata = pickle.loads(Path("here/.metadata").read_bytes())
    metadata.storage_data[MetadataIndex("a")] = metadata.storage_data[MetadataIndex("b")]
    for number in range(9):
        metadata.state_dict_metadata[f"c{number}"] = metadata.state_dict_metadata["b"]
        metadata.storage_data[MetadataIndex(f"c{number}")] = metadata.storage_data[MetadataIndex("b")]
    Path("here/.metadata").write_bytes(pickle.dumps(metadata))

    assert refused(load, "here").startswith("here/.metadata gives several entries the same bytes of __")


def test_what_was_written_without_checksums_is_loaded():
    torch.serialization.set_crc32_options(False)
    try:
        save("here", weights=torch.arange(3.0), number=1)
    finally:
        torch.serialization.set_crc32_options(True)

    assert load("here")["weights"].tolist() == [0.0, 1.0, 2.0]


def test_a_model_that_does_not_fit_is_named_with_its_shapes_and_is_left_as_it_was():
    model, optimizer = trained()
    save("here", model=model, optimizer=optimizer)
    wide = net(width=16)
    before = {key: value.clone() for key, value in wide.state_dict().items()}

    said = refused(load, "here", model=wide)

    assert said.startswith(
        "`model.0.weight` is (8, 4) in the checkpoint and (16, 4) in the model, and 6 more do not match"
    )
    assert all(torch.equal(before[key], value) for key, value in wide.state_dict().items())
    less, more = nn.Sequential(nn.Linear(4, 8)), net()
    more.add_module("head", nn.Linear(2, 2))
    assert "the model has no place for `model.1.weight` of the checkpoint" in refused(load, "here", model=less)
    assert "the checkpoint has nothing for `model.head.weight` of the model" in refused(load, "here", model=more)


@pytest.mark.parametrize(("saved", "now"), [(torch.complex64, torch.float32), (torch.float32, torch.int64)])
def test_numbers_that_would_be_cut_are_refused(saved: torch.dtype, now: torch.dtype):
    def model(kind: torch.dtype) -> nn.Module:
        made = nn.Module()
        made.register_buffer("seen", torch.ones(2, dtype=kind))
        return made

    save("here", model=model(saved))
    save("narrow", model=net().bfloat16())

    assert "which would lose a part of it" in refused(load, "here", model=model(now))
    assert load("narrow", model=net()) == {}


def test_names_and_optimizers_that_do_not_fit_are_named():
    model, optimizer = trained()
    save("here", model=model, optimizer=optimizer, epoch=1)
    part = torch.optim.AdamW(model[0].parameters())
    split = torch.optim.AdamW([{"params": model[0].parameters()}, {"params": model[1:].parameters()}])
    other = torch.optim.AdamW(net().parameters())

    assert "the checkpoint has no `net`, it holds model, optimizer, epoch" in refused(load, "here", net=model)
    assert "`epoch` is int, which cannot be loaded in place" in refused(load, "here", epoch=0)
    assert "has no name without its model" in refused(save, "there", optimizer=optimizer)
    assert "belongs to none of model" in refused(save, "there", model=model, optimizer=other)
    assert "does not train `1.weight`, which the `optimizer` of the checkpoint did" in refused(
        load, "here", model=model, optimizer=part
    )
    load("here", model=model, optimizer=split)  # divided more finely than it was: each group gets the options it had
    save("split", model=model, optimizer=split)
    assert "in one parameter group, and the checkpoint has them in several" in refused(
        load, "split", model=model, optimizer=optimizer
    )
    assert "`model` of the checkpoint is not the state of an optimizer" in refused(
        load, "here", optimizer=model, model=optimizer
    )
    assert not Path("there").exists()


def test_a_handle_says_where_to_call_it():
    handle = jupyter_distrib.RankValue(name="model", key="k", group="c", ranks=(0, 1), fetch=lambda _: None)

    assert "`model` lives on the ranks: call jupyter_distrib.save() in a %%distributed cell" in refused(
        save, "here", model=handle
    )
    assert "jupyter_distrib.load() in a %%distributed cell" in refused(load, "here", model=handle)


@pytest.mark.slow
def test_wrappers_leave_no_trace_in_the_names():
    model, optimizer = trained()
    save("compiled", model=torch.compile(model), optimizer=optimizer)

    load("compiled", model=model, optimizer=optimizer)

    with Path("compiled/.metadata").open("rb") as file:
        assert not [key for key in pickle.load(file).state_dict_metadata if "_orig_mod" in key]


def test_tensors_that_were_not_named_come_back_and_models_and_optimizers_do_not():
    model, optimizer = trained(steps=1)
    average = {"layer.weight": torch.ones(2), "best": torch.zeros(3)}
    save("here", model=model, optimizer=optimizer, critic=net(), average=average, record=torch.tensor(2.5))

    plain = load("here", model=net())

    assert plain.keys() == {"average", "record"}
    assert {name: value.tolist() for name, value in plain["average"].items()} == {
        "layer.weight": [1, 1],
        "best": [0, 0, 0],
    }
    assert plain["record"] == 2.5
    assert load("here").keys() == {"model", "optimizer", "critic", "average", "record"}


def test_a_loss_without_any_state_is_saved_and_loaded():
    criterion = nn.CrossEntropyLoss()
    save("here", model=net(), criterion=criterion, epoch=1)
    assert load("here", model=net(), criterion=criterion) == {"epoch": 1}
    save("alone", criterion=criterion)
    assert load("alone", criterion=criterion) == {}
    with pytest.raises(DistributedError, match=r"the checkpoint has nothing for `criterion\.0\.weight` of the model"):
        load("here", criterion=net())


def test_an_optimizer_that_keeps_lists_goes_on():
    def trained_by_lbfgs(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        def loss() -> float:
            optimizer.zero_grad()
            value = model(torch.arange(24.0).reshape(6, 4) / 24).pow(2).mean()
            value.backward()
            return value.item()

        optimizer.step(loss)

    model, again = net(), net(seed=1)
    optimizer, its_own = (torch.optim.LBFGS(each.parameters(), max_iter=3) for each in (model, again))
    trained_by_lbfgs(model, optimizer)
    save("here", model=model, optimizer=optimizer)

    load("here", model=again, optimizer=its_own)

    for pair in ((model, optimizer), (again, its_own)):
        trained_by_lbfgs(*pair)
    assert same(model, again)


class WithExtraState(nn.Module):
    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.inner, self.extra = nn.Linear(2, 2), extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize("keep", [None, 1])
@pytest.mark.parametrize("now", [{}, {"a": 2, "c": 3}, None, torch.zeros(3)], ids=str)
@pytest.mark.parametrize(
    "extra", [{"a": 1}, {}, {1: [2]}, {"seen": torch.ones(2)}, [torch.ones(2)], torch.ones(2), (5,), None], ids=str
)
def test_extra_state_comes_back_whatever_the_model_has_now(extra: Any, now: Any, keep: int | None):
    model = nn.Sequential(WithExtraState(extra))
    save("here", keep=keep, model=model)
    periodic._finish(ok=True)
    again = nn.Sequential(WithExtraState(now))

    load("here", model=again)

    torch.testing.assert_close(again[0].extra, extra)
    assert torch.equal(again[0].inner.weight, model[0].inner.weight)
    torch.testing.assert_close(load("here")["model"]["0._extra_state"], extra)


@pytest.mark.filterwarnings("ignore:.*quantize:UserWarning")
def test_tensors_that_torch_could_not_read_again_are_pickled_or_refused():
    odd = {
        "quantized": torch.quantize_per_tensor(torch.tensor([0.5]), 0.5, 0, torch.quint8),
        "sparse": torch.eye(3).to_sparse(),
    }
    save("here", odd=odd, alone=odd["sparse"])
    found = load("here")
    assert found["odd"]["quantized"].dequantize() == 0.5
    assert torch.equal(found["odd"]["sparse"].to_dense(), torch.eye(3))
    assert torch.equal(found["alone"].to_dense(), torch.eye(3))

    model = net()
    model.register_buffer("mask", odd["sparse"])
    with pytest.raises(DistributedError, match=r"`model.mask` is a sparse tensor, .* model=model.state_dict\(\)"):
        save("here", model=model)


def test_a_model_without_memory_is_refused_with_what_to_do():
    save("here", model=net())
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    with pytest.raises(DistributedError, match=r"`model.0.weight` .* meta device .* model.to_empty\(device="):
        load("here", model=model)


def test_the_home_folder_may_be_written_as_in_a_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    save("~/deep", epoch=1)
    assert (tmp_path / "home" / "deep").is_dir()
    assert not Path("~").exists()
    assert load("~/deep") == jupyter_distrib.resume("~/deep") == {"epoch": 1}
