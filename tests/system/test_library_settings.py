"""What is set in libraries, read and set again in another process."""

from __future__ import annotations

import importlib
import json
import logging
import os
import subprocess
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest
import torch

from jupyter_distrib.libraries import settings
from jupyter_distrib.system import file_owner
from tests.notebook import ROOT, Notebook


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    """Put torch, numpy, logging and warnings back."""
    printing, handlers, level = np.get_printoptions(), logging.root.handlers[:], logging.root.level
    with warnings.catch_warnings():
        warnings.resetwarnings()
        yield
    torch.set_default_dtype(torch.float32)
    torch.set_printoptions(profile="default")
    np.set_printoptions(**printing)
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)


@pytest.mark.slow
def test_a_fresh_program_has_nothing_to_tell() -> None:
    program = dedent("""\
        import numpy, torch, logging
        from jupyter_distrib.libraries import settings as library_settings
        print(library_settings.state().values, [*library_settings.state().stay])""")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "{} []\n"


def test_settings_are_the_same_after_a_way_through_json() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_printoptions(precision=2, sci_mode=False)
    np.set_printoptions(precision=3, suppress=True)
    warnings.filterwarnings("ignore", "no thanks", UserWarning)
    warnings.simplefilter("error", RuntimeWarning)
    logging.root.handlers[:] = []
    logging.basicConfig(level=logging.INFO, format="mine %(message)s")
    told = json.loads(json.dumps(settings.state().values))

    applied = settings.Applied()
    applied.apply(told)
    applied.apply({})  # as if the notebook had gone back to the defaults
    assert torch.get_default_dtype() == torch.float32
    assert np.get_printoptions()["precision"] == 8
    warnings.resetwarnings()
    applied.apply(told)

    assert settings.state().values == told
    assert torch.get_default_dtype() == torch.float64
    assert str(torch.tensor([1 / 3])) == "tensor([0.33])"
    assert warnings.filters[0][:3] == ("error", None, RuntimeWarning)


def test_what_nobody_has_set_elsewhere_stays() -> None:
    torch.set_default_dtype(torch.float64)

    settings.Applied().apply({})

    assert torch.get_default_dtype() == torch.float64


@pytest.mark.slow
def test_ranks_have_what_the_notebook_has_set(notebook: Notebook) -> None:
    own = "__import__('jupyter_distrib.libraries.settings', fromlist=['']).state().values"
    assert notebook.ok(own).result == "{}"  # what a kernel's own libraries set costs each new rank a millisecond
    notebook.ok(
        dedent("""\
            import os, logging, torch, numpy
            torch.set_default_dtype(torch.float64)
            numpy.set_printoptions(precision=2)
            logging.basicConfig(level=logging.INFO, format='mine %(message)s')
            os.environ['TZ'] = 'Asia/Tokyo'""")
    )

    there = notebook.ok(
        dedent("""\
            %%distributed --ranks 2
            import logging, time, numpy, torch
            logging.info('heard')
            str(torch.ones(1).dtype), str(numpy.array([1 / 3])), time.tzname[0]""")
    )
    assert there.result == "ranks 0-1: ('torch.float64', '[0.33]', 'JST')"
    assert "mine heard" in there.view

    notebook.ok("torch.set_default_dtype(torch.float32); del os.environ['TZ']")
    back = notebook.ok(
        dedent("""\
            %%distributed --ranks 2
            import time, torch
            str(torch.ones(1).dtype), time.tzname[0] == 'JST'""")
    )
    assert back.result == "ranks 0-1: ('torch.float32', False)"


@pytest.mark.slow
def test_a_default_device_is_said_not_to_be_set(notebook: Notebook) -> None:
    notebook.ok("import torch; torch.set_default_device('meta')")

    cell = dedent("""\
        %%distributed --ranks 1
        import torch
        torch.ones(1).device.type""")
    view = notebook.ok(cell).view

    assert "torch's default device of the notebook, meta, is not set on the ranks: use `device`" in view


