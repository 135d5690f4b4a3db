"""Scripts on ranks do what they do under torchrun: from a notebook, from Python, and from the shell."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from tests.notebook import ROOT, Notebook

pytestmark = pytest.mark.slow

SCRIPT = """\
import os, sys
import helper
assert __name__ == "__main__"
assert "rank" not in globals()
def main():
    where = os.path.basename(__file__), os.path.basename(sys.path[0]), os.path.basename(sys.argv[0])
    helper.COUNT += 1
    print(sys.argv[1:], where, os.environ["RANK"], os.environ["WORLD_SIZE"], helper.COUNT)
if __name__ == "__main__":
    main()
"""
TRAIN = """\
import argparse, sys, torch, torch.distributed as dist
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
parser.add_argument("--out")
arguments = parser.parse_args()
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr)
torch.manual_seed(dist.get_rank())
for _ in range(3):
    loss = model(torch.randn(8, 4)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
if dist.get_rank() == 0:
    torch.save(model.module.state_dict(), arguments.out)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    with Notebook(tmp_path_factory.mktemp("scripts")) as notebook:
        notebook.ok("%load_ext jupyter_distrib")
        yield notebook


@pytest.fixture
def folder(book: Notebook, tmp_path: Path) -> Path:
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "train.py").write_text(SCRIPT)
    (tmp_path / "project" / "helper.py").write_text("COUNT = 0\n")
    book.ok(f"import os\nos.chdir({str(tmp_path)!r})")
    return tmp_path


