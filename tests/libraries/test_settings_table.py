"""Each row of the table of settings, from a process that has set something to one that imports the library later."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.notebook import ROOT

CASES = {
    "numpy errors": ("import numpy", "numpy.seterr(all='raise')", "numpy.geterr()['under']", "'raise'"),
    "matmul precision": (
        "import torch",
        "torch.set_float32_matmul_precision('high')",
        "torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32",
        "('high', True)",
    ),
    "precision by place": (
        "import torch",
        "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
        "torch.backends.cuda.matmul.fp32_precision",
        "'tf32'",
    ),
    "deterministic": (
        "import torch",
        "torch.use_deterministic_algorithms(True, warn_only=True)",
        "torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()",
        "(True, True)",
    ),
    "anomaly": (
        "import torch",
        "torch.autograd.set_detect_anomaly(True, check_nan=False)",
        "torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()",
        "(True, False)",
    ),
    "cudnn": (
        "import torch",
        "torch.backends.cudnn.benchmark = True; torch.backends.cudnn.allow_tf32 = False",
        "torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic",
        "(True, False, False)",
    ),
    "attention": (
        "import torch",
        "torch.backends.cuda.enable_flash_sdp(False)",
        "torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()",
        "(False, True)",
    ),
    "gradients": ("import torch", "torch.set_grad_enabled(False)", "torch.is_grad_enabled()", "False"),
    "sharing": (
        "import torch.multiprocessing as mp",
        "mp.set_sharing_strategy('file_system')",
        "mp.get_sharing_strategy()",
        "'file_system'",
    ),
    "sklearn": (
        "import sklearn",
        "sklearn.set_config(transform_output='pandas', assume_finite=True)",
        "sklearn.get_config()['transform_output'], sklearn.get_config()['assume_finite']",
        "('pandas', True)",
    ),
    "matplotlib": (
        "import matplotlib; import matplotlib.pyplot as plt",
        "plt.style.use('ggplot'); plt.rcParams['figure.figsize'] = 3, 4",
        "plt.rcParams['figure.figsize'], plt.rcParams['axes.prop_cycle'].by_key()['color'][0]",
        "([3.0, 4.0], '#E24A33')",
    ),
    "recursion": ("import sys", "sys.setrecursionlimit(5000)", "sys.getrecursionlimit()", "5000"),
    "csv": ("import csv", "csv.field_size_limit(10**9)", "csv.field_size_limit()", "1000000000"),
    "decimal": (
        "import decimal",
        "decimal.getcontext().prec, decimal.getcontext().rounding = 5, 'ROUND_DOWN'; decimal.getcontext().traps[decimal.Inexact] = True",
        "decimal.getcontext().prec, decimal.getcontext().rounding, decimal.getcontext().traps[decimal.Inexact], decimal.getcontext().traps[decimal.Overflow]",
        "(5, 'ROUND_DOWN', True, True)",
    ),
    "locale": (
        "import locale",
        "locale.setlocale(locale.LC_NUMERIC, 'C.UTF-8')",
        "locale.setlocale(locale.LC_NUMERIC), locale.setlocale(locale.LC_TIME)",
        "('C.UTF-8', 'C')",
    ),
    "certificates": (
        "import ssl",
        "ssl._create_default_https_context = ssl._create_unverified_context",
        "ssl._create_default_https_context().check_hostname",
        "False",
    ),
    "numpy of old": ("import numpy", "numpy.set_printoptions(legacy='1.25')", "repr(numpy.float64(1))", "'1.0'"),
    "disabled loggers": (
        "import logging",
        "logging.getLogger('mine'); import logging.config; logging.config.dictConfig({'version': 1})",
        "logging.getLogger('mine').disabled",
        "True",
    ),
    "images": (
        "import PIL.Image, PIL.ImageFile",
        "PIL.ImageFile.LOAD_TRUNCATED_IMAGES = True; PIL.Image.MAX_IMAGE_PIXELS = None",
        "PIL.ImageFile.LOAD_TRUNCATED_IMAGES, PIL.Image.MAX_IMAGE_PIXELS",
        "(True, None)",
    ),
    "filters with modules": (
        "import warnings, sklearn.exceptions",
        "warnings.filterwarnings('ignore', module='sklearn')\nwarnings.simplefilter('error', sklearn.exceptions.ConvergenceWarning)",
        "{(e[0], e[2].__name__) for e in warnings.filters} >= {('error', 'ConvergenceWarning'), ('ignore', 'Warning')}",
        "True",
    ),
    "disabled logging": (
        "import logging",
        "logging.disable(logging.ERROR)",
        "logging.root.manager.disable",
        "40",
    ),
    "pandas": (
        "import pandas",
        "pandas.set_option('mode.chained_assignment', 'raise'); pandas.options.display.max_rows = 7",
        "pandas.get_option('display.max_rows'), pandas.get_option('mode.chained_assignment')",
        "(7, 'raise')",
    ),
    "transformers": (
        "import transformers",
        "transformers.logging.set_verbosity_error(); transformers.logging.disable_progress_bar()",
        "transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()",
        "(40, False)",
    ),
    "datasets": (
        "import datasets",
        "datasets.disable_progress_bars(); datasets.disable_caching(); datasets.logging.set_verbosity_info()",
        "datasets.are_progress_bars_disabled(), datasets.is_caching_enabled(), datasets.logging.get_verbosity()",
        "(True, False, 20)",
    ),
    "huggingface_hub": (
        "from huggingface_hub import utils",
        "utils.disable_progress_bars(); utils.logging.set_verbosity_error()",
        "utils.are_progress_bars_disabled(), utils.logging.get_verbosity()",
        "(True, 40)",
    ),
    "plotly": (
        "import plotly.io, plotly.graph_objects",
        "plotly.io.templates.default = 'plotly_dark'",
        "plotly.io.templates.default",
        "'plotly_dark'",
    ),
    "optuna": ("import optuna", "optuna.logging.set_verbosity(40)", "optuna.logging.get_verbosity()", "40"),
    "cv2": ("import cv2", "cv2.setNumThreads(0)", "cv2.getNumThreads() <= 1", "True"),
    "keras": (
        "import os; os.environ['KERAS_BACKEND'] = 'torch'; import keras",
        "keras.config.set_floatx('float64'); keras.mixed_precision.set_global_policy('mixed_bfloat16')",
        "keras.config.floatx(), keras.mixed_precision.dtype_policy().name",
        "('float64', 'mixed_bfloat16')",
    ),
    "seaborn": (
        "import matplotlib, seaborn",
        "seaborn.set_theme(style='whitegrid', palette='deep')",
        "matplotlib.rcParams['axes.grid'], tuple(matplotlib.rcParams['axes.prop_cycle'].by_key()['color'])[0][0] > 0",
        "(True, True)",
    ),
}
_SETS = """
import json, sys
{imports}
from jupyter_distrib.libraries import settings
before = settings.state().values
{sets}
print(json.dumps([before, settings.state().values, [*settings.state().stay]]))
"""
_HAS = """
import sys
from jupyter_distrib.libraries import settings
from jupyter_distrib.worker.output import displaying
displaying.install()
applied, told = settings.Applied(), {told!r}
loaded = set(sys.modules)
problems = applied.apply(told)
assert not problems, problems
assert not set(sys.modules) - loaded, set(sys.modules) - loaded
{imports}
print(repr(({reads})))
applied.apply({{}})
left = settings.state().values
assert not (told.keys() - {{"logging"}}) & left.keys(), left
"""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_setting_holds_in_a_process_that_imports_its_library_later(case: str) -> None:
    imports, sets, reads, expected = CASES[case]
    for statement in imports.replace(",", ";import").split(";"):
        top = statement.replace("from", "import").split()
        if top[:1] == ["import"] and find_spec(top[1].partition(".")[0]) is None:
            pytest.skip(f"{top[1]} is not installed")

    before, told, stay = json.loads(run(_SETS.format(imports=imports, sets=sets)).splitlines()[-1])
    told = {name: value for name, value in told.items() if before.get(name) != value}
    assert told
    assert stay == []
    there = run(_HAS.format(imports=imports, told=told, reads=reads))

    assert there == expected
