"""Switches off the side effects of a cell: experiment trackers, saving, and uploads; and lists its real ones. Process
of a dry run."""

from __future__ import annotations

import importlib
import inspect
import io
import os
import shlex
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from operator import attrgetter
from types import FrameType, ModuleType
from typing import Any

from jupyter_distrib.addresses import line_without_secrets, without_secrets
from jupyter_distrib.libraries.setting import when_imported
from jupyter_distrib.system import file_owner

TRACKERS = (
    "wandb", "mlflow", "comet_ml", "neptune", "aim", "clearml", "tensorboardX", "torch.utils.tensorboard", "trackio",
    "swanlab", "dvclive", "codecarbon",
)  # fmt: skip
_UPLOADS = "create_repo create_commit create_branch create_tag upload_file upload_folder upload_large_folder"
_SAVING: Mapping[str, tuple[str, str]] = {
    "safetensors.torch": ("", "save_file save_model"),
    "huggingface_hub.hf_api": ("", _UPLOADS),
    "transformers.modeling_utils": ("PreTrainedModel", "save_pretrained push_to_hub"),
    "transformers.trainer": ("Trainer", "save_model push_to_hub init_hf_repo create_model_card"),
    "peft.peft_model": ("PeftModel", "save_pretrained push_to_hub"),
    "accelerate.accelerator": ("Accelerator", "save save_model save_state"),
    "lightning.pytorch.trainer.trainer": ("Trainer", "save_checkpoint"),
    "pytorch_lightning.trainer.trainer": ("Trainer", "save_checkpoint"),
}
"""Functions that save or upload, by the module, and the class in it, that has them."""


_MOST_EFFECTS = 10
"""The number of files, and of programs, that are listed."""
_REMOVES = ("os.remove", "os.rmdir", "os.rename", "shutil.rmtree", "shutil.move")
_PYTHON = sysconfig.get_path("stdlib")
_PACKAGES = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), os.path.join(_PYTHON, "site-packages"))
_PROGRAMS = {"subprocess.Popen": 1, "os.system": 0, "os.posix_spawn": 1, "os.exec": 1}
"""The position of the command among the arguments of these audit events of Python."""


class RealEffects:
    """The files and programs of a cell that runs for real until its training has shown its peak.

    Args:
        is_users: Whether a file is the user's.
    """

    def __init__(self, is_users: Callable[[str], bool]) -> None:
        self._is_users = is_users
        self._written: dict[str, None] = {}
        self._removed: dict[str, None] = {}
        self._programs: dict[str, None] = {}

    def listed(self) -> dict[str, list[str]]:
        """Return the first of each kind, by the words that say what the cell did."""
        kinds = {"written": self._written, "removed or renamed": self._removed, "run": self._programs}
        return {kind: list(found)[:_MOST_EFFECTS] for kind, found in kinds.items() if found}

    def on_event(self, event: str, args: tuple[Any, ...]) -> None:
        """Take an audit event of Python (https://docs.python.org/3/library/audit_events.html)."""
        if event == "open":
            if isinstance(args[1], str) and set(args[1]) & set("wax+") and _is_a_users_path(path := str(args[0])):
                self._written[path] = None
        elif event in _REMOVES:
            if self._is_called_by_user():
                self._removed[os.fsdecode(args[0])] = None
        elif event in _PROGRAMS and self._is_called_by_user():
            self._programs[_command_line(args[_PROGRAMS[event]])] = None

    def _is_called_by_user(self) -> bool:
        """Return whether the user's code did this, not a library, by itself or through Python's own modules."""
        frame: FrameType | None = inspect.currentframe()
        while frame is not None and _passes_on(frame.f_code.co_filename):
            frame = frame.f_back
        return frame is not None and self._is_users(frame.f_code.co_filename)


def _passes_on(file: str) -> bool:
    """Return whether a file is Python's own or this package's."""
    is_pythons = file.startswith(_PYTHON) and not file.startswith(_PACKAGES)
    return file.startswith("<frozen ") or is_pythons or file_owner.is_own(file)


def _command_line(command: Any) -> str:
    """Return a command as the report shows it, without secrets, which are not in the cell if they are variables."""
    if isinstance(command, (str, bytes, os.PathLike)):
        return without_secrets(os.fsdecode(command))
    words = [os.fsdecode(word) for word in command]
    if words[1:2] == ["-c"] and words[0].endswith("sh") and len(words) > 2:
        return without_secrets(words[2])
    return line_without_secrets([shlex.quote(word) for word in words])


def _is_a_users_path(path: str) -> bool:
    return not path.startswith(("/dev/", "/proc/")) and "__pycache__" not in path and not path.isdecimal()


class Nothing(ModuleType):
    """A module, and everything in it, that takes any call and does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing(name)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        if len(args) == 1 and callable(args[0]) and not keywords:
            return args[0]  # a decorator
        return Nothing("result")

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None: ...

    def __setitem__(self, key: Any, value: Any) -> None: ...


class _Finder(MetaPathFinder, Loader):
    """Finds modules that do nothing in place of these packages and of the modules in them."""

    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = packages

    def find_spec(self, fullname: str, path: object, target: ModuleType | None = None) -> ModuleSpec | None:
        if any(fullname == each or fullname.startswith(f"{each}.") for each in self._packages):
            return ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Nothing(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


def switch_trackers_off() -> None:
    """Put modules that do nothing in place of experiment trackers that are installed."""
    sys.meta_path.insert(0, _Finder([each for each in TRACKERS if _is_installed(each)]))


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):
        return False


class NotWritten(Exception):
    """The cell reads what it has saved."""


def _key(file: Any) -> Any:
    return os.path.abspath(file) if isinstance(file, (str, os.PathLike)) else id(file)


def switch_saving_off() -> None:
    """Make functions that save do nothing, except refuse the values that a rank refuses."""
    torch: Any = importlib.import_module("torch")
    save, load, saved = torch.save, torch.load, dict[Any, Any]()

    def checked(obj: object, f: Any, *_: Any, **__: Any) -> None:
        save(obj, io.BytesIO())
        saved[_key(f)] = f  # so that no other object gets its identity

    def loaded(f: Any, *args: Any, **keywords: Any) -> Any:
        if _key(f) in saved:
            raise NotWritten(
                "torch.load() reads a file that torch.save() has not written, since a dry run saves nothing"
            )
        return load(f, *args, **keywords)

    torch.save, torch.load = checked, loaded
    checkpoints: Any = importlib.import_module("jupyter_distrib.checkpoints")
    checkpoints.save = _nothing
    for module, (owner, names) in _SAVING.items():
        when_imported(module, "what saves", partial(_leave_out, owner, names))
    # Not only the saving: surplus checkpoints of earlier runs would be removed.
    when_imported("transformers.trainer_callback", "what saves", _never_save)


def _nothing(*_: Any, **__: Any) -> Any:
    return Nothing("result")


def _leave_out(owner: str, names: str, module: Any) -> None:
    holder = attrgetter(owner)(module) if owner else module
    for name in names.split():
        if hasattr(holder, name):
            setattr(holder, name, _nothing)


def _never_save(module: Any) -> None:
    module.TrainerControl.should_save = property(lambda _: False, lambda _, value: None)
