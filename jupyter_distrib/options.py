"""What a user can ask for: the magic line, the keywords of the Python API, their help, completion and documentation.

Runs in the kernel and wherever a strategy or pool declares its options; standard library only, no state.

    %%distributed --gpus 2 --strategy ddp     --parse_line-->     Options    --to_line-->  the equal magic line
    gpus=2, strategy="ddp"                    --from_keywords-->  Options

An option is declared once, as a field of `Options` or in the tuple of a strategy or pool; all else here is derived from
that. Both ways in end in `_gather`, so a line and a call are refused for the same reasons in the same words.
"""

from __future__ import annotations

import difflib
import keyword
import math
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, cast, get_args

from jupyter_distrib.errors import OptionsError

MAGIC = "%%distributed"
DEFAULT_STRATEGY = "none"
DEFAULT_POOL = "local"
HIGHEST_RANK = 65_535
"""`--on 0-999999999` is a slip of the finger, and would be a tuple of some gigabytes."""

_WORD = re.compile(r"""(?:[^\s"'\\]|\\.|"(?:\\.|[^"\\])*"|'[^']*')+(?=\s|\Z)""", re.DOTALL)
_CURSOR = "\0"


# ------------------------------------------------------------------------------------------------ readers of a value
# Each takes how the user knows the option (`--gpus` or `gpus`) and the text given, which is never blank.


def count(name: str, text: str) -> int:
    return _whole(name, text, 1, "a whole number, at least 1")


def rank(name: str, text: str) -> int:
    return _whole(name, text, 0, "a rank, counted from 0")


def _whole(name: str, text: str, least: int, wanted: str) -> int:
    if not re.fullmatch(r"\s*[0-9]{1,9}\s*", text) or int(text) < least:
        raise OptionsError(f"{name} wants {wanted}; got {_shown(text)}")
    return int(text)


def seconds(name: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise OptionsError(f"{name} wants a number of seconds above 0; got {_shown(text)}")
    return number


def string(name: str, text: str) -> str:
    return text


def switch(name: str, text: str) -> bool:
    return True


def names(name: str, text: str) -> tuple[str, ...]:
    parts = tuple(part.strip() for part in text.split(","))
    if not all(part.isidentifier() for part in parts):
        raise OptionsError(f"{name} wants names of variables, joined by commas without spaces; got {_shown(text)}")
    for part in parts:
        if keyword.iskeyword(part):
            raise OptionsError(f"{name} wants names of variables; {part!r} is a keyword of Python")
    return tuple(dict.fromkeys(parts))


def one_name(name: str, text: str) -> str:
    if not text.strip().isidentifier():
        raise OptionsError(f"{name} wants the name of one variable; got {_shown(text)}")
    return names(name, text)[0]


def rank_list(name: str, text: str) -> tuple[int, ...]:
    """`0,2-3` as sorted ranks."""
    chosen: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,9})(?:-([0-9]{1,9}))?\s*", part)
        if not match:
            raise OptionsError(f"{name} wants ranks such as 0,2-3; got {_shown(text)}")
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
        raise OptionsError(f"{name} wants K=V, the name of a variable and its value; got {_shown(text)}")
    return {key: value}


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")


