"""`@distributed`, `prepare` and `--strategy ddp`, from a notebook and from a script."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from textwrap import dedent

import pytest

from jupyter_distrib import GPUType, distributed
from jupyter_distrib.errors import OptionsError
from jupyter_distrib.kernel.notebook import decorator
from tests.notebook import ROOT, Notebook
from tests.processes import wait_until

DDP = "%%distributed --ranks 2 --strategy ddp\n"


@pytest.fixture
def book(shared_notebook: Notebook) -> Iterator[Notebook]:
    """The kernel of this module, without the names of other tests."""
    yield shared_notebook
    shared_notebook.forget()


def run(script: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *command, str(script)],
        cwd=script.parent, env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------- @distributed


def test_a_function_runs_on_every_rank_with_its_arguments(book: Notebook) -> None:
    book.ok("""
from jupyter_distrib import distributed
scale = 10
@distributed(ranks=2)
def work(x, *, plus=0):
    "Works."
    import os
    return int(os.environ["RANK"]) * scale + x + plus
""")

    assert book.ok("work.distributed(1, plus=2)").result == "rank 0: 3\nrank 1: 13"
    assert book.ok("list(work.distributed(x=1)), work.__name__, work.__doc__").result == "([1, 11], 'work', 'Works.')"


def test_a_method_runs_with_its_object_and_a_class_method_with_its_class(book: Notebook) -> None:
    book.ok("""
from jupyter_distrib import distributed
class Trainer:
    def __init__(self, width):
        self.width = width
    @distributed(ranks=1)
    def fit(self, steps):
        self.width += 1
        return self.width * steps * self.half.function(8)
    @distributed(ranks=1)
    @staticmethod
    def half(x):
        return x // 2
    @distributed(ranks=1)
    @classmethod
    def make(cls, x):
        return cls.__name__, x
class Longer(Trainer):
    @distributed(ranks=1)
    def fit(self, steps):
        return super().fit(steps) + 0.5
trainer = Trainer(5)
""")

    assert book.ok("trainer.fit.distributed(2)[0], trainer.fit.submit(steps=2).result()[0]").result == "(48, 48)"
    assert book.ok("trainer.fit(2), Trainer.fit(trainer, 2), trainer.width").result == "(48, 56, 7)"
    assert book.ok("Longer(5).fit.distributed(2)[0], Trainer.half.distributed(8)[0]").result == "(48.5, 4)"
    assert book.ok("Longer.make.distributed(1)[0], trainer.make(2)").result == "(('Longer', 1), ('Trainer', 2))"
    assert "the function is fit(steps)" in book.fails("trainer.fit.distributed()").evalue


def test_a_call_tells_of_arguments_that_it_has_changed_on_the_ranks_only(book: Notebook) -> None:
    book.ok("""
import torch
from jupyter_distrib import distributed
@distributed(ranks=2, strategy="ddp")
def train(net, losses, *, returns, **others):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loss = net(torch.ones(2, 2)).sum()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    return (net.state_dict(), losses) if returns else None
class Trainer:
    steps = 0
    @distributed(ranks=1)
    def fit(self):
        self.steps += 1
""")
    told = book.ok("train.distributed(torch.nn.Linear(2, 1), losses=[], returns=False, lr=1)").view
    returned = book.ok("train.distributed(torch.nn.Linear(2, 1), [], returns=True);").view
    method = book.ok("Trainer().fit.distributed()").view

    assert "`net` of the notebook is as it was before: the function has trained its copies on the ranks." in told
    assert "For the trained one return it from the function" in told
    assert "`losses` of the notebook is as before: the function has changed copies on the ranks." in told
    assert "To have the changes, return it from the function" in told
    assert "--keep" not in told
    assert "of the notebook" not in returned
    assert "`self` of the notebook is as before" in method


@pytest.mark.parametrize(
    "call", ["work.distributed(2)", "work.submit(2)", "partly.distributed(2)", "later.distributed()"]
)
def test_a_generator_function_is_refused_since_none_of_it_would_run(book: Notebook, call: str) -> None:
    book.ok("""
import functools
from jupyter_distrib import distributed
@distributed(ranks=1)
def work(epochs):
    for epoch in range(epochs):
        yield epoch
partly = distributed(ranks=1)(functools.partial(work))
@distributed(ranks=1)
async def later():
    yield 1
