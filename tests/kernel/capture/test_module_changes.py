"""What the notebook has changed in modules, classes and registries is said once, in the first cell that may notice it."""

from __future__ import annotations

import ast
import json
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from textwrap import dedent
from types import ModuleType
from typing import Any

import pytest

from jupyter_distrib.kernel.capture import module_changes
from jupyter_distrib.kernel.capture.capture import Input
from jupyter_distrib.kernel.capture.module_changes import ModuleChanges
from tests.notebook import ROOT, Notebook

ORDINARY = """
import os, sys, random, warnings, logging, numpy as np, torch, torch.nn as nn, matplotlib.pyplot as plt, sklearn, PIL.Image
from PIL import Image, ImageFile
from torch.nn import functional as F
from types import SimpleNamespace
from IPython.core.interactiveshell import InteractiveShell
%matplotlib inline
InteractiveShell.ast_node_interactivity = "all"
plt.style.use("ggplot"); plt.rcParams["figure.figsize"] = 3, 4; plt.rcParams.update({"font.size": 9})
np.random.seed(0); torch.manual_seed(0); random.seed(0)
torch.set_float32_matmul_precision("high"); torch.set_printoptions(precision=2)
torch.backends.cudnn.benchmark = True; torch.backends.cudnn.deterministic = False
torch.backends.cuda.matmul.allow_tf32 = True
os.environ["A"] = "b"; sys.path.append("src"); sys.argv = [""]
warnings.filterwarnings("ignore"); logging.root.handlers = []
Image.MAX_IMAGE_PIXELS = None; ImageFile.LOAD_TRUNCATED_IMAGES = True
model = nn.Linear(2, 2); model.training = True; model.register_buffer("b", torch.zeros(1))
model.register_forward_hook(lambda *a: None); model.weight.grad = None; model.weight.data[:] = 1
args = SimpleNamespace(); args.lr = 1; x = torch.zeros(3); x[0] = 1; x.requires_grad = True; x.register_hook(print)
optimizer = torch.optim.SGD(model.parameters(), lr=1); optimizer.param_groups[0]["lr"] = 2
class Own(nn.Module): LR = 1
Own.LR = 2; Own.forward = lambda self, x: x
@torch.no_grad()
def evaluate(): pass
for name in ("a", "b"): args.name = name
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The names of a notebook with modules of the user's own."""
    (tmp_path / "own_config.py").write_text(
        dedent("""\
            LR = 1
            LEVEL = 2
            TABLE = {}
            COUNT = 0
            rate = 0.1
            PATH = None
            _x = 1
            _memo = []
            def count():
                global COUNT
                COUNT += 1
                _memo.append(COUNT)
            def init(path):
                global PATH
                PATH = path
            def loss(): pass
            class Model:
                def forward(self): pass
        """)
    )
    (tmp_path / "own_registry.py").write_text(
        dedent("""\
            class Registry:
                items = {}
                def __init__(self): self.known = []
                def register(self, x): return x
                def add(self, x): self.known.append(x); return x
                @classmethod
                def named(cls, name):
                    return lambda x: cls.items.setdefault(name, x)
            MODELS = Registry()
            def register(x): return x
        """)
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield {"In": [""], "__name__": "__main__"}
    for name in ("own_config", "own_registry"):
        sys.modules.pop(name, None)


def ran(names: dict[str, Any], *cells: str) -> None:
    for cell in cells:
        names["In"].append(cell)
        exec(cell, names)


def said(
    changes: ModuleChanges, names: dict[str, Any], source: str, reads: str = "", setups: tuple[str, ...] = ()
) -> list[str]:
    inputs = [Input(name=each, value=names[each], line=2, certain=True, reason="") for each in reads.split()]
    return changes.sentences(source, inputs, names, lambda: list(setups))


def test_a_constant_is_said_once_with_its_cell_and_line(modules: dict[str, Any]) -> None:
    changes = ModuleChanges()
    ran(modules, "import own_config", "x = 1\nown_config.LR = 3")

    first = said(changes, modules, "own_config.LR", "own_config")

    assert first == [
        (
            "own_config.LR was changed in the notebook (Cell In[2], line 2), and the ranks have 1: "
            "put that line into a cell with %%distributed_setup"
        )
    ]
    assert said(changes, modules, "own_config.LR", "own_config") == []
    ran(modules, "own_config.LR = 4")
    assert "Cell In[3], line 1" in said(changes, modules, "own_config.LR", "own_config")[0]


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ("from own_registry import register\n@register\nclass A: pass", "own_registry.register was called in the notebook (Cell In[2], line 2)"),
        ("import own_registry as r\n@r.MODELS.register\ndef f(): pass", "r.MODELS.register was called"),
        ("from own_registry import MODELS\nMODELS.register(int)", "MODELS.register was called"),
        ("import own_config\nown_config.TABLE['a'] = 1", "own_config.TABLE was changed"),
        ("import own_config\nown_config.TABLE.update(a=1)", "own_config.TABLE was changed"),
        ("import own_config\nif True:\n    setattr(own_config, 'LEVEL', 9)", "own_config.LEVEL was changed"),
        ("import own_config\nvars(own_config)['LEVEL'] = 8", "own_config.LEVEL is 8 in the notebook, and 2 on the ranks"),
        ("vars(own_config)['EXTRA'] = 8", "own_config.EXTRA is 8 in the notebook, and absent on the ranks"),
        ("setattr(own_config, 'ra' + 'te', 0.2)", "own_config.rate is 0.2 in the notebook, and 0.1 on the ranks"),
        ("own_config.init('x')", "own_config.PATH is 'x' in the notebook, and None on the ranks"),
        ("def patch():\n    own_config.loss = lambda: 1\npatch()", "own_config.loss was set in the notebook"),
        ("from unittest import mock\nmock.patch('own_config.loss').start()", "own_config.loss was set in the notebook"),
        ("def patch(cls):\n    cls.forward = lambda self: 1\npatch(own_config.Model)", "own_config.Model.forward was set in"),
        ("for name in ['new']: setattr(own_config, name, patch if 0 else lambda: 1)", "own_config.new was set in the notebook"),
        ("@own_registry.Registry.named('a')\ndef f(): pass", "own_registry.Registry.items holds what the notebook has put"),
        ("@own_registry.MODELS.add\nclass A: pass", "own_registry.MODELS holds what the notebook has put into it"),
        ("from own_registry import Registry\nRegistry.items['b'] = 1", "Registry.items was changed in the notebook"),
        ("import torch.nn as nn\nkept = nn.ReLU.forward\nnn.ReLU.forward = lambda self, x: x", "nn.ReLU.forward was changed"),
        ("import torch\nclass P: pass\ntorch.serialization.add_safe_globals([P])", "torch.serialization.add_safe_globals was called"),
    ],
)  # fmt: skip
def test_each_kind_of_change_is_found(modules: dict[str, Any], cell: str, words: str) -> None:
    ran(modules, "import own_config, own_registry, torch", cell)
    try:
        texts = said(ModuleChanges(), modules, "import own_config, own_registry, torch")
    finally:
        if "kept" in modules:
            modules["nn"].ReLU.forward = modules["kept"]

    assert [text for text in texts if words in text] == texts != []


