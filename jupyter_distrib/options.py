"""The parser of a magic's line by declared options. Standard library only, no state.

    --rank 3 run-7   --parse_arguments-->   Arguments(values={"rank": 3}, positionals=("run-7",))

Runs in the kernel and wherever a strategy or pool declares its options. Every error is one sentence that says what to
do; `kernel/settings/cell_options.py` reads keywords with the same functions, so that a line and a call get the same
errors."""

from __future__ import annotations

import difflib
import json
import keyword
import math
import os
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from jupyter_distrib.errors import OptionsError
from jupyter_distrib.system import process_environment
from jupyter_distrib.system.data_class import data_class

MOST_CHARS = 4096
"""Maximum number of characters of a name, an address or a command."""
_MOST = 1e9
"""Maximum of a number of seconds, or of something counted."""
_MOST_BYTES = 10**18
HIGHEST_RANK = 65_535
"""Highest rank allowed: `--on 0-999999999` is a typing error, and would be a tuple of some gigabytes."""

_WORD = re.compile(r"""(?:[^\s"'\\]|\\.|"(?:\\.|[^"\\])*"|'[^']*')+(?=\s|\Z)""", re.DOTALL)


# ------------------------------------------------------------------------------------------------ readers of a value
# Each takes the option in the user's spelling (`--gpus` or `gpus`) and the given text, which is never blank.


def count(name: str, text: str) -> int:
    return _whole(name, text, 1, "a whole number, at least 1")


class NumberRange(int):
    """The numbers from `least` to the number itself in equal steps, as in `2:8:2`."""

    least: int
    step: int

    def __new__(cls, most: int, least: int, step: int = 1) -> NumberRange:
        made = super().__new__(cls, most)
        made.least, made.step = least, step
        return made

    def __reduce__(self) -> tuple[type[NumberRange], tuple[int, int, int]]:
        return NumberRange, (int(self), self.least, self.step)

    def __repr__(self) -> str:
        return f"{self.least}:{int(self)}" + (f":{self.step}" if self.step > 1 else "")

    __str__ = __repr__


def count_or_range(name: str, text: str) -> int:
    """Return a number, or a `NumberRange` for a text such as `2:8`, or `2:8:2` for even numbers only."""
    if ":" not in text:
        return count(name, text)
    match = re.fullmatch(r"\s*([0-9]{1,9}):([0-9]{1,9})(?::([0-9]{1,9}))?\s*", text)
    least, most, step = (int(part or 1) for part in match.groups()) if match else (0, 0, 0)
    if not (least and step):
        raise OptionsError(f"{name} must be a whole number, at least 1, or a range such as 2:8; got {shown(text)}")
    if most < least:
        raise OptionsError(f"{name} has the range {text.strip()} backwards: write {most}:{least}")
    if least % step or most % step:
        raise OptionsError(f"{name} has steps of {step}, so {least} and {most} must be multiples of {step}")
    return NumberRange(most, least, step) if least < most else most


def rank(name: str, text: str) -> int:
    return _whole(name, text, 0, "a rank, counted from 0")


def _whole(name: str, text: str, least: int, wanted: str) -> int:
    if not re.fullmatch(r"\s*[0-9]{1,9}\s*", text) or int(text) < least:
        raise OptionsError(f"{name} must be {wanted}; got {shown(text)}")
    return int(text)


def seconds(name: str, text: str) -> float:
    return _number(name, text, "a number of seconds above 0")