""")

    outcome = book.fails(call)

    assert outcome.ename == "TypeError"
    assert "() is a generator function: a call runs none of its lines" in outcome.evalue
    assert book.ok("list(work(2))").result == "[0, 1]"


def test_a_submitted_call_gives_a_value_for_each_rank_even_if_it_is_none(book: Notebook) -> None:
    book.ok(
        dedent("""\
            from jupyter_distrib import distributed
            @distributed(ranks=2)
            def work(x): return x""")
    )

    assert (
        book.ok("run = work.submit(None)\nrun.result()[1] is None, list(run.result())").result == "(True, [None, None])"
    )
    assert (
        book.ok("list(await work.submit(None)), list(work.distributed(None))").result == "([None, None], [None, None])"
    )


def test_a_parameter_may_be_called_self(book: Notebook) -> None:
    book.ok(
        dedent("""\
            from jupyter_distrib import distributed
            @distributed(ranks=1)
            def work(self): return self""")
    )

    assert book.ok("work.distributed(self=1)[0], work.submit(self=2).result()[0], work(self=3)").result == "(1, 2, 3)"


def test_a_decorated_function_runs_here_and_on_every_rank_only_when_told_to(book: Notebook) -> None:
    book.ok("""
from jupyter_distrib import distributed
@distributed(ranks=2)
def work(x, *, plus=0):
    "Works."
    import os
    return os.getpid(), os.environ.get("RANK", "none"), x + plus
