"""The parts of messages that several conversations share."""

from __future__ import annotations

from dataclasses import field, fields
from typing import TYPE_CHECKING, Any, TypeVar, dataclass_transform

from jupyter_distrib.system.data_class import data_class

T = TypeVar("T")
CLASSES: dict[str, type] = {}
"""The classes of this folder that are loaded, by their names."""
MESSAGES: set[type] = set()
"""The classes that a link carries; the others are parts of them."""
FIELDS: dict[type, tuple[tuple[str, object], ...]] = {}
"""The names and defaults of each class's fields."""


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
def part(cls: type[T]) -> type[T]:
    """Make a data class that can be a part of messages."""
    made = data_class(cls)
    CLASSES[made.__name__] = made
    FIELDS[made] = tuple((each.name, each.default) for each in fields(made))  # type: ignore[arg-type]
    return made


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
def message(cls: type[T]) -> type[T]:
    """Make a data class that a link carries."""
    made = part(cls)
    MESSAGES.add(made)
    return made


def fields_of(one: Any) -> dict[str, Any]:
    """Return the fields of a message, or of another dataclass with slots, by name; their values are not converted."""
    return {name: getattr(one, name) for name in one.__slots__}


class Command:
    """Message from a kernel or coordinator to an agent, or from an agent to a rank."""

    __slots__ = ()


class Event:
    """Message in the other direction."""

    __slots__ = ()


class RunEvent(Event):
    """Event that a `RunRecord` folds."""

    __slots__ = ()
    if TYPE_CHECKING:
        run: str
        at_s: float


class RelayMessage:
    """Message on the pipe between a coordinator and the relay of a node."""

    __slots__ = ()


Message = Command | Event | RelayMessage
"""Message that a link carries."""


@part
class Parcel:
    """Pickled bytes and the place of their out-of-band buffers (pickle protocol 5)."""

    data: bytes
    """Pickle stream; empty if it is so long that it was made the first buffer."""
    sizes: tuple[int, ...] = ()
    """Length of each buffer in bytes, in pickle order."""
    inline: tuple[bytes, ...] = ()
    """The buffers themselves when they are small; else empty, and the frame carries one file descriptor of shared
    memory in which they lie one after another, each at the next multiple of `payload.ALIGNMENT`."""
    segments: tuple[str, ...] = ()
    """The ids of the segments of shared memory that hold the buffers, one for each descriptor; empty if there is at
    most one, without an id."""
    places: tuple[tuple[int, int], ...] = ()
    """If there are segments: for each buffer the number of its segment, and its offset there."""
    kept: tuple[str, ...] = ()
    """The ids of the segments that the kernel may use again: nodes hold these, and no others."""
    cache_bytes: int | None = None
    """Maximum number of bytes of segments that a node may hold; None for the node's own limit."""

    @property
    def memories(self) -> int:
        """The number of descriptors of shared memory, if there are any."""
        return len(self.segments) or 1


@part
class Frame:
    """One line of a traceback, outermost first; only frames of the user's code and of libraries they called."""

    filename: str
    line: int
    function: str
    text: str = ""
    """The source line, stripped, where the rank could read it; the kernel prefers its own copy."""
    first_column: int = -1
    last_column: int = -1
    """Last column of the failing expression in that line, counted from 0; -1 if unknown."""


@part
class Failure:
    """An exception on one rank, as data: readable whatever happens to the object itself."""

    type_name: str
    """Qualified name, without the module for builtins and `__main__`: `KeyError`, `torch.OutOfMemoryError`."""
    message: str
    """Text of `str(exception)`, or a sentence that says that `str` failed."""
    frames: tuple[Frame, ...] = ()
    notes: tuple[str, ...] = ()
    parcel: Parcel | None = None
    """The exception object, for the kernel to raise as its own type; None if it cannot be pickled."""
    cause: Failure | None = None
    """The failure that it was raised from (`__cause__`, or `__context__` unless suppressed)."""
    during: bool = False
    """Whether `cause` is only the `__context__`: this exception was raised while `cause` was being handled."""
    code: int | None = None
    """The requested exit status of a `SystemExit`."""


@part
class Cell:
    """The program that every rank executes."""

    source: str
    """Python source, IPython syntax already translated, padded with empty lines so that its line numbers are those of
    the front end (the magic line is line 1)."""
    filename: str
    """The cell's name in tracebacks: `Cell In[5]`."""
    shown: str = ""
    """The line that tracebacks and warnings show for the call of a function: `train(0.1)`; empty for other cells."""
    absent: dict[str, str] = field(default_factory=dict)
    """Names that the notebook has or had but the ranks lack, each with a sentence on why, which a `NameError`
    quotes."""
    sources: dict[str, str] = field(default_factory=dict)
    """Sources of the notebook's cells that define functions sent to the ranks, by the file name in their code."""
    future_annotations: bool = False
    """Whether the cell is compiled as below `from __future__ import annotations`, which an earlier cell holds."""
    timed: bool = False
    """Whether each rank prints the time that the cell took (`%%time`)."""
    script: str = ""
    """The script's path, as typed; its folder is then the first in `Setting.path`. Empty for a cell."""
    arguments: tuple[str, ...] = ()
    """The arguments of the script."""


