"""Chooses the GPUs that suit a worker group, whether or not they are free. Pure.

A notebook that names GPUs, by CUDA_VISIBLE_DEVICES or `--gpu-type`, gets those. Else a cell gets GPUs of one type, and
the GPU that drives a display only if that many are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jupyter_distrib.agent.gpus import devices
from jupyter_distrib.agent.gpus.devices import Gpu, Inventory
from jupyter_distrib.agent.gpus.torch_build import TorchBuild
from jupyter_distrib.system import formatting
from jupyter_distrib.wire import messages as m

BUSY_BYTES = 1 << 30
"""Memory used by others, in bytes, above which a GPU counts as busy and is chosen last; the driver itself may use half
of it."""
SLOW_S = 5.0
"""Seconds for which a driver may not answer before anybody hears of it, as long as its GPUs are known."""


class GpusRefused(ValueError):
    """Raised when the requested GPUs can never be had, however long one waits. Its text is a sentence for the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The GPUs that suit a worker group."""

    size: int
    """Number of ranks."""
    least: int = 0
    """Minimum number, if fewer ranks will do; 0: exactly `size`."""
    unit: int = 1
    """Number of which any such number is a multiple."""
    alternatives: tuple[tuple[Gpu, ...], ...] = ()
    """Sets of GPUs, each large enough, the best first; none for CPU ranks."""
    notes: tuple[str, ...] = ()
    """Sentences for the head of the run."""
    visible: bool = False
    """Whether the notebook sees any GPU that its ranks could use."""

    @property
    def asked(self) -> str:
        """The number of ranks, as a user writes it: `2`, `2:8`."""
        return f"{self.least}:{self.size}" if self.least else str(self.size)


def choose(command: m.OpenWorkerGroup, inventory: Inventory, build: TorchBuild) -> Choice:
    """Choose the GPUs for a worker group; none (CPU ranks) if the machine has no GPUs or hides all of them.

    Raises:
        GpusRefused: The notebook has asked for GPUs that do not exist, or cannot be used.
    """
    if problem := problem_of(inventory, build):
        if command.size or command.gpu_type:
            raise GpusRefused(f"{asked(command)}, but {problem}")
        return Choice(size=command.ranks(0), notes=(f"CPU ranks: {problem}",))
    seen = _visible(command, inventory)
    if command.gpu_type:
        seen = _of_type(command.gpu_type, seen)
    if not seen:
        note = f"CPU ranks: {inventory.remark}" if inventory.remark else _hidden_note(command, inventory)
        return Choice(size=command.ranks(0), notes=(note,) if note else ())
    if (least := command.least or command.size) > len(seen):
        raise GpusRefused(_too_few(command, len(seen), inventory))
    lost = (*_silence_notes(inventory), *(f"{_reason(each)}; it is left out." for each in inventory.left_out))
    if command.visible is not None:
        unlike = _order_notes(command.visible, inventory, seen)
        return Choice(
            size=command.ranks(len(seen)),
            alternatives=(tuple(seen),),
            notes=(*lost, *unlike),
            visible=True,
            least=command.least,
            unit=command.unit,
        )
    best = _alike(least, seen)
    size = command.ranks(len(best[0]))
    notes = (*lost, *_choice_notes(least, best, seen))
    return Choice(size=size, alternatives=best, notes=notes, visible=True, least=command.least, unit=command.unit)


def asked(command: m.OpenWorkerGroup) -> str:
    """Return the option by which a cell asks for GPUs, as its user has written it."""
    return f"--gpus {command.size}" if command.size else f"--gpu-type {command.gpu_type}"


def alike(command: m.OpenWorkerGroup, held: Sequence[Gpu], inventory: Inventory) -> list[Gpu]:
    """Return the GPUs visible to the notebook whose types are among those of the GPUs that it holds."""
    names = {gpu.name for gpu in held}
    try:
        return [gpu for gpu in _visible(command, inventory) if gpu.name in names]
    except GpusRefused:
        return []


def loss(gpu: Gpu, inventory: Inventory) -> str:
    """Return why a GPU that was there cannot be used any more; empty if it can, or if nothing is known."""
    if gpu in inventory.gpus or not (inventory.gpus or inventory.left_out):
        return ""
    reasons = [each for each in inventory.left_out if each[0] == str(gpu.index)]
    return _reason(reasons[0] if reasons else (gpu.number, "the driver does not list it any more"))


def outlook(command: m.OpenWorkerGroup, inventory: Inventory | None, build: TorchBuild) -> tuple[bool | None, str]:
    """Return whether the next worker group of this notebook can have GPUs (None if unknown), and why the machine's GPUs
    cannot be used."""
    if inventory is None:
        return None, ""
    if problem := problem_of(inventory, build):
        return False, problem
    try:
        return bool(_visible(command, inventory)), ""
    except GpusRefused:  # said when GPUs are asked for
        return None, ""


def troubles(inventory: Inventory, build: TorchBuild) -> str:
    """Describe problems with this machine's GPUs for the status page; empty if there are none."""
    notes = (*_silence_notes(inventory), *(f"{_reason(each)}." for each in inventory.left_out))
    return problem_of(inventory, build) or inventory.remark or " ".join(notes)