""")

    assert book.ok("work(1, plus=2)[1:], work(1)[0] == __import__('os').getpid()").result == "(('none', 3), True)"
    assert book.ok("[value[1:] for value in work.distributed(1, plus=2)]").result == "[('0', 3), ('1', 3)]"
    assert book.ok("work.__name__, work.__doc__, work.__wrapped__(1)[1]").result == "('work', 'Works.', 'none')"


def test_a_plain_call_that_needs_a_rank_says_how_to_call_it(book: Notebook) -> None:
    book.ok("""
        from jupyter_distrib import distributed
        @distributed(ranks=2)
        def shown(what):
            return what, rank, world_size""")

    failure = book.fails("shown(1)").traceback
    assert "NameError: name 'rank' is not defined" in failure
    assert "shown(...) runs in this process; shown.distributed(...) runs on the ranks, which have `rank`." in failure
    assert book.ok("shown.distributed(1)[1]").result == "(1, 1, 2)"


def test_notes_name_the_lines_of_the_function(book: Notebook) -> None:
    """They had named line 1, that of the call, for whatever the function does."""
    book.ok("""
        import torch
        from jupyter_distrib import distributed

        def optimizer_of(model):
            return torch.optim.SGD(model.parameters(), lr=0.1)

        @distributed(ranks=2, strategy="ddp")
        def train():
            model = torch.nn.Linear(1, 1)
            optimizer = optimizer_of(model)
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()""")

    assert re.search(r"Linear wrapped \(optimizer of Cell In\[\d+\], line 10\)", book.ok("train.distributed()").view)


def test_the_decorator_may_stand_without_parentheses() -> None:
    @distributed
    def work() -> int:
        return 5

    assert work() == 5
    assert work.options == distributed()(work.function).options
    with pytest.raises(OptionsError, match="distributed takes its options by name, as in distributed"):
        distributed(8)


def test_the_runs_of_several_calls_are_told_apart_by_their_arguments() -> None:
    @dataclass
    class Config:
        lr: float = 0.1
        depth: int = 2
        weights: object = None

    def train(config: object, db_token: str | None = None, **more: object) -> None:
        pass

    assert decorator._call(train, "train", (Config(lr=0.5, weights=object()),), {}) == "train(Config(lr=0.5))"
    assert decorator._call(train, "train", ({"lr": 1},), {"sizes": [3, 4]}) == "train({'lr': 1}, sizes=[3, 4])"
    assert decorator._call(train, "train", ([object()], None), {"x": b""}) == "train(<list>, None, x=<bytes>)"
    assert "hunter2" not in decorator._call(train, "train", (1, "hunter2"), {"password": "hunter2"})


def test_each_rank_has_a_value_and_none_is_one(book: Notebook) -> None:
    book.ok(
        dedent("""\
            from jupyter_distrib import distributed
            @distributed(ranks=2)
            def first(x): return x if rank == 0 else None""")
    )

    assert book.ok("values = first.distributed(7)\nlist(values), values[0], len(values)").result == "([7, None], 7, 2)"


SIGNATURE = """\
from jupyter_distrib import distributed
@distributed(ranks=2)
def work(x, *, lr=0.1): return x"""


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("distributed()", "work.distributed(): missing a required argument: 'x'; the function is work(x, *, lr=0.1)"),
        ("distributed(1, 2)", "work.distributed(): too many positional arguments; the function is work(x, *, lr=0.1)"),
        (
            "submit(1, rate=2)",
            "work.submit(): got an unexpected keyword argument 'rate'; the function is work(x, *, lr",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_a_type_error_before_anything_starts(
    book: Notebook, call: str, message: str
) -> None:
    book.ok("%distributed_pool stop")
    book.ok(SIGNATURE)

    outcome = book.fails(f"work.{call}")

    assert (outcome.ename, message in outcome.evalue) == ("TypeError", True), outcome.text
    assert "No ranks are up" in book.ok("%distributed_status").result


def test_to_start_ranks_from_a_rank_is_refused_with_the_call_to_write(book: Notebook) -> None:
    book.ok(
        dedent("""\
            from jupyter_distrib import distributed
            @distributed(ranks=2)
            def inner(): return 5""")
    )

    outcome = book.fails("%%distributed --ranks 2\ninner.distributed()")

    assert outcome.ename == "DistributedError"
    assert "inner.distributed() starts ranks, and this is a rank: call inner() here." in outcome.traceback


def test_a_function_that_takes_too_long_is_stopped(book: Notebook) -> None:
    book.ok(
        dedent("""\
            from jupyter_distrib import distributed
            @distributed(ranks=2, timeout=0.2)
            def work():
                import time
                while True: time.sleep(0.01)""")
    )

    outcome = book.fails("work.distributed()")

    assert outcome.ename == "RunTimeout"
    assert "because its timeout_s is 0.2 s." in outcome.evalue


def test_a_call_that_would_send_too_much_is_refused_with_the_names(book: Notebook) -> None:
    book.ok("import torch\ndata, small = torch.zeros(1_000_000), torch.zeros(10)")
    book.ok(
        dedent("""\
            from jupyter_distrib import distributed
            @distributed(ranks=2, max_capture='1MB')
            def work(x): return len(x) + len(data) + len(small)""")
    )

    refused = book.fails("work.distributed(small)")

    assert refused.ename == "CaptureError"
    assert "`data` (4.0 MB" in refused.evalue
    assert "no more than 1.0 MB may be sent (max_capture)" in refused.evalue
    assert "small" not in refused.evalue
    assert "the arguments (4.0 MB)" in book.fails("data, big = small, data\nwork.distributed(big)").evalue
    assert book.fails("%%distributed --ranks 2 --max-capture 1MB\nlen(big)").ename == "CaptureError"
    assert book.ok("%%distributed --ranks 2 --max-capture 5MB\nlen(big)").result == "ranks 0-1: 1000000"


@pytest.mark.slow
def test_remote_and_here_choose_the_pool(tmp_path: Path) -> None:
    settings = tmp_path / "pools.toml"
    settings.write_text('pool = "lab"\n[pools.lab]\nkind = "local"\nranks = 1\n')
    define = dedent("""\
        from jupyter_distrib import distributed
        @distributed(remote={}, ranks=1)
        def work(): return 1""")
    with Notebook(tmp_path, {"JUPYTER_DISTRIB_CONFIG": str(settings)}) as book:
        book.ok("%load_ext jupyter_distrib")
        message = f'add the line remote = "NAME" at the top of {settings}'
        assert message in book.fails(define.format(True)).evalue
        settings.write_text('pool = "lab"\nremote = "far"\n[pools.lab]\nkind = "local"\n[pools.far]\nkind = "local"\n')
        book.ok(define.format(True))
        assert book.ok("run = work.submit()\n(run.pool, list(run.result()))").result == "('far', [1])"
        book.ok(define.format(False))
        assert book.ok("run = work.submit()\n(run.pool, list(run.result()))").result == "('local', [1])"


TRAIN = """
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from jupyter_distrib import distributed
@distributed(ranks=2, wait_s={wait_s})
def train(number):
    import os, time
    open({folder!r} + "/began", "w").close()
    while number is None and not os.path.exists({folder!r} + "/go"):
        time.sleep(0.01)
    return number
