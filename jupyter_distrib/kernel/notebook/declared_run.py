"""A declared run: a TOML file that says what runs where, for `jupyter distrib run train.toml`.

    script = "train.py"                 # or module, function = "package.train:main", cell, notebook
    arguments = ["--lr", "1e-3"]
    pool = "lab"
    restarts = 2                        # --max-restarts
    tracking = ["mlflow"]               # --track
    options = { gpus = 8, strategy = "ddp" }
    environment = { NCCL_DEBUG = "INFO" }

Paths in it are relative to its folder, which is the working directory of the run. In the main thread of the command.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jupyter_distrib.errors import OptionsError
from jupyter_distrib.kernel.notebook import script
from jupyter_distrib.kernel.session import session
from jupyter_distrib.kernel.session.runs.results import Results
from jupyter_distrib.kernel.session.runs.run import Run
from jupyter_distrib.kernel.settings import config_files
from jupyter_distrib.kernel.settings.cell_options import MODULE, Options
from jupyter_distrib.kernel.settings.keywords import from_keywords
from jupyter_distrib.kernel.settings.written_options import to_line
from jupyter_distrib.options import Option, any_of, unknown_option
from jupyter_distrib.system import record_file
from jupyter_distrib.system.data_class import data_class

if TYPE_CHECKING:
    from jupyter_distrib.kernel.views.dry_run import DryRun, DryRuns

WHAT = ("script", "module", "function", "cell", "notebook")
"""The keys of which a file has exactly one."""
KEYWORDS = {"pool": "pool", "restarts": "max_restarts", "tracking": "track", "environment": "env"}
"""The keys that each set one option, with the option's keyword."""
TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(WHAT, (str,)),
    "arguments": (list,),
    "keywords": (dict,),
    "pool": (str,),
    "restarts": (int,),
    "tracking": (list, str),
    "options": (dict,),
    "environment": (dict,),
}
_IN_WORDS = {str: "a string", int: "a whole number", list: "a list", dict: "a table"}
_TAKES_ARGUMENTS = ("script", "module", "function")
LARGEST_BYTES = 1 << 30
"""Maximum size of a notebook, outputs included."""
OF_NOTEBOOKS_ONLY = ("out", "keep", "with_", "explain", "sweep", "halt_on_failure")


@data_class
class Declared:
    """The content of a file, checked."""

    what: str
    """One of `WHAT`."""
    target: str
    """The value of that key."""
    arguments: list[Any]
    keywords: dict[str, Any]
    options: dict[str, Any]
    """The options by their keywords."""


def run(path: str, arguments: Sequence[str], given: Options) -> Run | DryRun | DryRuns | None:
    """Execute a declared run; a detached one is returned.

    Args:
        path: The file.
        arguments: Arguments of the command, which follow those of the file.
        given: Options of the command, which take precedence over those of the file.

    Raises:
        OptionsError: The file or an option is wrong; nothing was started.
        BaseException: What the run raises.
    """
    declared = read(path)
    if arguments and declared.what not in _TAKES_ARGUMENTS:
        raise OptionsError(f"a {declared.what} takes no arguments: leave {' '.join(arguments)} out")
    os.chdir(Path(path).resolve().parent)
    sys.path.insert(0, os.getcwd())
    options = given.over(_options(declared, os.path.basename(path)))
    for name in OF_NOTEBOOKS_ONLY:
        if getattr(options, name):
            raise OptionsError(f"{name.strip('_')} is for cells of a notebook: leave it out of {path}")
    words = [*map(str, declared.arguments), *arguments]
    match declared.what:
        case "script":
            return script.run(declared.target, words, options, command="jupyter distrib run")
        case "module":
            return script.run(MODULE, [declared.target, *words], options, command="jupyter distrib run")
        case "function":
            return _call(declared, [*declared.arguments, *arguments], options)
        case "cell":
            # IPython's history would keep the line, in which variables and options of pools may be secrets.
            return _execute([f"{to_line(options)}\n{declared.target}"], kept=False)
        case _:
            _notebook(declared.target, options)
            return None