# ------------------------------------------------------------------------------------------------ declarations


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One thing that can be asked for, by a flag on a line or by a keyword in a call."""

    flag: str
    """`--fsdp-unit`."""
    meaning: str
    metavar: str = ""
    """What the help calls the value; empty for a switch, which takes none."""
    default: str = ""
    """What happens without it, in words."""
    read: Callable[[str, str], Any] = string
    """Makes the value, from how the user knows the option and the text given. The value of a strategy's or pool's own
    option is checked by this and handed on as the text itself, a switch as the empty text."""
    choices: tuple[str, ...] = ()
    """The only texts allowed, if any."""
    repeatable: bool = False
    """Given again, it adds to what was given before. Not for the options of strategies and pools."""
    keyword: str = ""
    """Where it differs from the flag. Not for the options of strategies and pools."""
    synonyms: tuple[str, ...] = ()
    """What users of other launchers type: this option is suggested then."""

    @property
    def name(self) -> str:
        """Its keyword, and its key in `strategy_options` or `pool_options`: `fsdp_unit`."""
        return self.keyword or self.flag.lstrip("-").replace("-", "_")


Declared: TypeAlias = Mapping[str, tuple[Option, ...]]
"""Every strategy, or every kind of pool, by name, with the options that it declares itself."""
Owners: TypeAlias = Mapping[str, list[str]]
"""By `Option.name`, what to choose to have that option: `--strategy ddp`."""


def _declared(initial: object, flag: str, metavar: str, meaning: str, **more: Any) -> Any:
    return field(default=initial, metadata={"option": Option(flag=flag, metavar=metavar, meaning=meaning, **more)})


# fmt: off
@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What one cell or call asks for; None, empty and False mean not asked for."""

    gpus: int | None = _declared(
        None, "--gpus", "N", "N ranks with one GPU each; where the pool has no GPU at all, N CPU ranks", read=count,
        default="all GPUs of the pool, else 2 CPU ranks", synonyms=("devices", "num-gpus", "nproc-per-node"))
    ranks: int | None = _declared(
        None, "--ranks", "N", "N CPU ranks", read=count,
        synonyms=("cpus", "np", "num-processes", "num-workers", "workers", "world-size"))
    strategy: str | None = _declared(
        None, "--strategy", "NAME", "how the ranks work together; `none` sets torchrun's environment only",
        default=DEFAULT_STRATEGY)
    pool: str | None = _declared(
        None, "--pool", "NAME", "where the ranks are", default=DEFAULT_POOL, synonyms=("cluster",))
    out: str | None = _declared(None, "--out", "NAME", "bind the Results of all ranks to this name", read=one_name)
    keep: tuple[str, ...] = _declared(
        (), "--keep", "NAMES", "leave these names on the ranks; the notebook gets a handle",
        read=names, repeatable=True)
    with_: tuple[str, ...] = _declared(
        (), "--with", "NAMES", "also send these names, which the cell reaches only through exec or a string",
        read=names, repeatable=True, keyword="with_")
    on: tuple[int, ...] | None = _declared(
        None, "--on", "RANKS", "run on these ranks of the warm pool only, such as 0,2-3", read=rank_list,
        default="all ranks")
    timeout_s: float | None = _declared(
        None, "--timeout", "S", "stop after S seconds", read=seconds, default="no limit", keyword="timeout_s")
    detach: bool = _declared(
        False, "--detach", "", "return a Run at once", read=switch, synonyms=("async", "background"))
    fresh: bool = _declared(False, "--fresh", "", "run in new processes", read=switch, synonyms=("new", "restart"))
    env: dict[str, str] = field(default_factory=dict, metadata={"option": Option(
        flag="--env", metavar="K=V", meaning="set an environment variable on the ranks; may be given again",
        read=variable, repeatable=True)})
    explain: bool = _declared(
        False, "--explain", "", "print what would travel, and run nothing", read=switch, synonyms=("dry-run",))
    strategy_options: dict[str, str] = field(default_factory=dict)
    """By `Option.name`, what was given of the chosen strategy's own options."""
    pool_options: dict[str, str] = field(default_factory=dict)
# fmt: on


OPTIONS: tuple[Option, ...] = tuple(each.metadata["option"] for each in fields(Options) if each.metadata)
_BY_NAME = {option.name: option for option in OPTIONS}

_Say: TypeAlias = Callable[[Option, str], str]
"""How the user spells an option with this value, or, for the empty one, its mere name."""


def _as_flag(option: Option, value: str = "") -> str:
    return f"{option.flag} {value}".rstrip()


def _as_keyword(option: Option, value: str = "") -> str:
    return f"{option.name}={value!r}" if value else option.name


# ------------------------------------------------------------------------------------------------ in and out


def parse_line(line: str, *, strategies: Declared, pools: Declared) -> Options:
    """Read what follows `%%distributed`, quoted as in a shell; a `# comment` may end it.

    Raises:
        OptionsError: what is wrong with which option and what to do, in one sentence.
    """
    words = _split(line)
    table = _table(strategies, pools, _after(words, "--strategy"), _after(words, "--pool"), _as_flag)
    arguments = parse_arguments(line, table.options, owners=table.owners)
    for word in arguments.positionals:
        raise OptionsError(f"{word!r} stands alone: {_meant(word, arguments.values, strategies, pools)}")
    return table.chosen(arguments.values)


