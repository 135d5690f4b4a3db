"""What is known of other libraries, without any of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from jupyter_distrib.libraries import known, library


def made_by(module: str) -> object:
    """An object of a class of a module that is not there."""
    return type("Thing", (), {"__module__": module})()


def test_the_library_of_every_file_is_known() -> None:
    folder = Path(library.__file__).parent
    parts = {
        "__init__",
        "library",
        "known",
        "settings",
        "tracking",
        "mlflow_rank",
        "mlflow_store",
        "setting",
        "torch_objects",
        "numpy_objects",
        "compressed_files",
    }
    parts |= {f"{kind}_settings" for kind in ("display", "logging", "torch", "warning")}
    files = {file.stem for file in folder.glob("*.py")} - parts
    assert files
    assert files - {each.modules[0] for each in known.LIBRARIES} == set()


def test_to_know_libraries_loads_none_of_them() -> None:
    names = {name for each in known.LIBRARIES for name in each.modules} - sys.stdlib_module_names
    code = f"import sys; from jupyter_distrib.libraries import known; print({{*{names}, 'torch'}} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_objects_are_known_by_the_library_of_their_class() -> None:
    assert known.divides_data(made_by("accelerate.data_loader"))
    assert known.divides_data(made_by("pytorch_lightning.overrides"))
    assert not known.divides_data(made_by("accelerated"))
    derived = type("Mine", (type(made_by("streaming.base.dataset")),), {"__module__": "__main__"})()
    assert known.divides_data(derived)
    assert known.wraps_model(made_by("deepspeed.runtime.engine"))
    assert not known.wraps_model(made_by("torch.nn"))


def test_blocks_are_those_that_a_model_declares() -> None:
    assert known.repeated_blocks(SimpleNamespace(_no_split_modules=["Block"])) == {"Block"}
    assert known.repeated_blocks(SimpleNamespace(_no_split_modules=None)) == set()


def test_a_rank_without_an_accelerator_says_so_to_them() -> None:
    assert known.cpu_environment() == {"ACCELERATE_USE_CPU": "true", "DS_ACCELERATOR": "cpu"}


def test_what_is_sent_of_a_library_is_known_once_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "lmdb", raising=False)
    before = known.sent_forms()
    assert known.sent_forms() is before
    module = ModuleType("lmdb")  # another thread imports it
    monkeypatch.setitem(sys.modules, "lmdb", module)
    assert set(known.sent_forms()) == set(before)
    module.Environment = type("Environment", (), {})  # type: ignore[attr-defined]
    assert set(known.sent_forms()) == {*before, module.Environment}
    monkeypatch.setitem(sys.modules, "lmdb", ModuleType("lmdb"))
    assert set(known.sent_forms()) == set(before)