def read(path: str) -> Declared:
    """Return the content of a file. Raises `OptionsError`, which names the key that is wrong, and its line."""
    text, content = config_files.read_toml(Path(path))
    known = tuple(Option(flag=f"--{name}", meaning="", metavar="V") for name in TYPES)
    for key, value in content.items():
        if key not in TYPES:
            why = unknown_option(key, known, dict, _as_key)
            raise config_files.wrong(path, text, "", key, str(why).replace("unknown option", "unknown key"))
        if not isinstance(value, TYPES[key]) or isinstance(value, bool):
            wanted = any_of([_IN_WORDS[kind] for kind in TYPES[key]])
            raise config_files.wrong(path, text, "", key, f"{key} must be {wanted}; got {value!r}")
    what = [key for key in WHAT if key in content]
    if len(what) != 1:
        named = f"it has {' and '.join(what)}" if what else "it has none of them"
        raise OptionsError(f"{path} must say what runs, by one of the keys {', '.join(WHAT)}: {named}")
    (kind,) = what
    for key, kinds in (("arguments", _TAKES_ARGUMENTS), ("keywords", ("function",))):
        if key in content and kind not in kinds:
            raise config_files.wrong(path, text, "", key, f"{key} are for a {any_of(kinds)}: leave them out")
    options = dict(content.get("options", {}))
    for key, keyword in KEYWORDS.items():
        if key in content and keyword in options:
            raise config_files.wrong(path, text, "options", keyword, f"{keyword} is the same as {key}: leave one out")
        if key in content:
            options[keyword] = content[key] or None  # `restarts = 0` is the default
    return Declared(
        what=kind,
        target=content[kind],
        arguments=content.get("arguments", []),
        keywords=content.get("keywords", {}),
        options=options,
    )


def _as_key(option: Option, value: str = "") -> str:
    return option.name


def _options(declared: Declared, path: str) -> Options:
    try:
        return from_keywords(declared.options, **session.current().settings.possible)
    except OptionsError as error:
        problem = str(error)
    text, _ = config_files.read_toml(Path(path))
    key = next((each for each in declared.options if problem.startswith((each, f"unknown option {each}"))), "")
    written = next((name for name, keyword in KEYWORDS.items() if keyword == key), "")
    raise config_files.wrong(path, text, "" if written else "options", written or key, problem)


def _call(declared: Declared, arguments: list[Any], options: Options) -> Run | DryRun | DryRuns | None:
    """Call a function on every rank, and print what each returns; return the answer of a dry run."""
    from jupyter_distrib.kernel.notebook.decorator import DistributedFunction

    module, colon, name = declared.target.partition(":")
    if not (module and colon and name):
        raise OptionsError(f'function must be "MODULE:NAME", such as "package.train:main"; got {declared.target!r}')
    problem = ""
    found: Any = None
    try:
        found = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        problem = f"there is no module {error.name} in {os.getcwd()} or among the installed packages"
    except AttributeError:
        problem = f"the module {module} has no {name}"
    if problem or not callable(found):
        raise OptionsError(f"function = {declared.target!r}: {problem or f'{name} cannot be called'}")
    if isinstance(found, DistributedFunction):
        options = options.over(found.options)
        found = found.function
    function: DistributedFunction[..., Any] = DistributedFunction(found, options)
    if options.detach:
        return function.submit(*arguments, **declared.keywords)
    values = function.distributed(*arguments, **declared.keywords)
    if options.dry_run and not isinstance(values, Results):
        return values  # type: ignore[no-any-return]  # the answer of a dry run
    print(values)
    return None


def _notebook(path: str, options: Options) -> None:
    """Execute the cells of a notebook from top to bottom; the options are for cells that do not set them."""
    if options.detach:
        raise OptionsError("detach is for a script, function or cell: the cells of a notebook end with the command")
    choices = session.current().choices
    sources = _sources(path)
    choices.options = replace(options, pool=None)
    if options.pool:
        choices.use(options.pool)
    _execute(sources)


def _sources(path: str) -> list[str]:
    """Return the code cells of a notebook. Raises `OptionsError`."""
    try:
        content = record_file.json_of(record_file.text_of(path, LARGEST_BYTES, through_links=True))
        return ["".join(each["source"]) for each in content["cells"] if each["cell_type"] == "code"]
    except OSError as error:
        problem = error.strerror or str(error)
    except (record_file.DamagedFile, ValueError, KeyError, TypeError):
        problem = "it is not a notebook of format 4"
    raise OptionsError(f"the notebook {path} cannot be read: {problem}")


def _execute(sources: Sequence[str], *, kept: bool = True) -> Run | None:
    """Execute cells in a shell of this process, up to the first that fails; IPython's history keeps them if `kept`.
    Return the run that the last one gives, if it is detached; raise the exception of one that fails."""
    from IPython.core.interactiveshell import ExecutionResult, InteractiveShell

    shell = InteractiveShell.instance()
    # Raised below.
    shell.showtraceback = shell.showsyntaxerror = lambda *_, **__: None  # type: ignore[method-assign,assignment]
    shell.run_line_magic("load_ext", "jupyter_distrib")
    result: Any = None
    for source in sources:
        outcome: ExecutionResult = shell.run_cell(source, store_history=kept)  # type: ignore[no-untyped-call]
        if (error := outcome.error_before_exec or outcome.error_in_exec) is not None:
            raise error
        result = outcome.result
    return result if isinstance(result, Run) and result.detached else None
