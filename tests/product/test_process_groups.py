"""Process groups come and go: the user's own, the strategy's, several in a run, run after run. Real kernels."""

from __future__ import annotations

import socket
from textwrap import dedent

import pytest

from jupyter_distrib.system import control_groups
from tests.notebook import Notebook

OWN_GROUPS = """import torch, torch.distributed as dist
sums = []
for _ in range(3):
    dist.init_process_group('gloo')
    t = torch.ones(1)
    dist.all_reduce(t)
    sums.append(int(t))
    dist.destroy_process_group()
sums"""


@pytest.fixture
def book(shared_notebook: Notebook) -> Notebook:
    return shared_notebook


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["none", "ddp"])
def test_a_cell_may_open_and_close_its_own_group_any_number_of_times(book: Notebook, strategy: str) -> None:
    for _ in range(4):
        outcome = book.cell(f"%%distributed --ranks 2 --strategy {strategy}\n{OWN_GROUPS}")
        assert outcome.result == "ranks 0-1: [2, 2, 2]", outcome.text
        assert outcome.wall_s < 30


@pytest.mark.parametrize("strategy", ["none", "ddp"])
def test_nccl_on_cpu_ranks_becomes_gloo_with_one_warning(book: Notebook, strategy: str) -> None:
    asking = dedent("""\
        import torch, torch.distributed as dist
        dist.init_process_group('nccl')
        t = torch.ones(1)
    """)
    asking += "dist.all_reduce(t)\nint(t), dist.get_backend()"

    outcome = book.ok(f"%%distributed --ranks 2 --backend-fallback --strategy {strategy}\n{asking}")
    refused = book.fails(f"%%distributed --ranks 2 --strategy {strategy}\n{asking}")

    assert outcome.result == "ranks 0-1: (2, 'gloo')"
    assert outcome.view.count("the ranks have no GPU: this process group uses gloo") == 1
    assert strategy == "ddp" or "--backend-fallback" in refused.text


def test_strategies_take_turns_and_groups_that_were_left_open_do_not_matter(book: Notebook) -> None:
    body = dedent("""\
        import torch, torch.distributed as dist
        if not dist.is_initialized():
            dist.init_process_group('gloo')
        t = torch.ones(1)
        dist.all_reduce(t)
        int(t)""")
    for turn in range(10):
        strategy = ("none", "ddp", "ddp")[turn % 3]
        outcome = book.cell(f"%%distributed --ranks 2 --strategy {strategy}\n{body}")
        assert outcome.result == "ranks 0-1: 2", (turn, strategy, outcome.text)


@pytest.mark.parametrize(
    "call", ["init_process_group()", "init_process_group('gloo')", "init_process_group('gloo', init_method='env://')"]
)
def test_an_init_of_the_strategys_backend_finds_it_done(book: Notebook, call: str) -> None:
    outcome = book.cell(
        dedent(f"""\
            %%distributed --ranks 2 --strategy ddp
            import torch, torch.distributed as dist
            dist.{call}
            t = torch.ones(1)
            dist.all_reduce(t)
            int(t)""")
    )

    assert outcome.result == "ranks 0-1: 2", outcome.text


def test_an_init_of_another_backend_is_an_error_that_names_both(book: Notebook) -> None:
    outcome = book.cell(
        dedent("""\
            %%distributed --ranks 2 --strategy ddp
            import torch.distributed as dist
            dist.init_process_group('nccl')""")
    )

    assert outcome.ename == "ValueError"
    assert "nccl" in outcome.traceback
    assert "gloo" in outcome.traceback
    assert "line 3" in outcome.traceback


def test_code_that_finds_no_group_is_told_of_the_strategy(book: Notebook) -> None:
    outcome = book.cell(
        dedent("""\
            %%distributed --ranks 2
            import torch, torch.distributed as dist
            dist.all_reduce(torch.ones(1))""")
    )

    assert "add --strategy ddp" in outcome.traceback


def test_the_strategys_group_outlives_a_clean_run_also_with_unequal_collectives_before(book: Notebook) -> None:
    good = dedent("""\
        %%distributed --ranks 2 --strategy ddp
        import torch, torch.distributed as dist
        t = torch.ones(1)
        dist.all_reduce(t)
        int(t)""")
    assert book.cell(good).result == "ranks 0-1: 2"
    # Rank 0 has sent a message and rank 1 has taken none: the next collective must not meet it.
    book.cell(
        dedent("""\
            %%distributed --ranks 2 --strategy ddp
            import torch, torch.distributed as dist
            if rank == 0:
                dist.isend(torch.ones(1), 1)""")
    )

    assert book.cell(good).result == "ranks 0-1: 2"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["OMP_NUM_THREADS=3", "PYTHONHASHSEED=7", "LD_BIND_NOW=1", "PLAIN=x"])