def from_keywords(*, strategies: Declared, pools: Declared, **keywords: object) -> Options:
    """Read keywords: a list, tuple or set where the line has commas, a mapping for `env`; None is not given.

    Raises:
        OptionsError: as `parse_line`, with the keyword's name.
    """
    given = {name: value for name, value in keywords.items() if value is not None}
    strategy, pool = (str(given[name]) if name in given else None for name in ("strategy", "pool"))
    table = _table(strategies, pools, strategy, pool, _as_keyword)
    known = {option.name: option for option in table.options}
    pairs: list[tuple[Option, str]] = []
    for name, value in given.items():
        if name not in known:
            raise _unknown(name, table.options, table.owners, _as_keyword)
        pairs += [(known[name], text) for text in _texts(known[name], value)]
    return table.chosen(_gather(pairs, _as_keyword))


def to_line(options: Options) -> str:
    """The magic line that `parse_line` reads as these options.

    Raises:
        OptionsError: a value holds a line break.
    """
    words = [MAGIC]
    for option in OPTIONS:
        words += [_word(option.flag, text) for text in _written(getattr(options, option.name))]
    for name, text in {**options.pool_options, **options.strategy_options}.items():
        words.append(_word("--" + name.replace("_", "-"), text))
    line = " ".join(words)
    if len(line.splitlines()) > 1:
        raise OptionsError("a magic line cannot hold a value with a line break: set it in the cell instead")
    return line


def _written(value: object) -> list[str]:
    match value:
        case None | False | ():
            return []
        case True:
            return [""]
        case float():
            return [repr(value).removesuffix(".0")]
        case tuple():
            return [",".join(map(str, value))]
        case dict():
            return [f"{key}={text}" for key, text in value.items()]
        case _:
            return [str(value)]


def _word(flag: str, text: str) -> str:
    if not text:
        return flag
    return f"{flag}{'=' if text.startswith('-') else ' '}{shlex.quote(text)}"


def _texts(option: Option, value: object) -> list[str]:
    """What a keyword's value would be on a line; repeatable options have one text for each item."""
    if not option.metavar:
        if not isinstance(value, bool):
            raise OptionsError(f"{option.name} wants True or False; got {_shown(str(value))}")
        return [""] * value
    if option.read is variable and isinstance(value, Mapping):
        for key, text in value.items():
            if "=" in str(key) or text is None:
                raise OptionsError(f"{option.name} wants a text for each name; got {_shown(f'{key}: {text}')}")
        return [f"{key}={text}" for key, text in value.items()]
    if not isinstance(value, list | tuple | set | frozenset | range):
        return [str(value)]
    return [str(item) for item in value] if option.repeatable else [",".join(map(str, value))]


# ------------------------------------------------------------------------------------------------ what is possible


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    """What may be given with the chosen strategy and pool."""

    options: tuple[Option, ...]
    strategy: tuple[Option, ...]
    pool: tuple[Option, ...]
    owners: Owners
    say: _Say

    def chosen(self, values: Mapping[str, Any]) -> Options:
        options = Options(
            **{name: value for name, value in values.items() if name in _BY_NAME},
            strategy_options={each.name: values[each.name] for each in self.strategy if each.name in values},
            pool_options={each.name: values[each.name] for each in self.pool if each.name in values},
        )
        _refuse_nonsense(options, self.say)
        return options


def _table(strategies: Declared, pools: Declared, strategy: str | None, pool: str | None, say: _Say) -> _Table:
    base = _base(strategies, pools)
    for option in base:  # before all else, since what other options mean hangs on these two
        if name := {"strategy": strategy, "pool": pool}.get(option.name):
            _check_choice(name, option.choices, say(option, name))
    strategy_own = _own(strategies.get(strategy or DEFAULT_STRATEGY, ()))
    pool_own = _own(pools.get(pool or DEFAULT_POOL, ()))
    owners: dict[str, list[str]] = {}
    for chooser, declared in ((_BY_NAME["strategy"], strategies), (_BY_NAME["pool"], pools)):
        for owner, options in declared.items():
            for each in options:
                owners.setdefault(each.name, []).append(say(chooser, owner))
    every = (*base, *strategy_own, *pool_own)
    return _Table(options=every, strategy=strategy_own, pool=pool_own, owners=owners, say=say)