"""


def test_one_of_two_calls_at_once_has_the_ranks_and_the_other_is_told(book: Notebook, tmp_path: Path) -> None:
    book.ok(TRAIN.format(wait_s=None, folder=str(tmp_path)))
    book.ok("calls = [ThreadPoolExecutor(2).submit(train.distributed, None) for _ in range(2)]")
    book.ok("(refused,), (first,) = wait(calls, return_when=FIRST_COMPLETED, timeout=30)")
    said = book.ok("print(repr(refused.exception()))").stdout
    assert said.startswith("PoolError(")
    assert "on these ranks" in said
    assert wait_until((tmp_path / "began").exists)
    refused = book.fails("train.distributed(1)")
    assert refused.ename == "PoolError"
    assert re.fullmatch(
        r"train\(\) is still running on these ranks \(run (\S+)\): wait for it with wait_s=S, see it with "
        r"`%distributed_status`, or stop it with `%distributed_pool stop`\.",
        refused.evalue,
    )
    assert "train() is still running on these ranks" in book.fails("%%distributed --ranks 2 --fresh\nrank").evalue
    (tmp_path / "go").touch()

    assert book.ok("list(first.result(30))").result == "[None, None]"
    assert book.ok("train.distributed(2)").result == "ranks 0-1: 2"


def test_calls_at_once_take_turns_if_they_may_wait(book: Notebook, tmp_path: Path) -> None:
    book.ok(TRAIN.format(wait_s=60, folder=str(tmp_path)))
    values = book.ok("[list(each) for each in ThreadPoolExecutor(4).map(train.distributed, range(6))]").result

    assert values == "[[0, 0], [1, 1], [2, 2], [3, 3], [4, 4], [5, 5]]"


def test_a_run_that_nobody_came_to_wait_for_makes_room(book: Notebook, tmp_path: Path) -> None:
    """As after an interrupt between its start and the wait for its end."""
    book.ok(TRAIN.format(wait_s=None, folder=str(tmp_path)))
    book.ok("left = train.start((None,), {})")

    assert book.ok("train.distributed(3)").result == "ranks 0-1: 3"
    assert book.ok("left.wait_ended(30)").result == "True"


def test_a_function_that_returns_nothing_gives_results_of_nothing(book: Notebook) -> None:
    book.ok(
        dedent("""\
            from jupyter_distrib import distributed
            @distributed(ranks=2)
            def work(): print('hello')""")
    )

    outcome = book.ok("list(work.distributed())")

    assert outcome.result == "[None, None]"
    assert "[0-1] hello" in outcome.view


def test_a_functions_failure_is_raised_with_its_own_lines(book: Notebook) -> None:
    book.ok(
        dedent("""\
            from jupyter_distrib import distributed
            @distributed(ranks=2)
            def work(x):
                return 1 / x""")
    )

    outcome = book.fails("work.distributed(0)")

    assert outcome.ename == "ZeroDivisionError"
    assert "in work(" in outcome.traceback
    assert "return 1 / x" in outcome.traceback
    assert "__function__" not in outcome.traceback


def test_a_submitted_function_gives_a_run(book: Notebook) -> None:
    book.ok(
        dedent("""\
            from jupyter_distrib import distributed
            @distributed(ranks=2)
            def work(x): return x""")
    )

    assert book.ok("job = work.submit(4)\nlist(job.result(timeout_s=20))").result == "[4, 4]"


def test_a_function_takes_instances_of_the_notebooks_classes_and_returns_them(book: Notebook) -> None:
    book.ok("""
from jupyter_distrib import distributed
class Config:
    lr = 0.1
@distributed(ranks=2)
def work(config):
    config.lr *= 2
    return config