# ---------------------------------------------------------------------------------------------------- what is there


def problem_of(inventory: Inventory, build: TorchBuild) -> str:
    """Return why none of this machine's GPUs can be used, and what to do; empty if there are none, or all is well."""
    if inventory.problem:
        return f"{inventory.problem}: see what nvidia-smi says, or use --ranks N."
    if not inventory.gpus and inventory.silent_s:
        return f"{_silence(inventory)}; use --ranks N meanwhile."
    if not inventory.gpus:
        return " and ".join(map(_reason, inventory.left_out)) + "." if inventory.left_out else ""
    there = devices.types(inventory.gpus)
    if not build.uses(inventory.maker):
        kind = "AMD's GPUs" if build.hip else "Intel's GPUs" if build.xpu else "the CPU"
        return (
            f"the torch of these ranks is built for {kind}, and this machine has {there}: install a torch for CUDA, or "
            "use --ranks N."
        )
    needed = int(build.cuda.partition(".")[0] or 0)
    if inventory.cuda_driver and inventory.cuda_driver // 1000 < needed:
        knows = f"{inventory.cuda_driver // 1000}.{inventory.cuda_driver % 1000 // 10}"
        return (
            f"the GPU driver is too old: it supports CUDA {knows}, and this torch is built for CUDA {build.cuda}; "
            "update the driver, install a torch for an older CUDA, or use --ranks N."
        )
    return ""


def _silence(inventory: Inventory) -> str:
    return (
        f"the GPU driver has not answered for {formatting.duration(inventory.silent_s)}: if nvidia-smi hangs as well, "
        "reset the GPUs or restart the machine"
    )


def _silence_notes(inventory: Inventory) -> tuple[str, ...]:
    """Describe a driver that does not answer any more."""
    if inventory.silent_s < SLOW_S:
        return ()
    return (f"{_silence(inventory)}; its last list of GPUs is used meanwhile.",)


def _reason(left_out: tuple[str, str]) -> str:
    number, why = left_out
    return f"GPU {number} cannot be used ({why})"


def _visible(command: m.OpenWorkerGroup, inventory: Inventory) -> list[Gpu]:
    """Return the GPUs that the notebook's CUDA_VISIBLE_DEVICES lets through."""
    if not inventory.gpus:
        return []
    try:
        return devices.visible(inventory.gpus, command.visible)
    except devices.UnknownDevice as error:
        word = str(error)
    lost = next((_reason(each) for each in inventory.left_out if each[0] == word), "")
    named = f"CUDA_VISIBLE_DEVICES={','.join(command.visible or ())} names {word}"
    if lost:
        raise GpusRefused(f"{named}, but {lost}: leave it out.")
    raise GpusRefused(
        f"{named}, but this machine has {numbers(inventory.gpus)} only ({devices.types(inventory.gpus)}): correct it, "
        "or delete it from os.environ."
    )


def _of_type(wanted: str, seen: Sequence[Gpu]) -> list[Gpu]:
    found = devices.of_type(seen, wanted)
    if not found:
        there = devices.types(seen) or "no GPU at all"
        raise GpusRefused(f"--gpu-type {wanted}, but this machine has {there}; leave it out, or use another pool.")
    return found


