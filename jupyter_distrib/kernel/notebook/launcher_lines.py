"""The line of `%distributed_run` for a launcher's line, which users paste from a shell:

    torchrun --standalone --nproc-per-node 4 train.py --lr 1   ->   --gpus 4 train.py --lr 1
    CUDA_LAUNCH_BLOCKING=1 python -u -m package.train          ->   --env CUDA_LAUNCH_BLOCKING=1 -m package.train

Pure; in the thread that executes the cell."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence

from jupyter_distrib.system import gpu_devices

_LAUNCHERS = frozenset(
    {
        "torchrun",
        "accelerate",
        "deepspeed",
        "horovodrun",
        "mpirun",
        "mpiexec",
        "srun",
        "composer",
        "fabric",
        "colossalai",
        "nohup",
        "time",
    }
)
_PYTHON = re.compile(r"(?:python|pypy)[\d.]*|py|uv|poetry|ipython[\d.]*")
_RUNNERS = re.compile(r"torch\.distributed\.(?:run|launch|launcher)|accelerate\.commands\.\w+|deepspeed\.launcher\.\w+")
_VARIABLE = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_COUNT = re.compile(r"--(?:nproc[-_]per[-_]node|num[-_]processes|num[-_]proc|num[-_]gpus|ntasks)|-np?")
_OF_ACCELERATE = re.compile(r"--(mixed[-_]precision|gradient[-_]accumulation[-_]steps|dynamo[-_]backend)")
"""The options of `accelerate launch` that change the training; `Accelerator` reads them from variables."""
_RESTARTS = re.compile(r"--max[-_]restarts")


def replacement(path: str, arguments: Sequence[str], options: str = "") -> str:
    """Return what to write in place of a launcher's line; empty if the path is not a launcher.

    Args:
        path: The word at the place of the script.
        arguments: The words behind it.
        options: The options before it.
    """
    words = [path.lstrip("!"), *arguments]
    words = [word for word in words if word]
    variables = []
    while words and _VARIABLE.fullmatch(words[0]):
        variables.append(words.pop(0))
    if words[:1] == ["env"] and variables == []:
        return replacement(words[1], words[2:], options) if len(words) > 1 else ""
    name = os.path.basename(words[0]) if words else ""
    if name not in _LAUNCHERS and not _PYTHON.fullmatch(name):
        return ""
    before, script = _split(words[1:])
    if not script:
        return f"{name} is not needed here, since the ranks are started for the script: write its path alone"
    if any("accelerate" in word for word in words[: -len(script)]):
        variables += _variables_of_accelerate(before)
    given = "" if options else _size(before)
    line = [*(f"--env {shlex.quote(each)}" for each in variables), options or given, shlex.join(script)]
    return f"{name} is not needed here, since the ranks are started for the script: write {{command}} " + " ".join(
        filter(None, line)
    )


def _split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the launcher's own words, and those from the script or its `-m` on; a launcher may start another one."""
    for place, word in enumerate(words):
        if word in ("-m", "--module") and place + 1 < len(words):
            rest = list(words[place + 1 :])
            if _RUNNERS.fullmatch(rest[0]):
                before, script = _split(rest[1:])
                return [*words[:place], *before], script
            if script := _module(rest):
                return list(words[:place]), script
        if word.endswith(".py"):
            return list(words[:place]), list(words[place:])
    return list(words), []


def _module(rest: Sequence[str]) -> list[str]:
    """Return `-m`, the module and its arguments, where options of the launcher may stand in between."""
    for place, word in enumerate(rest):
        if re.fullmatch(r"[A-Za-z_]\w*(?:\.\w+)*", word) and not word.endswith(".py"):
            return ["-m", *rest[place:]]
        if word.endswith(".py"):
            return []
    return []


def _variables_of_accelerate(words: Sequence[str]) -> list[str]:
    """Return the variables that `accelerate launch` sets for these options."""
    found = []
    for flag, value in _options(words):
        if (match := _OF_ACCELERATE.fullmatch(flag)) is not None and value:
            found.append(f"ACCELERATE_{match[1].replace('-', '_').upper()}={value}")
    return found


def _options(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each word as an option, with the value behind `=` or in the next word."""
    for place, word in enumerate(words):
        flag, equals, value = word.partition("=")
        yield flag, value if equals else "".join(words[place + 1 : place + 2])


def _size(words: Sequence[str]) -> str:
    """Return the options for the number of processes and of restarts that a launcher was given."""
    found = []
    for flag, value in _options(words):
        if _COUNT.fullmatch(flag) and value.isdecimal():
            found.append(f"--{'gpus' if gpu_devices.may_exist() else 'ranks'} {value}")
        if _RESTARTS.fullmatch(flag) and value.isdecimal() and int(value):
            found.append(f"--max-restarts {value}")
    return " ".join(found)