def shell(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    code = "from jupyter_distrib.kernel.notebook.command_line import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_a_script_has_its_arguments_and_returns_nothing(book: Notebook, folder: Path) -> None:
    outcome = book.ok("%distributed_run --ranks 2 project/train.py --lr 1e-3 'two words'")

    where = "('train.py', 'project', 'train.py')"
    assert f"[0] ['--lr', '1e-3', 'two words'] {where} 0 2 1" in outcome.view
    assert f"[1] ['--lr', '1e-3', 'two words'] {where} 1 2 1" in outcome.view
    assert outcome.result == ""
    book.ok("import jupyter_distrib")
    again = book.ok("print(jupyter_distrib.run_script('project/train.py', '--lr', 1e-3, ranks=2))")
    assert "[0] ['--lr', '0.001']" in again.view
    assert again.stdout == "None\n"


def test_a_module_beside_the_script_that_python_has_loaded_is_named(book: Notebook, folder: Path) -> None:
    (folder / "project" / "statistics.py").write_text("")
    told = f"`statistics` is the standard module, which a rank loads when it starts, and not {folder}/project/statistics.py"
    assert told not in book.ok("%distributed_run --ranks 2 project/train.py").view
    (folder / "project" / "train.py").write_text("statistics = {}\n")
    assert told not in book.ok("%distributed_run --ranks 2 project/train.py").view
    (folder / "project" / "train.py").write_text("def main():\n    import statistics\nmain()\n")
    assert told in book.ok("%distributed_run --ranks 2 project/train.py").view


def test_modules_beside_the_script_are_imported_anew_for_each_run(book: Notebook, folder: Path) -> None:
    for _ in range(2):
        assert " 0 2 1" in book.ok("%distributed_run --ranks 2 project/train.py").view
    (folder / "project" / "helper.py").write_text("COUNT = 10\n")
    assert " 0 2 11" in book.ok("%distributed_run --ranks 2 project/train.py").view
    cell = dedent("""\
        %%distributed --ranks 2
        import sys
        sys.argv, 'project' in sys.path[0]""")
    assert book.ok(cell).result == "ranks 0-1: (['cell.py'], False)"


LEAVES_STATE = """\
import logging, multiprocessing, os, sys
logger = logging.getLogger("train")
logger.addHandler(logging.StreamHandler(sys.stdout))
logger.warning("once")
multiprocessing.set_start_method("spawn")
sys.left = getattr(sys, "left", 0) + 1
print("left", sys.left, "pid", os.getpid())
"""


def test_a_script_finds_nothing_of_earlier_scripts_and_cells(book: Notebook, folder: Path) -> None:
    (folder / "leaves.py").write_text(LEAVES_STATE)
    (folder / "leaves_mod.py").write_text(LEAVES_STATE)
    book.ok(
        dedent("""\
            %%distributed --ranks 1
            import sys
            sys.left = 7""")
    )
    for line in ("leaves.py", "leaves.py", "-m leaves_mod"):
        view = book.ok(f"%distributed_run --ranks 1 {line}").view
        assert (view.count("once"), "left 1 " in view) == (1, True), view
    assert "left 2 " in book.ok("%distributed_run --ranks 1 --warm leaves.py").view
    assert (
        "left 1 "
        in book.ok("run = %distributed_run --detach --ranks 1 leaves.py\nrun.result()\nprint(run.logs())").stdout
    )
    book.ok("import jupyter_distrib")
    assert "left 1 " in book.ok("jupyter_distrib.run_script('leaves.py', ranks=1)").view
    assert "left 2 " in book.ok("jupyter_distrib.run_script('leaves.py', ranks=1, warm=True)").view
    assert "--warm and --fresh exclude each other" in book.fails("%distributed_run --warm --fresh leaves.py").evalue


ENDS = """\
import atexit, multiprocessing, sys, threading, time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
def note(name, later=True):
    time.sleep(0.3 * later)
    with open(f"ended-{name}", "w") as file:
        file.write(name)
unclosed = open("ended-unclosed", "w")
unclosed.write("unclosed")
if sys.argv[1] != "fail":
    threading.Thread(target=note, args=("thread",)).start()
    multiprocessing.Process(target=note, args=("process",)).start()
    pool = ThreadPoolExecutor(1)
    pool.submit(note, "pool")
    of_processes = ProcessPoolExecutor(1)
    of_processes.submit(abs, 1).result()
    atexit.register(note, "never")
    atexit.unregister(note)
    atexit.register(lambda: 1 / 0)
    atexit.register(note, "handler", later=False)
    others = threading.Event(), multiprocessing.Event()
    threading.Thread(target=others[0].wait, daemon=True).start()
    multiprocessing.Process(target=others[1].wait, daemon=True).start()
    if sys.argv[1] == "exit":
        sys.exit()
else:
    atexit.register(note, "failed")
    raise ValueError("of the script")
"""


@pytest.mark.parametrize("how", ["return", "exit"])
def test_a_script_ends_as_a_program_before_its_end_is_told(book: Notebook, folder: Path, how: str) -> None:
    (folder / "ends.py").write_text(ENDS)

    outcome = book.ok(f"%distributed_run --ranks 1 ends.py {how}")

    written = {path.name.partition("-")[2]: path.read_text() for path in folder.glob("ended-*")}
    assert written == {name: name for name in ("unclosed", "thread", "process", "pool", "handler")}
    assert "ZeroDivisionError" in outcome.view
    cell = dedent("""\
        %%distributed --ranks 1
        import atexit
        atexit.register.__module__""")
    assert book.ok(cell).result == "rank 0: 'atexit'"


def test_a_librarys_pool_of_threads_stays_usable_after_a_script(book: Notebook, folder: Path) -> None:
    (folder / "pools.py").write_text(
        dedent("""\
            import concurrent.futures, json
            source = 'json.pool = ThreadPoolExecutor(1)'
            names = {'json': json, 'ThreadPoolExecutor': concurrent.futures.ThreadPoolExecutor}
            exec(compile(source, json.__file__, 'exec'), names)
            json.pool.submit(abs, 1).result()
        """)
    )
    book.ok("%distributed_run --ranks 1 pools.py")
    cell = dedent("""\
        %%distributed --ranks 1
        import json
        json.pool.submit(abs, -2).result()""")
    assert book.ok(cell).result == "rank 0: 2"


def test_a_script_that_fails_has_written_its_files(book: Notebook, folder: Path) -> None:
    (folder / "ends.py").write_text(ENDS)

    assert book.fails("%distributed_run --ranks 1 ends.py fail").evalue == "of the script"
    assert (folder / "ended-unclosed").read_text() == "unclosed"


def test_a_script_gets_its_objects_back_from_a_spawned_process(book: Notebook, folder: Path) -> None:
    """They come under the name `__mp_main__`, which Python gives the main file in such a process."""
    (folder / "spawns.py").write_text(
        dedent("""\
            import multiprocessing
            from concurrent.futures import ProcessPoolExecutor
            class Point:
                def __init__(self, x): self.x = x
            if __name__ == '__main__':
                with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context('spawn')) as pool:
                    point = pool.submit(Point, 3).result()
                print('point', point.x, type(point) is Point)
        """)
    )
    assert "point 3 True" in book.ok("%distributed_run --ranks 1 spawns.py").view


def test_a_script_leaves_the_notebooks_kept_values_where_they_are(book: Notebook, folder: Path) -> None:
    (folder / "leaves.py").write_text(LEAVES_STATE)
    book.ok(
        dedent("""\
            %%distributed --ranks 1 --keep model
            import sys
            model, sys.left = [1], 7""")
    )
    assert "left 1 " in book.ok("%distributed_run --ranks 1 leaves.py").view
    cell = dedent("""\
        %%distributed --ranks 1
        import sys
        model, sys.left""")
    assert book.ok(cell).result == "rank 0: ([1], 7)"
    book.ok("del model")


def test_new_ranks_that_have_run_nothing_are_taken_as_they_are(book: Notebook, folder: Path) -> None:
    book.ok("%%distributed --ranks 1\nrank")
    book.ok("%distributed_pool restart")
    (folder / "id.py").write_text("import os\nprint('pid', os.getpid())")
    book.ok("from jupyter_distrib.kernel.session import session")
    waiting = book.ok("session.current().pools.groups()[-1].workers[0].pid").result
    view = book.ok("%distributed_run --ranks 1 id.py").view
    assert f"[0] pid {waiting}" in view


def test_a_module_of_a_package_runs_as_by_torchrun_m(book: Notebook, folder: Path) -> None:
    (folder / "project" / "__init__.py").touch()
    (folder / "project" / "run.py").write_text(
        dedent("""\
            import os, sys
            from . import helper
            print(__name__, __package__, os.path.basename(sys.argv[0]), sys.argv[1:], sys.path[0] == os.getcwd())
            helper.COUNT / len(sys.argv[2:])
        """)
    )

    line = "%distributed_run --ranks 2 -m project.run --lr 1"
    assert "[0-1] __main__ project run.py ['--lr', '1'] True" in book.ok(line).view
    failed = book.fails(line.removesuffix(" 1"))
    assert (failed.ename, "runpy" in failed.traceback) == ("ZeroDivisionError", False)
    assert f"File {folder}/project/run.py:4" in failed.traceback
    assert "No module named project.rum" in book.fails("%distributed_run --ranks 2 -m project.rum").evalue
    assert book.fails("import jupyter_distrib\njupyter_distrib.run_script('-m')").evalue == (
        "-m needs the name of a module"
    )


def test_a_script_trains_to_the_weights_of_torchrun(book: Notebook, folder: Path) -> None:
    (folder / "ddp.py").write_text(TRAIN)
    book.ok("%distributed_run --ranks 2 ddp.py --lr 0.1 --out ours.pt")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    # Its status says little: torch sometimes aborts a process that ends, after the weights were written.
    subprocess.run([*torchrun, "ddp.py", "--lr", "0.1", "--out", "theirs.pt"], cwd=folder, check=False, timeout=90)

    cell = dedent("""\
        import torch
        ours, theirs = torch.load('ours.pt'), torch.load('theirs.pt')
        sorted(ours) == sorted(theirs), all(torch.equal(ours[name], theirs[name]) for name in ours)""")
    assert book.ok(
        cell
    ).result == "(True, True)"  # fmt: skip


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        ("import sys\nsys.exit(0)", "", ""),
        ("import sys\nsys.exit(3)", "RankLost", "Ranks 0-1 called sys.exit(3)."),
        ("def work():\n    1 / 0\nwork()", "ZeroDivisionError", "bad.py"),
    ],
)
def test_a_script_that_ends_early_or_fails_says_so(
    book: Notebook, folder: Path, body: str, error: str, message: str
) -> None:
    (folder / "bad.py").write_text(body)

    outcome = book.cell("%distributed_run --ranks 2 bad.py")

    assert (outcome.ename, message in outcome.traceback) == (error, True), outcome.traceback
    assert "left the cell early" not in outcome.view


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("''", "there is no script: write its path, or -m and a module, after the options"),
        ("", "there is no script: write its path, or -m and a module, after the options"),
        ("--ranks 2", "there is no script: write its path, or -m and a module, after the options"),
        ("--ranks", "--ranks needs a value: write --ranks N"),
        ("--ranks train.py", "--ranks must be a whole number, at least 1; got 'train.py'"),
        ("--ranks 2 -m", "there is no script: write its path, or -m and a module, after the options"),
        ("--ranks 2 nothing.py", "the script nothing.py cannot be read: there is no such file in "),
        ("project", "the script project cannot be read: it is a folder: name the script in it"),
        ("--rank 2 project/train.py", "unknown option --rank: did you mean --ranks?"),
        ("--keep model project/train.py", "--keep is for cells: a script has no names of the notebook"),
    ],
)
def test_a_wrong_line_is_refused(book: Notebook, folder: Path, line: str, message: str) -> None:
    outcome = book.fails(f"%distributed_run {line}")

    assert (outcome.ename, message in outcome.evalue) == ("OptionsError", True), outcome.evalue