@pytest.mark.parametrize(
    ("library", "filled", "told"),
    [
        ("pyro", "get_param_store = lambda: {'w': 1}", "pyro's parameters of the notebook (1) are not on the ranks"),
        ("gin", "config_str = lambda: 'f.x = 5'", "gin's parameters of the notebook are not set on the ranks"),
    ],
)
def test_what_a_library_keeps_for_the_whole_program_is_said_not_to_be_there(
    library: str, filled: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType(library)
    monkeypatch.setitem(sys.modules, library, module)
    assert not any(library in text for text in settings.state().stay)

    exec(filled, vars(module))

    (text,) = (text for text in settings.state().stay if library in text)
    assert text.startswith(told)


def test_levels_of_loggers_travel_and_are_taken_back() -> None:
    mine, other = logging.getLogger("my.training"), logging.getLogger("their.library")
    mine.setLevel(logging.DEBUG)
    told = json.loads(json.dumps(settings.state().values))
    mine.setLevel(logging.NOTSET)
    assert told["logging"]["loggers"]["my.training"] == {"level": logging.DEBUG}
    assert "their.library" not in told["logging"]["loggers"]

    other.setLevel(logging.ERROR)
    applied = settings.Applied()
    applied.apply(told)
    assert mine.level == logging.DEBUG
    applied.apply({})
    assert (mine.level, other.level) == (logging.NOTSET, logging.ERROR)
    other.setLevel(logging.NOTSET)


GET_LOGGER = """
import logging, sys
def get_logger():
    log = logging.getLogger('train')
    log.setLevel(logging.INFO)
    log.propagate = False
    plain, file = logging.StreamHandler(sys.stdout), logging.FileHandler('train.log')
    plain.setFormatter(logging.Formatter('%(levelname)s|%(message)s'))
    file.setFormatter(logging.Formatter('{name}: {message}', style='{'))
    file.setLevel(logging.WARNING)
    for handler in (plain, file):
        log.addHandler(handler)
    return log
log = get_logger()
"""


@pytest.mark.slow
def test_a_logger_has_its_handlers_on_the_ranks(notebook: Notebook, tmp_path: Path) -> None:
    notebook.ok(GET_LOGGER)

    for _ in range(2):
        cell = dedent("""\
            %%distributed --ranks 1
            log.info('heard')
            logging.getLogger('train').warning('kept')""")
        view = notebook.ok(cell).view
        assert view.count("INFO|heard") == 1
        assert view.count("WARNING|kept") == 1
    assert (tmp_path / "train.log").read_text() == "train: kept\n" * 2

    notebook.ok("for handler in list(log.handlers): log.removeHandler(handler)\nlog.propagate = True")
    assert "heard" not in notebook.ok("%%distributed --ranks 1\nlog.info('heard')").text


@pytest.mark.slow
def test_what_the_notebook_logs_into_a_file_the_ranks_do_too(notebook: Notebook, tmp_path: Path) -> None:
    notebook.ok("import logging\nlogging.basicConfig(filename='all.log', level=logging.INFO, format='%(message)s')")

    cell = dedent("""\
        %%distributed --ranks 2
        import logging
        logging.info(f'from {rank}')""")
    view = notebook.ok(cell).view

    assert "from" not in view
    assert sorted((tmp_path / "all.log").read_text().splitlines()) == ["from 0", "from 1"]


@pytest.mark.slow
def test_handlers_that_ranks_cannot_have_are_said_to_stay(notebook: Notebook) -> None:
    notebook.ok("import io, logging\nlogging.getLogger('mine').addHandler(logging.StreamHandler(io.StringIO()))")

    view = notebook.ok("%%distributed --ranks 1\npass").view

    assert "the StreamHandler of the logger 'mine' is not set on the ranks: add it in the cell" in view
    assert "StreamHandler" not in notebook.ok("%%distributed --ranks 1\npass").view, "it is said once"


def test_the_logger_of_a_kernel_of_another_maker_is_its_own(notebook: Notebook) -> None:
    """As the kernel of Spyder has one: `SpyderKernelApp`."""
    notebook.ok("""
        from traitlets.config import Application
        class OtherKernelApp(Application):
            pass
        OtherKernelApp().log.warning("up")""")

    assert "OtherKernelApp" not in notebook.ok("%%distributed --ranks 1\npass").view


def test_a_library_makes_a_logger_of_its_own_class_on_a_rank_too(notebook: Notebook) -> None:
    """As astropy does: it asks its own logger for more than others have, and a rank had made a plain one of that name."""
    notebook.ok("""
        from pathlib import Path
        text = "import logging\\nclass Own(logging.Logger):\\n    def start(self):\\n        self.setLevel(20)\\n"
        text += "before = logging.getLoggerClass()\\nlogging.setLoggerClass(Own)\\nlog = logging.getLogger(__name__)\\n"
        text += "logging.setLoggerClass(before)\\nlog.start()\\n"
        assert Path("own_logger.py").write_text(text)
        import own_logger
        own_logger.log.setLevel(40)""")
    cell = dedent("""\
        %%distributed --ranks 1
        import own_logger
        (type(own_logger.log).__name__, own_logger.log.level)""")
    for _ in range(2):
        assert notebook.ok(cell).result == "rank 0: ('Own', 40)"
    notebook.ok("own_logger.log.setLevel(20)")
    assert notebook.ok(cell).result == "rank 0: ('Own', 20)"


def test_a_logger_of_a_class_from_a_package_that_the_cell_does_not_import_is_set_up(notebook: Notebook) -> None:
    notebook.ok("""
        from pathlib import Path
        Path("mylogs.py").write_text("import logging\\nclass Loud(logging.Logger):\\n    pass\\n")
        import logging, sys, mylogs
        logging.setLoggerClass(mylogs.Loud)
        log = logging.getLogger("my")
        log.setLevel(logging.INFO)
        log.addHandler(logging.StreamHandler(sys.stdout))""")

    cell = "%%distributed --ranks 1\nimport logging\nlogging.getLogger('my').info('heard')"
    assert "heard" in notebook.ok(cell).view


@pytest.mark.parametrize("loaded", [True, False])
def test_loggers_of_libraries_are_not_said_to_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loaded: bool
) -> None:
    """As MLflow sets up those of OpenTelemetry, whose package has no file, and of Huey, which is not loaded yet."""
    (tmp_path / "telemetry_lib").mkdir()
    if not loaded:
        (tmp_path / "telemetry_lib/__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(file_owner, "LIBRARY_FOLDERS", (f"{os.path.realpath(tmp_path)}/",))
    monkeypatch.setattr(file_owner, "is_library", file_owner.is_library.__wrapped__)
    if loaded:
        importlib.import_module("telemetry_lib")
    log = logging.getLogger("telemetry_lib.shared")
    log.addFilter(print)
    try:
        assert not [each for each in settings.state().stay if "telemetry_lib" in each]
    finally:
        log.removeFilter(print)
        sys.modules.pop("telemetry_lib", None)


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("h = logging.StreamHandler(); h.addFilter(print); log.addHandler(h)", "the StreamHandler of the logger 'mine'"),
        ("log.addFilter(print); log.setLevel(10)", "the filter of the logger 'mine' is not set on the ranks"),
        (
            "h = logging.StreamHandler(); h.setFormatter(logging.Formatter('{a}', style='{', defaults={'a': 1})); log.addHandler(h)",
            "the StreamHandler of the logger 'mine'",
        ),
        ("logging.setLoggerClass(type('Own', (logging.Logger,), {}))", "the class of loggers is not set on the ranks"),
        ("logging.setLogRecordFactory(lambda *a, **k: logging.LogRecord(*a, **k))", "the factory of log records is not"),
        ("import numpy; numpy.set_printoptions(formatter={'float': str})", "the functions of numpy.set_printoptions("),
    ],
)  # fmt: skip
def test_functions_and_filters_are_said_to_stay(code: str, sentence: str) -> None:
    program = dedent(f"""\
        import json, logging; log = logging.getLogger('mine'); {code}
        from jupyter_distrib.libraries import settings
        print(json.dumps([settings.state().values.get('logging', {{}}).get('loggers', {{}}), [*settings.state().stay]]))""")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    loggers, told = json.loads(done.stdout)

    assert not loggers.get("mine", {}).get("handlers")
    assert [text for text in told if sentence in text] == told != []


def test_handlers_of_libraries_do_not_come_twice() -> None:
    logger = logging.getLogger("numpy")
    logger.addHandler(handler := logging.StreamHandler())
    try:
        assert "numpy" not in settings.state().values.get("logging", {}).get("loggers", {})
    finally:
        logger.removeHandler(handler)


@pytest.mark.slow
def test_a_setting_that_a_rank_cannot_have_is_said_and_the_cell_runs(notebook: Notebook) -> None:
    notebook.ok(
        "from jupyter_distrib.libraries import settings\n"
        "settings.state = lambda: settings.State(values={'numpy errors': {'divide': 'no such word'}}, stay=())"
    )

    outcome = notebook.ok(
        dedent("""\
            %%distributed --ranks 1
            import numpy
            'ran'""")
    )

    assert outcome.result == "rank 0: 'ran'"
    assert "the notebook's setting of numpy errors cannot be set on this rank" in outcome.view
