"""Copies settings of libraries that affect what a program computes and prints from the kernel to a rank. Only loaded
libraries are inspected, and none is loaded for it. Standard library only.

`SETTINGS` is the table: one row is one setting, and a further library is a further row. Each setting is a JSON value.
Settings with their default are left out. docs/cells.md says which settings of which libraries are copied.
"""

from __future__ import annotations

import builtins
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache, partial
from operator import attrgetter
from typing import Any, NamedTuple

from jupyter_distrib.libraries.display_settings import (
    DISPLAY_SETTINGS,
    functions_of_pandas,
    parameters_that_stay,
)
from jupyter_distrib.libraries.logging_settings import LOGGING, handlers_that_stay
from jupyter_distrib.libraries.setting import (
    LibrarySetting,
    attribute,
    function,
    keywords,
    not_set,
    switch,
    unlike,
    when_imported,
)
from jupyter_distrib.libraries.torch_settings import TORCH_SETTINGS

_NUMPY_PRINTING = {
    "edgeitems": 3,
    "threshold": 1000,
    "precision": 8,
    "suppress": False,
    "linewidth": 75,
    "nanstr": "nan",
    "infstr": "inf",
    "sign": "-",
    "floatmode": "maxprec",
    "legacy": False,
}
_NUMPY_ERRORS = {"divide": "warn", "over": "warn", "under": "ignore", "invalid": "warn"}
_SKLEARN = {
    "assume_finite": False,
    "working_memory": 1024,
    "print_changed_only": True,
    "display": "diagram",
    "pairwise_dist_chunk_size": 256,
    "enable_cython_pairwise_dist": True,
    "array_api_dispatch": False,
    "transform_output": "default",
    "enable_metadata_routing": False,
    "skip_parameter_validation": False,
    "sparse_interface": "spmatrix",
}
_RECURSION = (1000, 3000)
"""Python's own limit of recursion, and that of jedi, which completes names in a kernel."""
_FILTERS_OF_PYTHON = {
    ("ignore", each) for each in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning)
}
"""Python's default filters."""
_MESSAGES_OF_LIBRARIES = ("numpy.", "torch::", ".*Trio's signal handling code", "the matrix subclass is not")
"""Prefixes of the messages that numpy, torch and scipy filter at import, and ipykernel at its start."""
_CATEGORIES_OF = ("IPython", "ipykernel", "torch", "numpy")
"""Libraries whose categories only they filter themselves."""
_filters_set: list[Any] = []
"""The filters that this process has taken over from another process."""


class State(NamedTuple):
    """The settings of this process."""

    values: dict[str, Any]
    """Settings that differ from the libraries' defaults and that ranks take over, by name."""
    stay: tuple[str, ...]
    """A sentence on each setting that ranks do not take over."""


def state() -> State:
    """Return the settings as they are now."""
    found, stay, loaded = dict[str, Any](), list[str](), sys.modules
    for name, settings in _BY_LIBRARY.items():
        if (library := loaded.get(name)) is None:
            continue
        for each in settings:
            try:
                if (value := each.read(library)) is not None:
                    found[each.name] = value
            except Exception:  # noqa: BLE001, S112 - foreign code, maybe of a version that lacks the setting
                continue
    for name, sentences in _STAY.items():
        if (library := loaded.get(name)) is not None:
            with suppress(Exception):
                stay += sentences(library)
    return State(values=found, stay=tuple(stay))


class Applied:
    """Settings of this process that were copied from another process."""

    def __init__(self) -> None:
        self._now: dict[str, Any] = {}

    def apply(self, wanted: dict[str, Any]) -> list[str]:
        """Apply these settings, and reset settings that only the previous call had set; all others stay. Return a
        sentence on each setting that this process cannot have."""
        problems: list[str] = []
        if wanted == self._now:
            return problems
        for each in SETTINGS:
            value = wanted.get(each.name)
            if value != self._now.get(each.name):
                try:
                    when_imported(each.library, each.name, partial(_write, each, value))
                except Exception as error:  # noqa: BLE001 - foreign code, of another version than the notebook's
                    problems.append(not_set(each.name, error))
        self._now = dict(wanted)
        return problems