def _base(strategies: Declared, pools: Declared) -> tuple[Option, ...]:
    choices = {"strategy": tuple(strategies), "pool": tuple(pools)}
    return tuple(replace(option, choices=choices.get(option.name, ())) for option in OPTIONS)


def _own(options: tuple[Option, ...]) -> tuple[Option, ...]:
    def as_text(option: Option) -> Option:
        def read(name: str, text: str) -> str:
            option.read(name, text)
            return text

        return replace(option, read=read, repeatable=False)

    return tuple(as_text(option) for option in options)


def _after(words: Sequence[str], flag: str) -> str | None:
    """The value of a flag, wherever it stands: a value never begins with `--`."""
    for word, following in zip(words, [*words[1:], ""], strict=False):
        if word.startswith(flag + "="):
            return word.partition("=")[2]
        if word == flag and not following.startswith("--"):
            return following or None
    return None


def _refuse_nonsense(options: Options, say: _Say) -> None:
    def named(name: str) -> str:
        return say(_BY_NAME[name], "")

    if options.gpus and options.ranks:
        raise OptionsError(
            f"{named('gpus')} and {named('ranks')} exclude each other: "
            f"{named('gpus')} has one GPU for each rank, {named('ranks')} has CPU ranks"
        )
    if options.on and options.fresh:
        raise OptionsError(
            f"{named('on')} and {named('fresh')} exclude each other: new processes hold no kept values, leave one out"
        )
    size = options.gpus or options.ranks
    if size and options.on and options.on[-1] >= size:
        raise OptionsError(f"{named('on')} names rank {options.on[-1]}, but {size} ranks count from 0 to {size - 1}")
    if options.out in options.keep:
        raise OptionsError(f"{named('out')} and {named('keep')} both bind {options.out}: choose another name for one")


# ------------------------------------------------------------------------------------------------ any magic's line


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """What a line says; only what was given."""

    values: dict[str, Any]
    """By `Option.name`, as `Option.read` made them."""
    positionals: tuple[str, ...]


def parse_arguments(line: str, options: Sequence[Option], *, owners: Owners = MappingProxyType({})) -> Arguments:
    """Read a line by its declarations. The beginning of a flag is not enough, but the near flag is named."""
    words = _split(line)[::-1]
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
            raise _unknown(flag, options, owners, _as_flag)
        if equals and not known[flag].metavar:
            raise OptionsError(f"{flag} takes no value: write {flag} alone")
        if known[flag].metavar and not equals and words and not words[-1].startswith("--"):
            text = words.pop()
        pairs.append((known[flag], text))
    return Arguments(values=_gather(pairs, _as_flag), positionals=tuple(positionals))


def _split(line: str) -> list[str]:
    # Not shlex.split(comments=True): that ends `--env COLOR=#fff` at the `#`.
    words: list[str] = []
    while (line := line.lstrip()) and not line.startswith("#"):
        match = _WORD.match(line)
        if not match:
            quoted = '"' in line or "'" in line
            what = "a quote is never closed, close it" if quoted else "a backslash ends the line, remove it"
            raise OptionsError(f"{what}: {_shown(line.rstrip())}")
        words += shlex.split(match[0])
        line = line[match.end() :]
    return words


def _gather(pairs: Iterable[tuple[Option, str]], say: _Say) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for option, text in pairs:
        name, known = say(option, ""), values.get(option.name)
        if known is not None and not option.repeatable:
            raise OptionsError(f"{name} is given twice: keep one of them")
        if option.metavar and not text.strip():
            raise OptionsError(f"{name} needs a value: write {say(option, option.metavar)}")
        if option.choices:
            _check_choice(text, option.choices, say(option, text))
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


def _check_choice(text: str, choices: Collection[str], spelt: str) -> None:
    if text in choices:
        return
    near = difflib.get_close_matches(text.lower(), choices, n=1)
    raise OptionsError(f"{spelt} is not known: " + (f"did you mean {near[0]}?" if near else f"choose {_or(choices)}"))