@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("torchrun --standalone train.py --lr 1", "train.py --lr 1"),
        ("torchrun --standalone --nproc-per-node 2 train.py --lr 1", "--ranks 2 train.py --lr 1"),
        ("torchrun --nproc_per_node=3 --max-restarts=2 train.py", "--ranks 3 --max-restarts 2 train.py"),
        ("torchrun --nproc-per-node gpu -m package.train --lr 1", "-m package.train --lr 1"),
        ("python train.py --lr 'two words'", "train.py --lr 'two words'"),
        ("python3.11 -u train.py", "train.py"),
        ("python -m package.train --lr 1", "-m package.train --lr 1"),
        ("python -m torch.distributed.run --nproc-per-node 2 train.py", "--ranks 2 train.py"),
        (
            "/usr/bin/python3 -m torch.distributed.launch --nproc_per_node 2 --module package.train",
            "--ranks 2 -m package.train",
        ),
        ("OMP_NUM_THREADS=4 A='x y' python train.py", "--env OMP_NUM_THREADS=4 --env 'A=x y' train.py"),
        ("accelerate launch --config_file a.yaml --num_processes 2 train.py --lr 1", "--ranks 2 train.py --lr 1"),
        (
            "accelerate launch --mixed_precision bf16 --num_processes 2 --gradient-accumulation-steps=4 train.py",
            "--env ACCELERATE_MIXED_PRECISION=bf16 --env ACCELERATE_GRADIENT_ACCUMULATION_STEPS=4 --ranks 2 train.py",
        ),
        (
            "python -m accelerate.commands.launch --mixed-precision fp16 -m package.train",
            "--env ACCELERATE_MIXED_PRECISION=fp16 -m package.train",
        ),
        ("deepspeed --num_gpus=2 train.py --deepspeed", "--ranks 2 train.py --deepspeed"),
        ("mpirun -np 4 python train.py", "--ranks 4 train.py"),
        ("--strategy ddp torchrun --nproc-per-node 2 train.py", "--strategy ddp train.py"),
    ],
)
def test_a_launchers_line_is_answered_by_the_line_to_write(
    book: Notebook, folder: Path, line: str, instead: str
) -> None:
    refused = book.fails(f"%distributed_run {line}")

    assert refused.ename == "OptionsError"
    assert refused.evalue.endswith(
        f" is not needed here, since the ranks are started for the script: write %distributed_run {instead}"
    )