def _write(setting: LibrarySetting, value: Any, library: Any) -> None:
    setting.write(library, value)


def _read_warnings(_: Any) -> list[list[Any]] | None:
    """Return the filters that users set: action, message, category, module and line of each.

    Python, libraries and the kernel have filters of their own, which exist on ranks too: filters with actions and
    categories that only they use, and with known messages and modules, are left out.
    """
    found = []
    for action, message, category, module, line in warnings.filters:
        if not isinstance(category, type) or (action, category) in _FILTERS_OF_PYTHON:
            continue
        text, where = _pattern(message), _pattern(module)
        if text.startswith(_MESSAGES_OF_LIBRARIES):
            continue
        pythons = getattr(builtins, category.__name__, None) is category
        top = category.__module__.partition(".")[0]
        by_library = action in ("always", "default") or top in (*_CATEGORIES_OF, "__main__")
        if (pythons and not where) or (where != "__main__" and not by_library):
            found.append([action, text, category.__name__ if pythons else _path_of(category), where, line])
    return found or None


def _pattern(pattern: Any) -> str:
    return str(getattr(pattern, "pattern", pattern) or "")


def _path_of(category: type) -> str:
    return f"{category.__module__}:{category.__qualname__}"


def _write_warnings(_: Any, value: list[list[Any]] | None) -> None:
    for old in _filters_set:
        if old in warnings.filters:
            warnings.filters.remove(old)  # type: ignore[attr-defined]
    _filters_set.clear()
    for action, text, path, where, line in reversed(value or []):
        home, _, name = path.rpartition(":")
        key = f"the warning filter {action} {path}"
        when_imported(home or "builtins", key, partial(_add_filter, (action, text, name, where, line)))


def _add_filter(wanted: tuple[Any, str, str, str, int], home: Any) -> None:
    action, text, name, where, line = wanted
    category = getattr(home, name)
    warnings.filterwarnings(action, text, category, where, line)
    message, module = re.compile(text, re.IGNORECASE) if text else None, re.compile(where) if where else None
    _filters_set.append((action, message, category, module, line))


def _read_recursion(_: Any) -> int | None:
    limit = sys.getrecursionlimit()
    return None if limit in _RECURSION else limit


def _read_decimal(decimal: Any) -> dict[str, Any] | None:
    context, default = decimal.getcontext(), _context_of_decimal(decimal)
    if context.traps == default.traps and _VALUES_OF_DECIMAL(context) == _VALUES_OF_DECIMAL(default):
        return None
    differing = {name: getattr(context, name) for name in _DECIMAL if getattr(context, name) != getattr(default, name)}
    traps = [signal.__name__ for signal, on in context.traps.items() if on]
    if traps != [signal.__name__ for signal, on in default.traps.items() if on]:
        differing["traps"] = traps
    return differing or None


def _write_decimal(decimal: Any, value: dict[str, Any] | None) -> None:
    context, wanted = _context_of_decimal(decimal).copy(), dict(value or {})
    if (traps := wanted.pop("traps", None)) is not None:
        context.traps = {signal: signal.__name__ in traps for signal in context.traps}
    for name, each in wanted.items():
        setattr(context, name, each)
    decimal.setcontext(context)


@cache
def _context_of_decimal(decimal: Any) -> Any:
    """Return Python's initial context, which must not be changed."""
    traps = [decimal.DivisionByZero, decimal.Overflow, decimal.InvalidOperation]
    return decimal.Context(prec=28, rounding=decimal.ROUND_HALF_EVEN, capitals=1, clamp=0, traps=traps)