def _hidden_note(command: m.OpenWorkerGroup, inventory: Inventory) -> str:
    """Explain why a cell that asks for GPUs sees none of the GPUs of its machine."""
    if command.visible is None or not (command.size and inventory.gpus):
        return ""
    return (
        f"CUDA_VISIBLE_DEVICES={','.join(command.visible)!r} hides {numbers(inventory.gpus)}: change it in the "
        "notebook, or delete it from os.environ."
    )


def _too_few(command: m.OpenWorkerGroup, there: int, inventory: Inventory) -> str:
    left_out = "".join(f" {_reason(each)}." for each in inventory.left_out)
    visible = f"{there} GPU{'s are' if there != 1 else ' is'} visible here"
    change = ""
    if command.visible is not None:
        visible += f" (CUDA_VISIBLE_DEVICES={','.join(command.visible)})"
        change = ", or change the variable in the notebook"
    return f"--gpus {command.least or command.size} but {visible}; ask for at most that many{change}.{left_out}"


# ---------------------------------------------------------------------------------------------------- which are better


def _alike(size: int, seen: Sequence[Gpu]) -> tuple[tuple[Gpu, ...], ...]:
    """Return groups of GPUs of the same type, most common first; all GPUs together if no type has enough.

    Args:
        size: Number of GPUs asked for; 0: all of the commonest type, without one that drives a display if there are
            others.
        seen: All GPUs that the notebook sees.
    """
    by_type: dict[str, list[Gpu]] = {}
    for gpu in seen:
        by_type.setdefault(gpu.name, []).append(gpu)
    sets = sorted(by_type.values(), key=lambda each: (-len(each), -(each[0].memory_bytes or 0)))
    if not size:
        return (tuple([gpu for gpu in sets[0] if not gpu.display] or sets[0]),)
    return tuple(tuple(each) for each in sets if len(each) >= size) or (tuple(seen),)


def by_preference(gpus: Sequence[Gpu]) -> list[Gpu]:
    """Sort GPUs by how much memory is in use, GPUs that drive a display last."""
    return sorted(gpus, key=lambda gpu: (gpu.display, (gpu.used_bytes or 0) // BUSY_BYTES))


def _choice_notes(size: int, best: Sequence[Sequence[Gpu]], seen: Sequence[Gpu]) -> tuple[str, ...]:
    """Describe which GPUs the default leaves out, and how the chosen ones differ."""
    notes = []
    taken, kinds = best[0], devices.types(seen)
    names = {gpu.name for gpu in taken}
    if len(names) > 1:
        notes.append(f"no {size} of these GPUs are alike ({kinds}); --gpu-type selects those of one type.")
    elif any(gpu.name not in names for gpu in seen):
        notes.append(f"of {kinds}, these ranks use {taken[0].name}; --gpu-type selects another one.")
    displays = [gpu for gpu in seen if gpu.name in names and gpu not in taken]
    if displays:
        notes.append(f"{numbers(displays)} drives a display and is left out; --gpus {len(taken) + 1} takes it, too.")
    return tuple(notes)


def _order_notes(chosen: Sequence[str], inventory: Inventory, seen: Sequence[Gpu]) -> tuple[str, ...]:
    """Explain which GPUs the numbers refer to where CUDA may number them differently: it starts with the fastest
    GPU."""
    unlike = len({gpu.name for gpu in inventory.gpus}) > 1
    if not unlike or not any(word.strip().isdecimal() for word in chosen):
        return ()
    named = ", ".join(f"{gpu.number} is the {gpu.name}" for gpu in seen)
    return (f"CUDA_VISIBLE_DEVICES={','.join(chosen)} is read in nvidia-smi's numbering: {named}.",)


def numbers(gpus: Sequence[Gpu]) -> str:
    """Name GPUs by their numbers: `GPUs 0-2`, `GPU 0:1`."""
    if all(gpu.slice is None for gpu in gpus):
        return formatting.numbered("GPU", (gpu.index for gpu in gpus))
    return f"GPU{'s' * (len(gpus) > 1)} {', '.join(gpu.number for gpu in gpus)}"