def test_env_reaches_the_ranks_also_where_it_is_read_when_a_program_loads(book: Notebook, name: str) -> None:
    variable, _, value = name.partition("=")
    outcome = book.cell(
        dedent(f"""\
            %%distributed --ranks 2 --strategy ddp --env {name}
            import os, sys, torch, torch.distributed as dist
            dist.barrier()
            os.environ[{variable!r}], torch.get_num_threads() if {variable!r} == 'OMP_NUM_THREADS' else '', hash('a') if {variable!r} == 'PYTHONHASHSEED' else ''""")
    )

    assert f"ranks 0-1: ('{value}'" in outcome.result, outcome.text  # the same hash on both ranks
    assert (", 3, " in outcome.result) == (variable == "OMP_NUM_THREADS")


BLAS = """\
import threadpoolctl, numpy, torch
found = threadpoolctl.threadpool_info()
torch.get_num_threads(), {each['num_threads'] for each in found if each['user_api'] == 'blas'}"""


@pytest.mark.slow
def test_numpy_and_torch_share_the_cores_with_the_other_ranks(book: Notebook) -> None:
    cores = control_groups.cores()
    for ranks in (1, 2, 4):
        share = max(1, cores // ranks)
        outcome = book.ok(f"%%distributed --ranks {ranks} --strategy none\n{BLAS}")
        assert outcome.result.endswith(f": ({share}, {{{share}}})"), outcome.text
    assert book.ok(f"%%distributed --ranks 2 --env OPENBLAS_NUM_THREADS=3\n{BLAS}").result.endswith(", {3})")
    assert book.ok(f"%%distributed --ranks 2\n{BLAS}").result.endswith(f", {{{max(1, cores // 2)}}})")
    cell = dedent("""\
        %%distributed --ranks 2
        import os
        dict(os.environ)""")
    assert "OPENBLAS_NUM_THREADS" not in book.ok(cell).result
    book.ok("import os\nos.environ['OPENBLAS_NUM_THREADS'] = '3'")
    assert book.ok(f"%%distributed --ranks 2\n{BLAS}").result.endswith(", {3})")
    book.ok("del os.environ['OPENBLAS_NUM_THREADS']")


@pytest.mark.slow
def test_ranks_that_are_programs_of_their_own_share_the_cores_too(book: Notebook) -> None:
    assert book.ok(f"%%distributed --ranks 2 --env PYTHONHASHSEED=7\n{BLAS}").result.endswith(
        f", {{{max(1, control_groups.cores() // 2)}}})"
    )
    assert book.ok(f"%%distributed --ranks 2 --env OMP_NUM_THREADS=3\n{BLAS}").result == "ranks 0-1: (3, {3})"


@pytest.mark.slow
def test_torch_remembers_few_collectives_unless_the_user_wants_more(book: Notebook) -> None:
    cell = "import os\nos.environ.get('TORCH_FR_BUFFER_SIZE', 'unset')"

    assert book.ok(f"%%distributed --ranks 2\n{cell}").result == "ranks 0-1: '200'"
    assert book.ok(f"%%distributed --ranks 2 --env TORCH_FR_BUFFER_SIZE=5000\n{cell}").result == "ranks 0-1: '5000'"
    older = "--env TORCH_NCCL_TRACE_BUFFER_SIZE=5000"
    assert book.ok(f"%%distributed --ranks 2 {older}\n{cell}").result == "ranks 0-1: 'unset'"
    assert book.ok(f"%%distributed --ranks 2\n{cell}").result == "ranks 0-1: '200'"


def test_a_missing_framework_is_reported_with_the_line_that_installs_it(book: Notebook) -> None:
    outcome = book.fails("%%distributed --ranks 2\nraise ModuleNotFoundError(\"No module named 'trl'\")")

    assert "Install it: pip install 'jupyter_distrib[trl]'" in outcome.traceback


KEPT_DDP = """%%distributed --ranks 2 --strategy ddp --keep model,optimizer
import torch
from torch.nn.parallel import DistributedDataParallel
torch.manual_seed(rank)
model = DistributedDataParallel(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)"""
ONE_STEP = """
import torch
optimizer.zero_grad()
model(torch.full((1, 2), rank + 1.0)).sum().backward()
optimizer.step()
"""
TAKE_A_STEP = (
    "%%distributed --ranks 2 --strategy {}\n" + ONE_STEP + "[round(x, 4) for x in model.module.weight[0].tolist()]"
)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["1 / 0", "raise KeyboardInterrupt"])
def test_a_model_that_was_wrapped_by_hand_and_kept_trains_on_after_a_failure(book: Notebook, how: str) -> None:
    """Its own group was cut; ranks that failed in the middle of a step hold different weights."""
    book.ok(KEPT_DDP)
    book.fails(f"%%distributed --ranks 2 --strategy ddp\n{ONE_STEP}if rank == 1:\n    {how}\n{ONE_STEP}")
    book.ok(
        dedent("""\
            %%distributed --ranks 2
            import torch
            with torch.no_grad():
                model.module.weight += rank""")
    )

    before = book.ok("%%distributed --ranks 2 --out before\nmodel.module.weight[0].tolist()").result
    book.ok(TAKE_A_STEP.format("ddp"))

    assert before.startswith("rank 0:"), before  # they did differ
    assert book.ok("_[0] == _[1], [round(x - 0.15, 4) for x in before[0]] == _[0]").result == "(True, True)"
    book.ok(TAKE_A_STEP.format("ddp"))