def test_the_line_to_write_can_be_written(book: Notebook, folder: Path) -> None:
    told = book.fails("%distributed_run torchrun --standalone --nproc-per-node 2 project/train.py --lr 1").evalue
    assert "[1] ['--lr', '1']" in book.ok(told.partition("write ")[2]).view
    in_shell = shell(folder, "run", "--ranks", "2", "torchrun", "project/train.py")
    assert (in_shell.returncode, "write jupyter distrib run --ranks 2 project/train.py" in in_shell.stderr) == (2, True)
    (folder / "python").write_text("print('a script of that name')")
    assert "a script of that name" in book.ok("%distributed_run --ranks 1 python").view
    assert "write its path alone" in book.fails("%distributed_run torchrun --help").evalue


def test_a_script_that_is_not_python_starts_nothing(book: Notebook, folder: Path) -> None:
    (folder / "bad.py").write_text("def f(:\n")

    assert book.fails("%distributed_run --ranks 2 bad.py").ename == "SyntaxError"


def test_a_detached_script_gives_a_run(book: Notebook, folder: Path) -> None:
    assert (
        " 0 2 1"
        in book.ok(
            "run = %distributed_run --detach --ranks 2 project/train.py\nrun.result()\nprint(run.logs(0))"
        ).stdout
    )


def test_a_detached_script_gives_a_run_in_python_too(book: Notebook, folder: Path) -> None:
    book.ok("import jupyter_distrib\nrun = jupyter_distrib.run_script('project/train.py', ranks=2, detach=True)")

    assert " 0 2 1" in book.ok("run.result()\nprint(run.logs(0))").stdout


