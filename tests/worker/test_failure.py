"""What is said beside an exception."""

from __future__ import annotations

import errno
import io
import multiprocessing.synchronize
import os
import pickle
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed import distributed_c10d

from jupyter_distrib.interfaces import identity
from jupyter_distrib.interfaces.strategy import Strategy, TrainingStrategy
from jupyter_distrib.worker import failure


@pytest.mark.parametrize(
    "text",
    [
        "Distributed package doesn't have NCCL built in",
        "ProcessGroupNCCL is only supported with GPUs, no GPUs found!",
    ],
)
def test_nccl_on_cpu_ranks_is_answered_by_gloo(text: str) -> None:
    described = failure.describe(RuntimeError(text), run="r", by_value=False)

    assert described.notes == (failure._NO_NCCL,)
    assert "ask init_process_group for gloo" in failure._NO_NCCL


@pytest.mark.parametrize("how", ["pickle", "empty", "torch"])
def test_a_file_that_ends_too_early_may_be_one_that_another_rank_writes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: str
) -> None:
    whole = io.BytesIO()
    torch.save(torch.zeros(100_000), whole)
    content = {"pickle": pickle.dumps(list(range(1000)))[:-100], "empty": b"", "torch": whole.getvalue()[:200_000]}[how]
    (tmp_path / "model").write_bytes(content)
    with pytest.raises((EOFError, RuntimeError, pickle.UnpicklingError)) as caught:
        torch.load(tmp_path / "model") if how == "torch" else pickle.loads(content)

    monkeypatch.setattr(identity, "world_size", lambda: 2)
    (note,) = failure.describe(caught.value, run="r", by_value=False).notes
    assert "Give torch.save the path instead of the file, or write it on one rank" in note
    monkeypatch.setattr(identity, "world_size", lambda: 1)
    assert failure.describe(caught.value, run="r", by_value=False).notes == ()


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_lock_that_cannot_be_made_is_explained(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(multiprocessing.synchronize._multiprocessing, "SemLock", refuse)
    with pytest.raises(OSError, match=r"Read-only|Permission") as caught:
        multiprocessing.Lock()

    (note,) = failure.describe(caught.value, run="r", by_value=False).notes
    assert "mount it writable for everybody, or use no processes: DataLoader(num_workers=0)." in note
    assert failure.describe(OSError(number, "of another file"), run="r", by_value=False).notes == ()


def test_too_many_processes_or_threads_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(subprocess, "_fork_exec", refuse)
    with pytest.raises(BlockingIOError) as caught:
        subprocess.run(["true"], check=True)
    gloo = RuntimeError(os.strerror(errno.EAGAIN))
    for error in (caught.value, gloo, RuntimeError("can't start new thread")):
        (note,) = failure.describe(error, run="r", by_value=False).notes
        assert "raise the limit, or use fewer ranks or loader workers." in note
    empty = BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    assert failure.describe(empty, run="r", by_value=False).notes == ()


def test_an_object_of_another_rank_that_ends_too_early_is_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "world_size", lambda: 2)
    with pytest.raises(EOFError) as caught:
        distributed_c10d._tensor_to_object(torch.zeros(0, dtype=torch.uint8), 0, None)

    assert failure.describe(caught.value, run="r", by_value=False).notes == ()


@pytest.mark.parametrize(
    "text",
    ["module 'torch._C' has no attribute '_cuda_setDevice'", "Torch not compiled with CUDA enabled"],
)
def test_a_cuda_device_on_cpu_ranks_is_answered_by_the_device_to_take(text: str) -> None:
    (note,) = failure.describe(AssertionError(text), run="r", by_value=False).notes

    assert note.startswith("These ranks have no GPU: use torch.device(")


def test_a_relative_import_without_a_package_is_answered_by_the_way_to_run_a_module() -> None:
    with pytest.raises(ImportError) as caught:
        exec("from . import helpers", {"__name__": "__main__", "__package__": ""})
    (note,) = failure.describe(caught.value, run="r", by_value=False).notes

    assert "%distributed_run -m package.module" in note


def test_an_interface_that_does_not_exist_is_named_beside_those_that_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth77")
    text = "[enforce fail at device.cc:84] ifa != nullptr. Unable to find address for: eth77"
    [note] = failure.describe(RuntimeError(text), run="r", by_value=False).notes
    assert note.startswith("GLOO_SOCKET_IFNAME is eth77; this node has ")
    assert "lo (127.0.0.1)" in note


def test_another_error_has_no_hint() -> None:
    assert failure.describe(RuntimeError("NCCL is fine"), run="r", by_value=False).notes == ()


FULL = (
    "NCCL error in: NCCLUtils.cpp:93, unhandled system error, NCCL version 2.28.9\nncclSystemError: System call (e.g. "
    "socket, malloc) or external library call failed or device error.\nLast error:\n"
)