mine = Config()
back = work.distributed(mine)
""")

    assert book.ok("type(back[0]) is Config, back[1].lr, mine.lr").result == "(True, 0.2, 0.1)"


def test_a_function_takes_a_handle_to_a_kept_value(book: Notebook) -> None:
    book.ok("%%distributed --ranks 2 --keep table\ntable = [rank]")
    book.ok(
        dedent("""\
            from jupyter_distrib import distributed
            @distributed(ranks=2)
            def look(x): return x""")
    )

    assert book.ok("look.distributed(table)").result == "rank 0: [0]\nrank 1: [1]"


def test_an_argument_that_cannot_be_sent_is_named(book: Notebook) -> None:
    book.ok(
        dedent("""\
            import threading
            from jupyter_distrib import distributed
            @distributed(ranks=2)
            def work(x): return x""")
    )

    outcome = book.fails("work.distributed({'a': (i for i in ())})")

    assert outcome.ename == "PayloadError"
    assert outcome.evalue.startswith("`args` holds a generator at args[0]['a'], which cannot be sent to the ranks")
    assert outcome.evalue.endswith("Build it inside the function.")


def test_a_function_of_a_local_module_runs_with_the_modules_own_globals(book: Notebook) -> None:
    folder = Path(ast.literal_eval(book.ok("import os\nos.getcwd()").result))
    (folder / "jobs_of_api.py").write_text(
        dedent("""\
            import threading
            from jupyter_distrib import distributed
            LOCK = threading.Lock()
            SCALE = 3
            @distributed(ranks=2)
            def work(x):
                with LOCK:
                    return x * SCALE, __name__
        """)
    )
    book.ok("import jobs_of_api")

    assert book.ok("jobs_of_api.work.distributed(2)").result == "ranks 0-1: (6, 'jobs_of_api')"
    assert book.ok("from jobs_of_api import work\nwork.distributed(2)[1][0]").result == "6"
    assert book.ok("%%distributed --ranks 2\nwork(5)[0]").result == "ranks 0-1: 15"


def test_autoreload_brings_an_imported_function_up_to_date(tmp_path: Path) -> None:
    text = dedent("""\
        from jupyter_distrib import distributed
        SIZE = 1
        @distributed(ranks=1)
        def told(): return 'old', SIZE
    """)
    (tmp_path / "reloaded.py").write_text(text)
    with Notebook(tmp_path) as book:
        book.ok(
            dedent("""\
                %load_ext autoreload
                %autoreload 2
                from reloaded import told
                held = [told]""")
        )
        assert book.ok("told.distributed(), told()").result == "(rank 0: ('old', 1), ('old', 1))"
        (tmp_path / "reloaded.py").write_text(text.replace("old'", "new'").replace("SIZE = 1", "SIZE = 20"))
        assert book.ok("told.distributed(), held[0]()").result == "(rank 0: ('new', 20), ('new', 20))"


def test_a_function_of_a_module_made_by_hand_is_sent(book: Notebook) -> None:
    code = dedent("""\
        from jupyter_distrib import distributed
        SIZE = 4
        @distributed(ranks=1)
        def size(): return SIZE, inner()
        def inner(): return SIZE
    """)
    book.ok(
        dedent(f"""\
            import sys, types
            made = sys.modules['made_by_hand'] = types.ModuleType('made_by_hand')
            exec({code!r}, vars(made))
            made.SIZE = 9""")
    )
    assert book.ok("made.size.distributed()").result == "rank 0: (9, 9)"
    assert book.ok("%%distributed --ranks 1\nmade.size()").result == "rank 0: (9, 9)"
    book.ok("del sys.modules['made_by_hand']")


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"gpu": 2}, "did you mean gpus?"),
        ({"strategy": "dpd"}, "did you mean 'ddp'?|did you mean ddp?"),
        ({"ranks": 0}, "ranks must be a whole number, at least 1"),
        ({"keep": "model"}, "keep is an option of cells only: a function has arguments and a return value instead"),
        ({"out": "x"}, "out is an option of cells only"),
        ({"explain": True}, "explain is an option of cells only"),
        ({"with_": "x"}, "with_ is an option of cells only"),
        ({"remote": True, "pool": "local"}, "remote and pool both choose where the ranks are"),
        ({"remote": "yes"}, "remote must be True or False; got 'yes'"),
        ({"timeout": 3, "timeout_s": 3}, "timeout and timeout_s are the same option: leave one of them out"),
        ({"timeout": "soon"}, "timeout_s must be a number of seconds above 0; got 'soon'"),
        ({"max_capture": "much"}, "max_capture must be a size such as 500MB or 1GB; got 'much'"),
        ({"max_capture": 0}, "max_capture must be a size such as 500MB or 1GB; got '0'"),
    ],
)
def test_a_wrong_keyword_is_refused_at_once(keywords: dict[str, object], message: str) -> None:
    with pytest.raises(OptionsError) as caught:
        distributed(**keywords)
    assert any(part in str(caught.value) for part in message.split("|"))


def test_a_class_is_refused_with_where_to_put_the_decorator() -> None:
    class Trainer:
        pass

    for decorate in (distributed, distributed(ranks=1)):
        with pytest.raises(OptionsError, match="Trainer is a class, and ranks run functions: put @distributed above"):
            decorate(Trainer)


class Accelerator(Enum):
    """An enumeration of another library."""

    A10 = "a10"


@pytest.mark.parametrize("given", ["A10", "a10", GPUType.A10, Accelerator.A10])
def test_a_gpu_type_is_a_text_or_a_member_of_any_enumeration(given: object) -> None:
    function = distributed(gpu_type=given)(len)

    assert (function.options.gpu_type or "").upper() == "A10"
    assert type(function.options.gpu_type) is str


SCRIPT = """
import os
from jupyter_distrib import distributed

offset = 100

class Point:
    def __init__(self, x):
        self.x = x