@pytest.mark.parametrize(
    "holder",
    [
        "distributed(own_config.loss)",
        "distributed(own_config.Model().forward)",
        "functools.partial(own_config.loss)",
        "functools.lru_cache(own_config.loss)",
        "own_config.Model().forward",
        "[own_config.Model()]",
        "(own_config.loss,)",
        "dict(model=own_config.Model())",
    ],
)
def test_a_change_is_said_whatever_leads_to_the_module(modules: dict[str, Any], holder: str) -> None:
    changes = ModuleChanges()
    ran(modules, "import own_config", "own_config.LR = 3")
    ran(
        modules,
        dedent(f"""\
            import functools
            from jupyter_distrib import distributed
            held = {holder}
            del own_config"""),
    )

    assert "own_config.LR was changed" in "".join(said(changes, modules, "held", "held"))


@pytest.mark.parametrize("wraps", ["held", "Callable(held)", "functools.partial(held)"])
def test_a_callable_that_wraps_itself_is_looked_at_once(modules: dict[str, Any], wraps: str) -> None:
    source = f"""\
        import functools, own_config
        class Callable:
            def __init__(self, wrapped): self.__wrapped__ = wrapped
            def __call__(self): pass
        held = Callable(None)
        held.__wrapped__ = {wraps}"""
    ran(modules, dedent(source))

    assert said(ModuleChanges(), modules, "held()", "held") == []