def test_a_list_of_arguments_is_refused_with_the_way_to_give_it(book: Notebook, folder: Path) -> None:
    outcome = book.fails("import jupyter_distrib\njupyter_distrib.run_script('leaves.py', ['--lr', 1], ranks=1)")

    assert "one by one: put * in front" in outcome.evalue


def test_a_script_in_the_home_folder_is_found_by_its_short_path(book: Notebook, folder: Path) -> None:
    (folder / "at_home.py").write_text("print('from home')")
    book.ok(
        dedent("""\
            import os
            home = os.environ['HOME']
            os.environ['HOME'] = os.getcwd()""")
    )
    try:
        assert "from home" in book.ok("%distributed_run --ranks 1 ~/at_home.py").view
    finally:
        book.ok("os.environ['HOME'] = home")


def test_a_program_that_parses_its_own_arguments_finds_no_group(book: Notebook, folder: Path) -> None:
    (folder / "cli.py").write_text(
        dedent("""\
            import argparse, torch.distributed as dist
            parser = argparse.ArgumentParser()
            parser.add_argument('config')
            parser.add_argument('--debug', action='store_true')
            print(parser.parse_args(), dist.is_initialized())
        """)
    )

    assert (
        "Namespace(config='a.yaml', debug=True) False"
        in book.ok("%distributed_run --ranks 2 cli.py a.yaml --debug").view
    )


def test_the_shell_runs_a_script_and_gives_its_status(folder: Path) -> None:
    done = shell(folder, "run", "--ranks", "2", "project/train.py", "--lr", "1")
    assert (done.returncode, done.stderr) == (0, "")
    assert "[1] ['--lr', '1']" in done.stdout
    (folder / "bad.py").write_text(
        dedent("""\
            import sys, os
            if sys.argv[1] == 'exit': sys.exit(3)
            if sys.argv[1] == 'die': os.kill(os.getpid(), 9)
            1 / 0""")
    )
    assert shell(folder, "run", "--ranks", "2", "bad.py", "exit").returncode == 3
    assert shell(folder, "run", "--ranks", "1", "bad.py", "die").returncode == 137
    failed = shell(folder, "run", "--ranks", "2", "bad.py", "fail")
    assert failed.returncode == 1
    assert "ZeroDivisionError: division by zero" in failed.stderr
    assert "bad.py" in failed.stderr
    assert "jupyter_distrib" not in failed.stderr


def test_the_shell_says_that_a_run_is_not_saved(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(folder))
    (folder / "jupyter_distrib").mkdir()
    (folder / "jupyter_distrib" / "history").write_text("in the way")
    (folder / "says.py").write_text("import sys\nprint('hi')\nsys.exit(int(sys.argv[1]))")
    for status in (0, 3):
        done = shell(folder, "run", "--ranks", "1", "says.py", str(status))
        assert (done.returncode, done.stdout.startswith("[0] hi")) == (status, True)
        assert done.stderr.count("Runs are not saved in the history: ") == 1


def test_each_line_is_written_to_an_unbuffered_terminal_in_one_piece(folder: Path) -> None:
    (folder / "prints.py").write_text("import os\nfor i in range(20): print('line', i, os.environ['RANK'], flush=True)")
    code = "from jupyter_distrib.kernel.notebook.command_line import main; main()"
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # each write is one message
    with ours, theirs:
        process = subprocess.Popen(
            [sys.executable, "-u", "-c", code, "run", "--ranks", "2", "prints.py"],
            cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=theirs,
        )  # fmt: skip
        theirs.close()
        written = list(iter(lambda: ours.recv(1 << 16), b""))
        assert process.wait(timeout=60) == 0
    assert sum(piece.count(b"line") for piece in written) == 40
    assert [piece for piece in written if not piece.endswith(b"\n") or piece == b"\n"] == []


def test_the_shells_command_says_how_it_is_used(folder: Path) -> None:
    assert shell(folder).returncode == 2
    helped = shell(folder, "run", "--help")
    assert (helped.returncode, "usage: jupyter distrib run" in helped.stdout, "--ranks N" in helped.stdout) == (
        0,
        True,
        True,
    )
    assert shell(folder, "run", "--detach", "no.py").returncode == 2
    wrong = shell(folder, "run", "--gpu", "2", "train.py")
    assert (wrong.returncode, wrong.stderr) == (2, "jupyter distrib: unknown option --gpu: did you mean --gpus?\n")