def _number(name: str, text: str, wanted: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise OptionsError(f"{name} must be {wanted}; got {shown(text)}")
    if number > _MOST:
        raise OptionsError(f"{name} must be at most {_MOST:.0f}; got {shown(text)}")
    return number


def at_least_zero(name: str, text: str) -> float:
    return 0.0 if text.strip() in ("0", "0.0") else _number(name, text, "a number, at least 0")


_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def size_bytes(name: str, text: str) -> int:
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", text)
    size = float(match[1]) * _UNITS.get(match[2].lower(), 0) if match else 0.0
    if not 0.5 < size <= _MOST_BYTES:
        raise OptionsError(f"{name} must be a size such as 500MB or 1GB; got {shown(text)}")
    return round(size)


def size_or_none(name: str, text: str) -> int:
    """Read a size, which may be 0."""
    return 0 if text.strip() == "0" else size_bytes(name, text)


_DURATION = re.compile(r"(?:(\d{1,4})d)?(?:(\d{1,6})h)?(?:(\d{1,6})m)?(?:(\d{1,9})s)?")
_UNITS_S = (86_400, 3_600, 60, 1)
_LONGEST_S = 10 * 366 * 86_400


def duration(name: str, text: str) -> str:
    """Return the text if it is a duration: `90m`, `2h` or `1d12h`."""
    if not 0 < duration_s(text) <= _LONGEST_S:
        raise OptionsError(f"{name} must be a duration such as 90m, 2h or 1d12h; got {shown(text)}")
    return text


def duration_s(text: str) -> int:
    """Return the seconds of a duration; 0 if the text is not one."""
    match = _DURATION.fullmatch(text)
    parts = match.groups("0") if match else ()
    return sum(int(part) * unit for part, unit in zip(parts, _UNITS_S, strict=False))


def json_object(name: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise OptionsError(f"{name} must be a JSON object, such as {{}}; got {shown(text)}")
    return value


def string(name: str, text: str) -> str:
    return text


def one_line(name: str, text: str) -> str:
    """Read a text of one line."""
    if not text.isprintable() or len(text) > MOST_CHARS:
        raise OptionsError(f"{name} must be one line of at most {MOST_CHARS} characters; got {shown(text)}")
    return text


def not_an_option(name: str, text: str) -> str:
    """Read a text of one line that no program takes for an option of its own: a name, an address or a command."""
    if text.lstrip().startswith("-"):
        raise OptionsError(f"{name} must not begin with -; got {shown(text)}")
    return one_line(name, text)


def switch(name: str, text: str) -> bool:
    return True


def names(name: str, text: str) -> tuple[str, ...]:
    parts = tuple(part.strip() for part in text.split(","))
    if not all(part.isidentifier() for part in parts):
        raise OptionsError(f"{name} must be names of variables, joined by commas without spaces; got {shown(text)}")
    for part in parts:
        if keyword.iskeyword(part):
            raise OptionsError(f"{name} must be names of variables; {part!r} is a keyword of Python")
    return tuple(dict.fromkeys(parts))


def one_name(name: str, text: str) -> str:
    if not text.strip().isidentifier():
        raise OptionsError(f"{name} must be the name of one variable; got {shown(text)}")
    return names(name, text)[0]


def rank_list(name: str, text: str) -> tuple[int, ...]:
    """Return the sorted ranks of a text such as `0,2-3`."""
    chosen: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,9})(?:-([0-9]{1,9}))?\s*", part)
        if not match:
            raise OptionsError(f"{name} must be ranks such as 0,2-3; got {shown(text)}")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise OptionsError(f"{name} has the range {part.strip()} backwards: write {last}-{first}")
        if last > HIGHEST_RANK:
            raise OptionsError(f"{name} names rank {last}; no rank is above {HIGHEST_RANK}")
        if twice := chosen.intersection(range(first, last + 1)):
            raise OptionsError(f"{name} names rank {min(twice)} twice: name it once")
        chosen.update(range(first, last + 1))
    return tuple(sorted(chosen))