def test_what_has_no_effect_is_not_said(modules: dict[str, Any]) -> None:
    changes = ModuleChanges()
    ran(modules, "import own_config, torch.nn as nn", "own_config.LR = 3; own_config.LR = 1; own_config.count()")
    ran(
        modules,
        dedent("""\
            kept = nn.ReLU.forward
            nn.ReLU.forward = None
            nn.ReLU.forward = kept"""),
    )
    assert said(changes, modules, "own_config.LR", "own_config nn") == []

    ran(modules, "own_config.LR = 3")
    assert said(changes, modules, "own_config.LR", "own_config", setups=("import own_config\nown_config.LR = 3",)) == []
    ran(modules, "own_config.LEVEL = 3")
    assert said(changes, modules, "own_config.LEVEL = 3\nown_config.LEVEL", "own_config") == []
    assert said(changes, modules, "import json") == []


def test_what_a_setup_does_is_not_said(modules: dict[str, Any]) -> None:
    setup = dedent("""\
        import own_registry
        @own_registry.MODELS.add
        class A: pass""")
    ran(modules, "import own_registry", setup)
    assert said(ModuleChanges(), modules, "import own_registry", setups=(setup,)) == []


def test_ordinary_notebooks_raise_no_alarm() -> None:
    names: dict[str, Any] = {"In": [""], "__name__": "__main__"}
    own = ModuleType("__main__")
    names["In"].append(ORDINARY.replace("%matplotlib inline", "get_ipython().run_line_magic('matplotlib', 'inline')"))
    for statement in ast.parse(ORDINARY.replace("%matplotlib inline", "")).body:
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            exec(ast.unparse(statement), names)
    torch, nn = names["torch"], names["nn"]
    names |= {
        "model": nn.Linear(2, 2),
        "x": torch.zeros(3),
        "Own": type("Own", (nn.Module,), {"__module__": "__main__"}),
    }
    del own

    assert said(ModuleChanges(), names, "import torch, numpy, PIL, matplotlib", "torch np nn plt Image F model") == []


@pytest.mark.parametrize("path", sorted((ROOT / "example_notebooks").rglob("*.ipynb")), ids=lambda path: path.stem)
def test_the_example_notebooks_raise_no_alarm(path: Path) -> None:
    cells = ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    names: dict[str, Any] = {"In": ["", *(cell for cell in cells if not cell.startswith("%%"))]}
    for cell in cells:
        with suppress(SyntaxError):
            for statement in ast.parse(cell).body:
                if isinstance(statement, (ast.Import, ast.ImportFrom)):
                    with suppress(ImportError, ModuleNotFoundError):
                        exec(ast.unparse(statement), names)
    modules = [name for name, value in names.items() if isinstance(value, ModuleType)]

    assert said(ModuleChanges(), names, "import torch\n" + "\n".join(cells), " ".join(modules)) == []


def test_a_cell_without_changes_waits_less_than_two_milliseconds(modules: dict[str, Any]) -> None:
    changes = ModuleChanges()
    ran(modules, "import own_config, own_registry, torch", "own_config.LR = 3", *["value = torch.zeros(1)"] * 200)
    said(changes, modules, "own_config.LR", "own_config torch")
    times = []
    for _ in range(20):
        began_s = time.perf_counter()
        said(changes, modules, "own_config.LR\n" * 20, "own_config torch")
        times.append(time.perf_counter() - began_s)
    assert min(times) < 0.002


@pytest.mark.slow
def test_the_first_cell_that_reads_it_says_it(notebook: Notebook, tmp_path: Path) -> None:
    (tmp_path / "config.py").write_text("LR = 1\n")
    notebook.ok(
        dedent("""\
            import config, json
            config.LR = 3
            def read(): return config.LR""")
    )

    assert notebook.ok("%%distributed --ranks 1\njson.dumps(1)").view == ""
    view = notebook.ok("%%distributed --ranks 1\nread()").view
    assert "config.LR was changed in the notebook (Cell In[" in view
    assert "line 2), and the ranks have 1: put that line into a cell with %%distributed_setup" in view
    assert notebook.ok("%%distributed --ranks 1\nread()").view == ""
    notebook.ok("%%time\nconfig.LR = 4")
    called = notebook.ok("from jupyter_distrib import distributed\ndistributed(ranks=1)(read).distributed()")
    assert "config.LR was changed in the notebook" in called.view


def test_the_imports_of_a_cell_are_found_and_empty_lines_take_no_time() -> None:
    began_s = time.perf_counter()
    source = (
        dedent("""\
            import a.b, c as d;  import e
            if x:
                from f.g import h
        """)
        + "\n" * 300_000
    )
    assert [*module_changes._imported_modules(source)] == ["a.b", "c", "e", "f.g"]
    assert time.perf_counter() - began_s < 5