@distributed(ranks=2)
def work(x):
    print("on rank", os.environ["RANK"])
    return Point(x + offset + int(os.environ["RANK"]))

results = work.distributed(1)
print([type(point) is Point for point in results], [point.x for point in results])
"""


@pytest.mark.slow
def test_a_plain_script_can_call_a_distributed_function(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)

    done = run(tmp_path / "script.py")

    assert (done.returncode, done.stderr) == (0, "")
    assert "[1] on rank 1\n" in done.stdout
    assert "[True, True] [101, 102]\n" in done.stdout


@pytest.mark.slow
def test_a_script_run_by_ipython_can_call_a_distributed_function(tmp_path: Path) -> None:
    (tmp_path / "script.ipy").write_text(SCRIPT)

    done = run(tmp_path / "script.ipy", "-m", "IPython", "--no-banner", "--colors=NoColor")

    assert "[True, True] [101, 102]\n" in done.stdout, done.stdout + done.stderr


def test_a_scripts_failure_is_its_own_exception_with_a_plain_traceback(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        dedent("""\
            from jupyter_distrib import distributed
            @distributed(ranks=2)
            def work(x):
                return 1 / x
            try:
                work.distributed(0)
            except ZeroDivisionError as error:
                print('caught', error, error.rank in (0, 1))
            work.distributed(0)
        """)
    )

    done = run(tmp_path / "script.py")

    assert done.returncode == 1
    assert "caught division by zero True" in done.stdout
    assert "ZeroDivisionError: division by zero" in done.stderr


# ---------------------------------------------------------------------------------------------------- prepare, ddp


TRAINING = """
import copy, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
features, targets = torch.randn(64, 6), torch.randn(64, 2)
model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))

def optimizer_of(model):
    if kind == "adam":
        return torch.optim.Adam(model.parameters(), lr=1e-2)
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)

def train(model, optimizer, loader, start=lambda epoch: None):
    for epoch in range(2):
        start(epoch)
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])
"""
BY_HAND = """
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler
wrapped = DistributedDataParallel(copy.deepcopy(model))
data = TensorDataset(features, targets)
sampler = DistributedSampler(data, world_size, rank, shuffle=True)
train(wrapped, optimizer_of(wrapped), DataLoader(data, batch_size=8, sampler=sampler), sampler.set_epoch)
weights(wrapped)
"""
PREPARED = """
optimizer = optimizer_of(model)
loader = DataLoader(TensorDataset(features, targets), batch_size=8, shuffle=True)
train(*jupyter_distrib.prepare(model, optimizer, loader))
weights(model)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_a_prepared_program_gives_the_weights_of_hand_written_data_parallelism(book: Notebook, kind: str) -> None:
    book.ok(TRAINING + f"kind = {kind!r}")
    book.ok("%%distributed --ranks 2 --strategy ddp --out by_hand\n" + BY_HAND)
    book.ok("%%distributed --ranks 2 --strategy ddp --out prepared\n" + PREPARED)

    assert book.ok(
        "torch.equal(*by_hand), torch.equal(*prepared), torch.allclose(weights(model), by_hand[0])"
    ).result == ("(True, True, False)")
    assert float(book.ok("(by_hand[0] - prepared[0]).abs().max().item()").result) < 1e-6


def test_a_prepared_loader_gives_each_rank_its_share_shuffled_anew(book: Notebook) -> None:
    body = """
from torch.utils.data import DataLoader
loader = jupyter_distrib.prepare(DataLoader(list(range(20)), batch_size=2, shuffle=True))
epochs = [[x for batch in loader for x in batch.tolist()] for _ in range(2)]
len(loader), epochs
"""
    book.ok("import jupyter_distrib")
    book.ok("%%distributed --ranks 2 --strategy ddp --out got\n" + body)

    assert book.ok("[sorted(got[0][1][e] + got[1][1][e]) == list(range(20)) for e in (0, 1)]").result == "[True, True]"
    assert book.ok("got[0][0], got[0][1][0] != got[0][1][1]").result == "(5, True)"


def test_a_loader_that_does_not_shuffle_stays_in_order(book: Notebook) -> None:
    body = """
from torch.utils.data import DataLoader
[x for batch in jupyter_distrib.prepare(DataLoader(list(range(8)), batch_size=2)) for x in batch.tolist()]
"""
    assert book.ok(DDP + body).result == "rank 0: [0, 2, 4, 6]\nrank 1: [1, 3, 5, 7]"