@part
class Setup:
    """A cell that every rank runs once before its first cell (`%%distributed_setup`)."""

    name: str
    digest: str
    """Digest of its source and inputs: a rank that has run a different set-up under this name runs this one anew.
    The digest identifies its functions and classes in the kernel and on the ranks."""
    cell: Cell
    inputs: Parcel
    defines: tuple[str, ...] = ()
    """The names that it binds."""


@part
class Setting:
    """The environment that a rank takes over before it executes a cell."""

    env: dict[str, str] = field(default_factory=dict)
    """The kernel's whole environment plus `--env`; the rank's own variables (RANK, ...) are added by the worker."""
    directory: str = ""
    path: tuple[str, ...] = ()
    """The kernel's `sys.path`, notebook folder first."""
    argv: tuple[str, ...] = ()
    """`sys.argv` of the user's program, or as the notebook has set it; empty for that of a cell."""
    package: str = ""
    """The package of the user's program, for its relative imports; empty for none."""
    umask: int | None = None
    """The kernel's umask, for files written by the cell; None: the agent's, which keeps them private."""
    own_libraries: bool = False
    """Whether the ranks run under another interpreter than the kernel: its own library folders follow `path`."""
    own_environment: bool = False
    """Whether the ranks run on another machine: `env` goes on top of that machine's own environment."""
    strategy: str = "none"
    strategy_options: dict[str, str] = field(default_factory=dict)
    libraries: dict[str, object] = field(default_factory=dict)
    """Library settings changed by the notebook; see `libraries/settings.py`."""
    numa_binding: str = ""
    """The way in which ranks are bound to the processors near their GPUs; empty for none."""
    keep: tuple[str, ...] = ()
    """Names in the cell's namespace that are kept on the rank."""
    by_value: bool = False
    """Whether values must be readable by another kernel, as in detached runs, so that nothing is returned by
    reference."""


@part
class Package:
    """A distribution of the notebook's environment."""

    name: str
    version: str
    requirement: str = ""
    """Line for an installer: `numpy==2.1.0`, or an address; empty if `wheel` is to be installed."""
    file: str = ""
    """The name of `wheel`."""
    wheel: bytes = b""
    """The distribution itself, if no index has it because it was installed from a file or folder on the notebook's
    machine."""


@part
class Packages:
    """The notebook's packages, and the policy for those missing on the ranks."""

    mode: str
    """`check`: the ranks are refused; `sync`: they are installed, beside that Python."""
    packages: tuple[Package, ...]
    limit_bytes: int = 0
    """Maximum number of bytes that may be installed."""


@part
class WorkerInfo:
    """One rank of a worker group, as the agent describes it."""

    rank: int
    pid: int
    device: str
    """The device: `cpu`, `cuda:0` (as the rank itself names it) or `mps`."""
    device_name: str = ""
    """The device's full name: `NVIDIA H200 (GPU 3)`; empty for CPU ranks."""
    state: str = "idle"
    """The state: `starting`, `idle`, `running` or `gone`."""
    rss_bytes: int = 0
    node: str = ""
    """Machine of the rank, by the name or address that its pool uses; empty if there is only one."""


@part
class RankPlace:
    """The place of one rank during a stall."""

    rank: int
    where: str
    """Activity of the rank, in a few words: `waits in all_reduce #2`, `runs load()`, `is stopped (SIGSTOP)`."""
    line: int | None
    """Line of the cell; None if it is unknown, or the rank is in no line of the cell."""
    waiting: bool
    """Whether it is waiting for other ranks, and so is not the cause."""


@part
class PhaseTimes:
    """The time that a rank has spent in each phase of its training loop."""

    steps: int
    """Number of optimizer steps."""
    seconds: dict[str, float]
    """Seconds by phase: `data`, `forward`, `backward`, `collective`, `optimizer`, `other`."""


@part
class GroupSighting:
    """The progress of one rank in one process group, by torch's flight recorder."""

    name: str
    ranks: tuple[int, ...]
    """The group's members, as ranks of the world group."""
    entered: int
    """Number of the group's last collective called by the rank, counted from 1 in each run."""
    number: int = 0
    """Number of the first collective that this rank has not finished; 0: none."""
    op: str = ""
    """The kind of that collective: `all_reduce`."""
    tensors: str = ""
    """Shapes and types of the tensors given to it: `[4] Float`."""
    spins: bool = False
    """Whether a thread that waits for the collective keeps its core busy (NCCL)."""