def _unknown(typed: str, options: Sequence[Option], owners: Owners, say: _Say) -> OptionsError:
    bare = re.sub(r"^[-\u2013\u2014]+", "", typed).lower().replace("_", "-")
    if owner := owners.get(bare.replace("-", "_")):
        return OptionsError(f"{typed} is an option of {_or(owner)}: choose that, or leave {typed} out")
    # Later entries replace earlier ones: a synonym never hides the option that really has that name.
    near = {synonym: option for option in options for synonym in option.synonyms}
    near |= {option.name.strip("_").replace("_", "-"): option for option in options}
    near |= {option.flag.lstrip("-"): option for option in options}
    beginnings = [word for word in near if bare and word.startswith(bare)]
    for word in [*near.keys() & {bare}, *sorted(beginnings, key=len), *difflib.get_close_matches(bare, near, n=1)]:
        return OptionsError(f"unknown option {typed}: did you mean {say(near[word], '')}?")
    known = [say(option, "") for option in options]
    return OptionsError(f"unknown option {typed}: " + (f"choose {_or(known)}" if known else "there are none here"))


def _meant(word: str, values: Mapping[str, Any], strategies: Declared, pools: Declared) -> str:
    flag = "--" + word.partition("=")[0]
    if word.isdecimal() and not values.keys() & {"gpus", "ranks"}:
        return f"did you mean --gpus {word}?"
    if flag in {option.flag for option in OPTIONS}:
        return f"did you mean {flag}?"
    for kind, known in (("strategy", strategies), ("pool", pools)):
        if word in known and kind not in values:
            return f"did you mean --{kind} {word}?"
    return "an option begins with --, and a value with spaces needs quotes"


def _or(words: Collection[str]) -> str:
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last


# ------------------------------------------------------------------------------------------------ help and completion


def help_text(*, strategies: Declared, pools: Declared) -> str:
    """For `%%distributed?`."""
    sections = [("Options:", _base(strategies, pools)), *_sections(strategies, pools)]
    width = max(len(_usage(option)) for _, options in sections for option in options)
    lines = [f"usage: {MAGIC} [OPTION]... [# comment]"]
    for title, options in sections:
        lines += ["", title]
        for option in options:
            default = f" (default: {option.default})" if option.default else ""
            lines.append(f"  {_usage(option):{width}}  {_meaning(option)}{default}")
    return "\n".join(lines)


def markdown_table(*, strategies: Declared, pools: Declared) -> str:
    """For the README."""
    lines = ["| option | keyword | meaning | default |", "|---|---|---|---|"]
    for title, options in [("", _base(strategies, pools)), *_sections(strategies, pools)]:
        for option in options:
            meaning = f"{title} {_meaning(option)}".strip()
            cells = [f"`{_usage(option)}`", f"`{option.name}`", meaning, option.default]
            lines.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    return "\n".join(lines)


def complete(line_before_cursor: str, *, strategies: Declared, pools: Declared) -> list[str]:
    """Words that could stand in place of the one at the cursor; the line may begin with `%%distributed`."""
    try:
        # The mark shows whether the cursor is in a word, behind one, or in a comment.
        words = _split(line_before_cursor.lstrip().removeprefix(MAGIC) + _CURSOR)
        if not words or not words[-1].endswith(_CURSOR):
            return []
        current = words.pop().removesuffix(_CURSOR)
        table = _table(strategies, pools, _after(words, "--strategy"), _after(words, "--pool"), _as_flag)
    except OptionsError:
        return []
    return [word for word in _candidates(words, current, table.options) if word.startswith(current)]


def _candidates(words: Sequence[str], current: str, options: Sequence[Option]) -> list[str]:
    known = {option.flag: option for option in options}
    flag, equals, _ = current.partition("=")
    if equals:
        return [f"{flag}={choice}" for choice in known[flag].choices] if flag in known else []
    before = known.get(words[-1]) if words else None
    if before and before.metavar:
        return list(before.choices)
    given = {word.partition("=")[0] for word in words}
    return [option.flag for option in options if option.repeatable or option.flag not in given]