_DECIMAL = ("prec", "rounding", "Emin", "Emax", "capitals", "clamp")
_VALUES_OF_DECIMAL = attrgetter(*_DECIMAL)
_LOCALES = ("LC_COLLATE", "LC_MONETARY", "LC_NUMERIC", "LC_TIME")
"""The parts of a locale that a program has to ask for; Python itself sets LC_CTYPE."""


def _read_locale(locale: Any) -> dict[str, str] | None:
    now = {name: str(locale.setlocale(getattr(locale, name))) for name in _LOCALES}
    return {name: each for name, each in now.items() if each != "C"} or None


def _write_locale(locale: Any, value: dict[str, str] | None) -> None:
    for name in _LOCALES:
        locale.setlocale(getattr(locale, name), (value or {}).get(name, "C"))


def _read_ssl(ssl: Any) -> str | None:
    is_unverified = ssl._create_default_https_context is ssl._create_unverified_context  # noqa: SLF001 - no public way
    return "unverified" if is_unverified else None


def _write_ssl(ssl: Any, value: str | None) -> None:
    ssl._create_default_https_context = (  # noqa: SLF001
        ssl._create_unverified_context if value else ssl.create_default_context  # noqa: SLF001
    )


def _read_threads_of_cv2(cv2: Any) -> int | None:
    """Return 1 if OpenCV uses no threads of its own; its default is one for each core."""
    return 1 if cv2.getNumThreads() <= 1 < cv2.getNumberOfCPUs() else None


def _read_dtype_of_keras(keras: Any) -> str | None:
    name = str(keras.config.dtype_policy().name)
    return None if name == keras.config.floatx() else name


def _read_jax(jax: Any) -> dict[str, Any] | None:
    return unlike(_JAX, {name: getattr(jax.config, name) for name in _JAX if hasattr(jax.config, name)})


def _device_of_torch(torch: Any) -> Iterator[str]:
    if (device := str(torch.get_default_device())) != "cpu":
        yield f"torch's default device of the notebook, {device}, is not set on the ranks: use `device`"


def _formatter_of_numpy(numpy: Any) -> Iterator[str]:
    if numpy.get_printoptions()["formatter"]:
        yield "the functions of numpy.set_printoptions(formatter=...) are not set on the ranks: set them in the cell"


def _parameters_of_pyro(pyro: Any) -> Iterator[str]:
    if names := list(pyro.get_param_store()):
        yield (
            f"pyro's parameters of the notebook ({len(names)}) are not on the ranks: keep `pyro.get_param_store()"
            ".get_state()` under a name, and give it to `set_state` in the cell"
        )


def _parameters_of_gin(gin: Any) -> Iterator[str]:
    if gin.config_str():
        yield (
            "gin's parameters of the notebook are not set on the ranks: define the functions, and call "
            "gin.parse_config, in a cell with %%distributed_setup"
        )


def _write_jax(jax: Any, value: dict[str, Any] | None) -> None:
    for name, each in {**_JAX, **(value or {})}.items():
        if hasattr(jax.config, name):
            jax.config.update(name, each)


_JAX = {
    "jax_enable_x64": False,
    "jax_debug_nans": False,
    "jax_disable_jit": False,
    "jax_default_matmul_precision": None,
}