def variable(name: str, text: str) -> dict[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip() or "\0" in text:
        raise OptionsError(f"{name} must be K=V, the name of a variable and its value; got {shown(text)}")
    # An equal value comes from `env=dict(os.environ)`.
    if key in process_environment.SET_ON_RANKS and os.environ.get(key) != value:
        how = f"choose GPUs with %env {key}=... in the notebook" if key == "CUDA_VISIBLE_DEVICES" else "leave it out"
        raise OptionsError(f"{name} cannot set {key}, which jupyter_distrib sets on each rank: {how}")
    return {key: value}


def expression(name: str, text: str) -> dict[str, str]:
    key, equals, value = (part.strip() for part in text.partition("="))
    if not (equals and key.isidentifier() and value) or keyword.iskeyword(key):
        raise OptionsError(f"{name} must be NAME=VALUES, such as lr=[1e-3,1e-2]; got {shown(text)}")
    try:
        compile(value, "--sweep", "eval")
    except SyntaxError:
        raise OptionsError(f"{name} must have a list after {key}=, such as [1e-3,1e-2]; got {shown(value)}") from None
    return {key: value}


def shown(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")


# ------------------------------------------------------------------------------------------------ declarations


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option, given by a flag on a line or by a keyword in a call."""

    flag: str
    """The flag: `--fsdp-unit`."""
    meaning: str
    metavar: str = ""
    """The name of the value in the help; empty for a switch, which takes none."""
    bare: str = ""
    """The value of the bare flag, for an option whose number or choice may be left out."""
    default: str = ""
    """A phrase on the effect of leaving the option out."""
    read: Callable[[str, str], Any] = string
    """The reader, which makes the value from the option in the user's spelling and the given text. It only checks
    the value of a strategy's or pool's own option, which is passed on as text; a switch as an empty text."""
    choices: tuple[str, ...] = ()
    """The only texts allowed, if any."""
    repeatable: bool = False
    """Whether it may be given again, which adds to the earlier values. Not for the options of strategies and pools."""
    keyword: str = ""
    """The keyword, if it differs from the flag. Not for the options of strategies and pools."""
    unasked: bool = False
    """Whether the settings file of a project may set it for a pool before the user has trusted that file: it names
    no program, machine, server or file, and uses no resources that others share."""
    main: bool = False
    """Whether most people who define such a pool set it, so that forms show it before the others."""
    synonyms: tuple[str, ...] = ()
    """The names of the option in other launchers, for which this option is suggested."""

    @property
    def name(self) -> str:
        """The keyword, which is also the key in `strategy_options` or `pool_options`: `fsdp_unit`."""
        return self.keyword or self.flag.lstrip("-").replace("-", "_")


Declared: TypeAlias = Mapping[str, tuple[Option, ...]]
"""The options that each strategy, or each kind of pool, declares itself, by its name."""


class DeclaredOnDemand(Declared):
    """Declared options that are read at the first use of a name: few cells name more than one strategy and one pool,
    and reading a declaration imports its module."""

    __slots__ = ("_names", "_read")

    def __init__(self, names: Iterable[str], read: Callable[[str], tuple[Option, ...]]) -> None:
        self._names = dict.fromkeys(names)
        self._read = read

    def __getitem__(self, name: str) -> tuple[Option, ...]:
        if name not in self._names:
            raise KeyError(name)
        return self._read(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


Owners: TypeAlias = Callable[[], Mapping[str, list[str]]]
"""A function that returns, by `Option.name`, the choices that have that option: `--strategy ddp`. Called only for
errors."""

Say: TypeAlias = Callable[[Option, str], str]
"""A function that returns the user's spelling of an option with a value, or of its name alone for an empty value."""


def as_flag(option: Option, value: str = "") -> str:
    return f"{option.flag} {value}".rstrip()


def as_keyword(option: Option, value: str = "") -> str:
    return f"{option.name}={value!r}" if value else option.name


# ------------------------------------------------------------------------------------------------ reading a line


@data_class
class Arguments:
    """The arguments that a line gives."""

    values: dict[str, Any]
    """The values that `Option.read` made, by `Option.name`."""
    positionals: tuple[str, ...]


def parse_arguments(line: str, options: Sequence[Option], *, owners: Owners = dict) -> Arguments:
    """Parse a line by its declared options. A flag must be spelt in full; the error for another names a similar one."""
    words = split_words(line)[::-1]
    known = {option.flag: option for option in options}
    pairs: list[tuple[Option, str]] = []
    positionals: list[str] = []
    while words:
        flag, equals, text = words[-1].partition("=")
        if not re.match(r"-(?!\d)|[\u2013\u2014]", flag):  # some systems turn a typed -- into a longer dash
            positionals.append(words.pop())
            continue
        words.pop()
        if flag not in known:
            raise unknown_option(flag, options, owners, as_flag)
        if equals and not known[flag].metavar:
            raise OptionsError(f"{flag} takes no value: write {flag} alone")
        if not equals and words and takes(known[flag], words[-1]):
            text = words.pop()
        pairs.append((known[flag], text))
    return Arguments(values=gather(pairs, as_flag), positionals=tuple(positionals))


def takes(option: Option, word: str) -> bool:
    """Return whether the word after an option is its value."""
    is_value = not option.bare or word[:1].isdigit() or word in option.choices
    return bool(option.metavar) and not word.startswith("--") and is_value


def split_words(line: str) -> list[str]:
    # Not shlex.split(comments=True): that ends `--env COLOR=#fff` at the `#`.
    words: list[str] = []
    while (line := line.lstrip()) and not line.startswith("#"):
        match = _WORD.match(line)
        if not match:
            quoted = '"' in line or "'" in line
            what = "a quote is never closed, close it" if quoted else "a backslash ends the line, remove it"
            raise OptionsError(f"{what}: {shown(line.rstrip())}")
        words += shlex.split(match[0])
        line = line[match.end() :]
    return words


def gather(pairs: Iterable[tuple[Option, str]], say: Say) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for option, text in pairs:
        name, known = say(option, ""), values.get(option.name)
        text = text or option.bare
        if known is not None and not option.repeatable:
            raise OptionsError(f"{name} is given twice: keep one of them")
        if option.metavar and not text.strip():
            raise OptionsError(f"{name} needs a value: write {say(option, option.metavar)}")
        if option.choices:
            check_choice(text, option.choices, say(option, text if len(text) <= 60 else f"{text[:57]}..."))
        value = option.read(name, text)
        if isinstance(known, tuple):
            value = tuple(dict.fromkeys(known + value))
        elif isinstance(known, dict):
            if twice := known.keys() & value.keys():
                raise OptionsError(f"{name} sets {min(twice)} twice: keep one of them")
            value = known | value
        values[option.name] = value
    return values


# ------------------------------------------------------------------------------------------------ near names


def check_choice(text: str, choices: Collection[str], spelt: str) -> None:
    if text in choices:
        return
    near = difflib.get_close_matches(text.lower(), choices, n=1)
    raise OptionsError(
        f"{spelt} is not known: " + (f"did you mean {near[0]}?" if near else f"choose {any_of(choices)}")
    )


def unknown_option(typed: str, options: Sequence[Option], owners: Owners, say: Say) -> OptionsError:
    bare = re.sub(r"^[-\u2013\u2014]+", "", typed).lower().replace("_", "-")
    if owner := owners().get(bare.replace("-", "_")):
        return OptionsError(f"{typed} is an option of {any_of(owner)}: choose that, or leave {typed} out")
    # Later entries replace earlier ones: a synonym never hides the option that really has that name.
    near = {synonym: option for option in options for synonym in option.synonyms}
    near |= {option.name.strip("_").replace("_", "-"): option for option in options}
    near |= {option.flag.lstrip("-"): option for option in options}
    beginnings = [word for word in near if bare and word.startswith(bare)]
    for word in [*near.keys() & {bare}, *sorted(beginnings, key=len), *difflib.get_close_matches(bare, near, n=1)]:
        return OptionsError(f"unknown option {typed}: did you mean {say(near[word], '')}?")
    known = [say(option, "") for option in options]
    return OptionsError(f"unknown option {typed}: " + (f"choose {any_of(known)}" if known else "there are none here"))


def any_of(words: Collection[str]) -> str:
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last