def test_a_model_that_was_wrapped_and_kept_follows_a_group_that_the_cell_makes(book: Notebook) -> None:
    book.ok(KEPT_DDP)
    book.fails(f"%%distributed --ranks 2 --strategy ddp\n{ONE_STEP}if rank == 1:\n    1 / 0\n{ONE_STEP}")
    own = TAKE_A_STEP.format("none").replace(
        "\n", "\nimport torch.distributed as dist\ndist.init_process_group('gloo')\n", 1
    )

    assert book.ok(own).result.startswith("ranks 0-1:")


def test_a_group_of_some_ranks_is_made_and_two_with_one_number_are_refused(book: Notebook) -> None:
    some = "%%distributed --ranks 3\nimport torch, torch.distributed as dist\nt = torch.ones(1)\nif rank < 2:\n"
    some += "    dist.init_process_group('gloo', rank={}, world_size=2)\n    dist.all_reduce(t)\nint(t)"

    assert book.ok(some.format("rank")).result == "ranks 0-1: 2\nrank 2: 1"
    refused = book.fails(some.format("0"))
    assert "init_process_group(rank=0, world_size=2): another rank has this number in the group." in refused.evalue
    assert book.ok(some.format("1 - rank")).result == "ranks 0-1: 2\nrank 2: 1"


IN_CHILDREN = """
import os, torch, torch.multiprocessing as mp
from torch.distributed import all_reduce, destroy_process_group, get_rank, get_world_size, init_process_group, new_group
def work(rank, size, told):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", PORT
    init_process_group("gloo", rank=rank, world_size=size)
    x = torch.ones(1)
    all_reduce(x, group=new_group([0, 1]))
    told.put((get_rank(), get_world_size(), int(x)))
    destroy_process_group()
told = mp.Queue()
children = [mp.Process(target=work, args=(rank, 2, told)) for rank in range(2)]
for child in children:
    child.start()
for child in children:
    child.join()
sorted(told.get() for child in children), [child.exitcode for child in children]
"""


def test_processes_that_a_rank_forks_make_a_group_of_their_own(book: Notebook) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    outcome = book.ok("%%distributed --ranks 1 --timeout 30" + IN_CHILDREN.replace("PORT", repr(str(port))))

    assert outcome.result == "rank 0: ([(0, 2, 2), (1, 2, 2)], [0, 0])"


@pytest.mark.parametrize("strategy", ["none", "ddp"])
@pytest.mark.parametrize(
    ("place", "told"),
    [
        (
            "rank=rank, world_size=4",
            "rank=0, world_size=4): this is rank 0 of 2. Leave out both arguments, and RANK and ",
        ),
        ("rank=rank + 1, world_size=world_size", "rank=1, world_size=2): this is rank 0 of 2."),
        ("world_size=8", "rank=0, world_size=8): this is rank 0 of 2."),
    ],
)
def test_a_place_that_a_rank_cannot_have_is_refused(book: Notebook, strategy: str, place: str, told: str) -> None:
    outcome = book.fails(
        dedent(f"""\
            %%distributed --ranks 2 --strategy {strategy}
            import torch.distributed as dist
            if rank == 0:
                dist.init_process_group('gloo', {place})""")
    )

    assert outcome.ename == "ValueError"
    assert f"init_process_group({told}" in outcome.traceback
    assert ("or start 4 ranks." in outcome.traceback) == ("=4" in place)


@pytest.mark.parametrize(
    ("strategy", "place", "sums"),
    [
        ("none", "rank=rank, world_size=world_size", "ranks 0-1: (2, 2)"),
        ("ddp", "rank=rank, world_size=world_size", "ranks 0-1: (2, 2)"),
        ("none", "rank=0, world_size=1", "ranks 0-1: (1, 1)"),
        ("ddp", "rank=0, world_size=1", "ranks 0-1: (2, 2)"),
    ],
)
def test_a_group_has_the_ranks_that_it_is_asked_for(book: Notebook, strategy: str, place: str, sums: str) -> None:
    outcome = book.ok(
        dedent(f"""\
            %%distributed --ranks 2 --strategy {strategy}
            import torch, torch.distributed as dist
            dist.init_process_group('gloo', {place})
            t = torch.ones(1)
            dist.all_reduce(t)
            dist.barrier()
            int(t), dist.get_world_size()""")
    )

    assert outcome.result == sums