def test_the_settings_of_a_loader_are_kept(book: Notebook) -> None:
    body = """
from torch.utils.data import DataLoader
settings = dict(batch_size=2, num_workers=1, drop_last=True, collate_fn=sum, persistent_workers=True)
loader = DataLoader(list(range(9)), **settings)
mine = jupyter_distrib.prepare(loader)
mine.num_workers, mine.drop_last, list(mine), mine.persistent_workers
"""
    assert book.ok(DDP + body).result == "rank 0: (1, True, [2, 10], True)\nrank 1: (1, True, [4, 12], True)"
    single = "jupyter_distrib.prepare(DataLoader([1, 2, 3, 4], batch_size=None))"
    body = f"from torch.utils.data import DataLoader\nlist({single})"
    assert book.ok(DDP + body).result == "rank 0: [1, 3]\nrank 1: [2, 4]"


def test_the_prepared_model_is_the_same_object_and_its_state_has_plain_names(book: Notebook) -> None:
    book.ok("import torch\nmodel = torch.nn.Linear(2, 1)")
    body = """
same = jupyter_distrib.prepare(model)
again = jupyter_distrib.prepare(model)
same is model, again is model, sorted(model.state_dict()), isinstance(model, torch.nn.Linear), repr(model)[:7]
"""
    assert book.ok(DDP + body).result == "ranks 0-1: (True, True, ['bias', 'weight'], True, 'Linear(')"


def test_ranks_begin_with_the_weights_of_rank_0(book: Notebook) -> None:
    body = """
import torch
torch.manual_seed(rank)
model = jupyter_distrib.prepare(torch.nn.Linear(2, 1))
model(torch.ones(1, 2)).sum().backward()
model.weight.tolist()
"""
    assert book.ok(DDP + body).result.startswith("ranks 0-1: ")


def test_gradients_are_averaged_over_ranks(book: Notebook) -> None:
    body = """
import torch
model = jupyter_distrib.prepare(torch.nn.Linear(1, 1, bias=False))
model(torch.tensor([[rank + 1.0]])).sum().backward()
model.weight.grad.item()
"""
    assert book.ok(DDP + body).result == "ranks 0-1: 1.5"


def test_a_model_without_anything_to_train_and_a_scheduler_pass_through(book: Notebook) -> None:
    body = """
import torch
frozen = torch.nn.Linear(1, 1).requires_grad_(False)
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
got = jupyter_distrib.prepare(frozen, optimizer, scheduler)
[a is b for a, b in zip(got, (frozen, optimizer, scheduler))]
"""
    assert book.ok(DDP + body).result == "ranks 0-1: [True, True, True]"


REFUSED = [
    ("jupyter_distrib.prepare(3)", "takes models, optimizers, schedulers and data loaders, not int."),
    ("import torch\njupyter_distrib.prepare(torch.nn.ReLU())", "ReLU has no parameters, so there is nothing to train."),
    (
        """
import torch
stale, model = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
jupyter_distrib.prepare(model, torch.optim.SGD(stale.parameters(), lr=1))
""",
        "the SGD has no parameter of Linear: build it from the parameters of the model that it is to train.",
    ),
]


@pytest.mark.parametrize(("body", "message"), REFUSED)
def test_what_cannot_be_prepared_is_refused_in_one_sentence(book: Notebook, body: str, message: str) -> None:
    outcome = book.fails(DDP + body)

    assert outcome.ename == "DistributedError"
    assert message in outcome.traceback
    assert "File " not in outcome.traceback


def test_prepare_without_a_strategy_says_which_to_add(book: Notebook) -> None:
    outcome = book.fails(
        dedent("""\
            %%distributed --ranks 2
            import torch
            jupyter_distrib.prepare(torch.nn.Linear(1, 1))""")
    )

    assert "add --strategy ddp to the first line of this cell" in outcome.traceback


def test_prepare_outside_a_run_gives_back_what_it_gets(book: Notebook) -> None:
    assert book.ok("import jupyter_distrib as d\nd.prepare(5), d.prepare(1, 2)").result == "(5, (1, 2))"


@pytest.mark.parametrize(
    "call",
    ["dist.all_reduce(torch.ones(1))", "dist.barrier()", "dist.get_backend()",
     "torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))"],
)  # fmt: skip
def test_a_collective_without_a_group_is_answered_with_add_strategy_ddp(book: Notebook, call: str) -> None:
    book.ok("import torch, torch.distributed as dist")

    outcome = book.fails("%%distributed --ranks 2\n" + call)

    assert "add --strategy ddp to its first line" in outcome.traceback