def _sections(strategies: Declared, pools: Declared) -> Iterator[tuple[str, tuple[Option, ...]]]:
    for kind, declared in (("strategy", strategies), ("pool", pools)):
        yield from ((f"With --{kind} {owner}:", options) for owner, options in declared.items() if options)


def _usage(option: Option) -> str:
    return _as_flag(option, option.metavar)


def _meaning(option: Option) -> str:
    return option.meaning + (f"; one of {', '.join(option.choices)}" if option.choices else "")


# ------------------------------------------------------------------------------------------------ line magics

PoolAction: TypeAlias = Literal["list", "use", "start", "stop", "restart", "resize"]

LOGS_OPTIONS = (Option(flag="--rank", metavar="R", read=rank, meaning="what this rank wrote", default="all ranks"),)
POOL_OPTIONS = (_BY_NAME["gpus"], _BY_NAME["ranks"])


@dataclass(frozen=True, slots=True, kw_only=True)
class LogsRequest:
    run: str | None = None
    """None: the last run."""
    rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRequest:
    action: PoolAction = "list"
    name: str | None = None
    """None: the pool in use."""
    size: int | None = None
    """`resize N`: so many ranks, of the kind that they are now."""
    gpus: int | None = None
    ranks: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachRequest:
    run: str | None = None
    """None: the newest detached run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusRequest:
    pass


def parse_logs(line: str) -> LogsRequest:
    """`%distributed_logs [RUN] [--rank R]`."""
    arguments = _few(line, "%distributed_logs [RUN] [--rank R]", LOGS_OPTIONS, 1)
    return LogsRequest(run=next(iter(arguments.positionals), None), **arguments.values)


def parse_attach(line: str) -> AttachRequest:
    """`%distributed_attach [RUN]`."""
    return AttachRequest(run=next(iter(_few(line, "%distributed_attach [RUN]", (), 1).positionals), None))


def parse_status(line: str) -> StatusRequest:
    """`%distributed_status`."""
    _few(line, "%distributed_status", (), 0)
    return StatusRequest()


def parse_pool(line: str, *, pools: Collection[str]) -> PoolRequest:
    """`%distributed_pool list|use|start|stop|restart|resize [NAME or N] [--gpus N|--ranks N]`."""
    actions = get_args(PoolAction)
    usage = f"%distributed_pool {'|'.join(actions)} [NAME or N] [--gpus N | --ranks N]"
    arguments = _few(line, usage, POOL_OPTIONS, 2)
    action, operand = (*arguments.positionals, None, None)[:2]
    _check_choice(action or "list", actions, f"%distributed_pool {action}")
    request = PoolRequest(
        action=cast(PoolAction, action or "list"),
        name=operand if action != "resize" else None,
        size=count("resize", operand) if operand and action == "resize" else None,
        **arguments.values,
    )
    _refuse_pool_nonsense(request, pools)
    return request


def _refuse_pool_nonsense(request: PoolRequest, pools: Collection[str]) -> None:
    action, name = request.action, request.name
    sizes = [size for size in (request.size, request.gpus, request.ranks) if size]
    if action in ("start", "resize"):
        if len(sizes) > 1 or (action == "resize" and not sizes):
            number = "N, --gpus N or --ranks N" if action == "resize" else "--gpus N or --ranks N"
            raise OptionsError(f"{action} wants one of {number}; got {len(sizes) or 'none'} of them")
    elif sizes:
        raise OptionsError(f"{action} takes no --gpus or --ranks: only start and resize do")
    if action == "use" and not name:
        raise OptionsError(f"use needs the name of a pool: choose {_or(pools)}")
    if action == "list" and name:
        raise OptionsError(f"list takes no name: leave {name!r} out")
    if name and name.isdecimal():
        meant = f"start --gpus {name}" if action == "start" else f"resize {name}"
        raise OptionsError(f"{action} wants the name of a pool, not {name}: did you mean {meant}?")
    if name:
        _check_choice(name, pools, f"pool {name}")


def _few(line: str, usage: str, options: Sequence[Option], most: int) -> Arguments:
    arguments = parse_arguments(line, options)
    if extra := arguments.positionals[most:]:
        raise OptionsError(f"{extra[0]!r} is one word too many: the line is {usage}")
    return arguments