@pytest.mark.parametrize(
    "text",
    [
        FULL + "Error while creating shared memory segment /dev/shm/nccl-WU88OE (size 9637888)",
        FULL + "Error: failed to extend /dev/shm/nccl-WU88OE to 9637892 bytes, error: No space left on device (28)",
    ],
)
def test_a_full_dev_shm_is_named_instead_of_the_network(text: str) -> None:
    (note,) = failure.describe(RuntimeError(text), run="r", by_value=False).notes
    assert note.startswith("/dev/shm has ")
    assert "--shm-size" in note
    assert "NCCL_SHM_DISABLE=1" in note


@pytest.mark.parametrize(
    "text",
    [
        "unable to write to file </torch_12_34_0>: No space left on device (28)",
        "unable to allocate shared memory(shm) for file </torch_12_34_0>: No space left on device (28)",
        "DataLoader worker (pid 12) is killed by signal: Bus error. It is possible that its workers are out of memory.",
    ],
)
def test_loaders_that_fill_dev_shm_are_answered_by_its_size(text: str) -> None:
    (note,) = failure.describe(RuntimeError(text), run="r", by_value=False).notes
    assert note.startswith("/dev/shm has ")
    assert "NCCL" not in note


def test_a_gpu_that_is_full_is_called_so_where_the_driver_tells_nothing() -> None:
    text = (
        'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "/pytorch/c10/cuda/CUDACachingAllocator.cpp":1154, please report a '
        "bug to PyTorch."
    )
    (note,) = failure.describe(RuntimeError(text), run="r", by_value=False).notes
    assert note.startswith("The GPU is out of memory")


def attribute_error(of: object, name: str) -> AttributeError:
    with pytest.raises(AttributeError) as caught:
        getattr(of, name)
    return caught.value


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("module", "leave out `.module`"),
        ("no_sync", "leave it out"),
        ("clip_grad_norm_", "torch.nn.utils.clip_grad_norm_(model.parameters()"),
        ("backward", "loss.backward()"),
        ("step", "optimizer.step()"),
        ("register_comm_hook", "wrap the model in the cell yourself"),
    ],
)
def test_what_wrapped_models_have_is_answered_by_what_to_write(
    monkeypatch: pytest.MonkeyPatch, name: str, instead: str
) -> None:
    monkeypatch.setattr(identity.cell, "strategy", TrainingStrategy())
    (note,) = failure.describe(attribute_error(nn.Linear(1, 1), name), run="r", by_value=False).notes
    assert instead in note
    assert f"`{name}`" in note


@pytest.mark.parametrize(("of", "name"), [(nn.Linear(1, 1), "modules_"), (object(), "module"), (nn, "module")])
def test_other_attributes_have_no_hint(monkeypatch: pytest.MonkeyPatch, of: object, name: str) -> None:
    monkeypatch.setattr(identity.cell, "strategy", TrainingStrategy())
    assert failure.describe(attribute_error(of, name), run="r", by_value=False).notes == ()


def test_without_a_strategy_for_training_a_model_has_no_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity.cell, "strategy", Strategy())
    assert failure.describe(attribute_error(nn.Linear(1, 1), "module"), run="r", by_value=False).notes == ()


def test_only_the_frames_that_are_sent_are_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell may set a limit of a million frames before it recurses too deeply."""
    looked_up = []
    monkeypatch.setattr(failure.linecache, "getline", lambda name, line: looked_up.append(line) or "")
    error: Exception | None = None
    try:
        _dig(300)
    except ValueError as raised:
        error = raised
    assert error is not None
    frames = failure.describe(error, run="", by_value=False).frames
    assert len(frames) == len(looked_up) == 60
    assert (frames[0].function, frames[-1].function) == (
        test_only_the_frames_that_are_sent_are_looked_up.__name__,
        "_dig",
    )


def _dig(depth: int) -> None:
    if not depth:
        raise ValueError
    _dig(depth - 1)


class Errors(Exception):
    def __len__(self) -> int:
        return 0


def test_a_cause_that_is_false_is_one() -> None:
    error = ValueError()
    error.__cause__ = Errors("first")
    told = failure.describe(error, run="", by_value=False)
    assert told.cause is not None
    assert (told.cause.message, told.during) == ("first", False)


class Silent:
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("notes", "told"), [([Silent(), "n"], ("<str() of the note failed with RuntimeError>", "n")), (5, ("5",))]
)
def test_notes_that_are_no_texts_do_not_hide_the_exception(notes: object, told: tuple[str, ...]) -> None:
    error = ValueError("v")
    error.__notes__ = notes  # type: ignore[assignment]
    described = failure.describe(error, run="", by_value=False)
    assert (described.message, described.notes) == ("v", told)