@pytest.mark.parametrize(
    ("options", "cure"),
    [("--strategy ddp", "leave out --on."), ("", "leave out --on and add --strategy ddp.")],
)
def test_a_collective_on_some_of_the_ranks_is_answered_with_leave_out_on(
    book: Notebook, options: str, cure: str
) -> None:
    book.ok("import torch, torch.distributed as dist\n%distributed_pool restart")
    book.ok("%%distributed --ranks 2\n1")

    outcome = book.fails(f"%%distributed --ranks 2 --on 0 {options}\ndist.all_reduce(torch.ones(1))")

    assert f"Only some of the ranks run this cell, so it has no process group: {cure}" in outcome.traceback
    assert "to its first line" not in outcome.traceback


def test_the_group_is_there_with_ddp_and_only_then(book: Notebook) -> None:
    body = "import torch.distributed as dist\ndist.is_initialized() and (dist.get_backend(), dist.get_world_size())"

    assert book.ok(DDP + body).result == "ranks 0-1: ('gloo', 2)"
    cell = dedent("""\
        %%distributed --ranks 2
        import torch.distributed as dist
        dist.is_initialized()""")
    assert book.ok(cell).result == "ranks 0-1: False"
    assert book.ok(DDP + body).result == "ranks 0-1: ('gloo', 2)"


def test_a_users_own_group_exists_beside_a_strategys(book: Notebook) -> None:
    own = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(1)
dist.all_reduce(x)
x.item()
"""
    use_store = dedent("""\
        import torch, torch.distributed as dist
        x = torch.ones(1)
        dist.all_reduce(x)
        x.item()""")
    for _ in range(2):
        assert book.ok(DDP + use_store).result == "ranks 0-1: 2.0"
        assert book.ok("%%distributed --ranks 2\n1;").text == ""
        assert book.ok(DDP + use_store).result == "ranks 0-1: 2.0"
        assert book.ok("%%distributed --ranks 2\n" + own).result == "ranks 0-1: 2.0"


def test_a_script_may_make_and_destroy_its_own_group(book: Notebook) -> None:
    body = """
import torch, torch.distributed as dist
total = []
for _ in range(2):
    dist.init_process_group('gloo')
    x = torch.ones(1)
    dist.all_reduce(x)
    total.append(x.item())
    dist.destroy_process_group()
total
"""
    for line in ("%%distributed --ranks 2\n", DDP, "%%distributed --ranks 2\n"):
        assert book.ok(line + body).result == "ranks 0-1: [2.0, 2.0]"


KEPT = """
import torch
torch.manual_seed(0)
model = jupyter_distrib.prepare(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
def step():
    optimizer.zero_grad()
    model(torch.ones(4, 2) * (rank + 1)).pow(2).sum().backward()
    optimizer.step()
    return model.weight.grad.tolist()
step()
"""


@pytest.mark.parametrize(
    "between",
    ["1 / 0", "if rank == 1: 1 / 0", "import torch.distributed as dist\nif rank == 0: dist.new_group([0])",
     "import torch.distributed as dist\ndist.destroy_process_group()"],
)  # fmt: skip
def test_a_kept_prepared_model_trains_on_after_a_cell_that_spoilt_the_group(book: Notebook, between: str) -> None:
    book.ok("%%distributed --ranks 2 --strategy ddp --keep model,optimizer,step\n" + KEPT)
    book.cell(DDP + between)

    outcome = book.ok(DDP + "step()")

    assert outcome.result.startswith("ranks 0-1: [["), outcome.result


def test_a_kept_prepared_model_trains_on_after_an_interrupt_inside_a_collective(book: Notebook) -> None:
    book.ok("%%distributed --ranks 2 --strategy ddp --keep model,optimizer,step\n" + KEPT)
    book.start(
        DDP
        + dedent("""\
            import time
            print('ready')
            while rank == 1: time.sleep(0.01)
            step()
            step()""")
    )
    book.until("[0-1] ready")
    book.interrupt()
    assert book.finish().ename == "KeyboardInterrupt"

    outcome = book.ok(DDP + "step()")

    assert outcome.result.startswith("ranks 0-1: [["), outcome.result


def test_a_failure_can_be_told_while_ipython_is_half_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    from jupyter_distrib.kernel.session.runs.cell_sources import cell_name

    monkeypatch.setitem(sys.modules, "IPython.core.getipython", types.ModuleType("IPython.core.getipython"))
    monkeypatch.setitem(sys.modules, "IPython.core.interactiveshell", types.ModuleType("IPython.core.interactiveshell"))

    assert cell_name("train.py") == "train.py"