SETTINGS = (
    # Python
    LibrarySetting(name="warnings", library="warnings", read=_read_warnings, write=_write_warnings),
    LibrarySetting(
        name="fields of csv",
        library="csv",
        read=lambda csv: None if csv.field_size_limit() == 131_072 else csv.field_size_limit(),
        write=lambda csv, value: csv.field_size_limit(value or 131_072),
    ),
    LibrarySetting(name="decimal", library="decimal", read=_read_decimal, write=_write_decimal),
    LibrarySetting(name="locale", library="locale", read=_read_locale, write=_write_locale),
    LibrarySetting(name="certificates", library="ssl", read=_read_ssl, write=_write_ssl),
    LibrarySetting(
        name="recursion limit",
        library="sys",
        read=_read_recursion,
        write=lambda _, value: sys.setrecursionlimit(value or _RECURSION[0]),
    ),
    function("digits of integers", "sys", "get_int_max_str_digits", "set_int_max_str_digits", 4300),
    LOGGING,
    # tensors and arrays
    *TORCH_SETTINGS,
    keywords("numpy printing", "numpy", lambda numpy: numpy.get_printoptions(), "set_printoptions", _NUMPY_PRINTING),
    keywords("numpy errors", "numpy", lambda numpy: numpy.geterr(), "seterr", _NUMPY_ERRORS),
    LibrarySetting(name="jax", library="jax", read=_read_jax, write=_write_jax),
    function("keras floats", "keras", "config.floatx", "config.set_floatx", "float32"),
    function("keras images", "keras", "config.image_data_format", "config.set_image_data_format", "channels_last"),
    LibrarySetting(
        name="keras dtypes",
        library="keras",
        read=_read_dtype_of_keras,
        write=lambda keras, value: keras.config.set_dtype_policy(value or keras.config.floatx()),
    ),
    function("tensorflow eager", "tensorflow", "config.functions_run_eagerly", "config.run_functions_eagerly", False),
    # tables, learning, pictures
    *DISPLAY_SETTINGS,
    keywords("scikit-learn", "sklearn", lambda sklearn: sklearn.get_config(), "set_config", _SKLEARN),
    keywords("xgboost", "xgboost.config", lambda config: config.get_config(), "set_config", {"verbosity": 1}),
    attribute("plotly", "plotly.io", "templates.default", "plotly"),
    attribute("truncated images", "PIL.ImageFile", "LOAD_TRUNCATED_IMAGES", False),
    attribute("size of images", "PIL.Image", "MAX_IMAGE_PIXELS", 89_478_485),
    LibrarySetting(
        name="threads of OpenCV",
        library="cv2",
        read=_read_threads_of_cv2,
        write=lambda cv2, value: cv2.setNumThreads(value or cv2.getNumberOfCPUs()),
    ),
    # the output of libraries; their import sets the levels of their loggers
    *(
        function(f"verbosity of {library}", f"{library}.{module}", "get_verbosity", "set_verbosity", default)
        for library, module, default in (
            ("transformers", "utils.logging", 30),
            ("datasets", "utils.logging", 30),
            ("diffusers", "utils.logging", 30),
            ("huggingface_hub", "utils.logging", 30),
            ("optuna", "logging", 20),
        )
    ),
    *(
        switch(
            f"progress bars of {library}",
            f"{library}.utils.logging",
            "is_progress_bar_enabled",
            "enable_progress_bar",
            "disable_progress_bar",
            default=True,
        )
        for library in ("transformers", "diffusers")
    ),
    *(
        switch(
            f"progress bars of {library}",
            f"{library}.utils.tqdm",
            "are_progress_bars_disabled",
            "disable_progress_bars",
            "enable_progress_bars",
            default=False,
        )
        for library in ("datasets", "huggingface_hub")
    ),
    switch(
        "cache of datasets",
        "datasets.fingerprint",
        "is_caching_enabled",
        "enable_caching",
        "disable_caching",
        default=True,
    ),
)
"""The table of all settings that are copied."""
_BY_LIBRARY = {
    library: [each for each in SETTINGS if each.library == library]
    for library in dict.fromkeys(each.library for each in SETTINGS)
}

_STAY: dict[str, Callable[[Any], Iterable[str]]] = {
    "torch": _device_of_torch,
    "pandas": functions_of_pandas,
    "numpy": _formatter_of_numpy,
    "matplotlib": parameters_that_stay,
    "pyro": _parameters_of_pyro,
    "gin": _parameters_of_gin,
    "logging": handlers_that_stay,
}
"""The functions that yield a sentence for each setting that is not copied, by the module that has it."""
