"""What a front end asks and hears: the control channel, the news, and what a page that was reloaded is given."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from jupyter_distrib.kernel.sidebar import bridge
from tests.notebook import Notebook, ask
from tests.processes import wait_until

pytestmark = pytest.mark.slow  # the quick tests have enough of kernels and ranks without these

FOREVER = """\
%%distributed --ranks 2 --strategy ddp
import torch.distributed as dist
if rank == 0:
    print('waits', flush=True)
    dist.barrier()
else:
    import time
    while True:
        time.sleep(0.05)"""


@pytest.fixture
def book(shared_notebook: Notebook) -> Iterator[Notebook]:
    ask(shared_notebook, op="overview")  # without a page, a kernel sends no news
    yield shared_notebook
    ask(shared_notebook, op="pick", pool="local", strategy="none", size={})


def overview(book: Notebook) -> dict[str, Any]:
    seen: dict[str, Any] = ask(book, op="overview")["overview"]
    return seen


def news_until(book: Notebook, wanted: Any, limit_s: float = 20.0) -> dict[str, Any]:
    """The first news of the kernel for which `wanted` holds."""
    deadline, seen = time.monotonic() + limit_s, []
    while time.monotonic() < deadline:
        try:
            message = book.client.get_iopub_msg(timeout=1)
        except queue.Empty:
            continue
        content = message["content"]
        seen.append(content)
        data: dict[str, Any] = content.get("data") or {}  # empty where a comm was opened or closed
        if content.get("comm_id") == bridge.COMM and data and wanted(data):
            return data
    raise AssertionError(f"the kernel did not tell it, but this: {seen}")


def drain(book: Notebook) -> None:
    while True:
        try:
            book.client.get_iopub_msg(timeout=0.3)
        except queue.Empty:
            return


# ---------------------------------------------------------------------------------------------------- finding, asking


def test_a_page_finds_the_kernel_without_opening_anything(book: Notebook) -> None:
    book.client.comm_info(target_name=bridge.COMM)
    assert list(book.client.get_shell_msg(timeout=20)["content"]["comms"]) == [bridge.COMM]


def test_the_overview_tells_pools_strategies_and_what_comes_next(book: Notebook) -> None:
    seen = overview(book)

    assert {"local", "inline"} <= {pool["name"] for pool in seen["pools"]}
    assert seen["route"] == "control"
    assert seen["next"]["line"] == "%%distributed"
    assert {"none", "ddp"} <= set(seen["strategies"])


def test_a_request_that_is_not_known_or_not_possible_is_answered_with_a_sentence(book: Notebook) -> None:
    assert "does not know the request 'dance'" in ask(book, op="dance")["error"]
    assert "there is no pool moon" in ask(book, op="pick", pool="moon", strategy="ddp")["error"]
    assert "1 to 1000" in ask(book, op="pick", pool="local", strategy="ddp", size={"ranks": 0})["error"]
    assert "nothing has run yet" in ask(book, op="stop", run="nope")["error"]


def test_a_kernel_goes_on_sending_news_once_a_page_has_requested_something(notebook: Notebook) -> None:
    notebook.ok("import time; time.sleep(0.5)")  # the first news, for pages that are open already
    add = "%distributed_pool add {} --kind local\ntime.sleep(0.5)"
    assert notebook.ok(add.format("unseen")).news == []

    assert "nothing has run" in ask(notebook, op="stacks", run="none")["error"], "any request will do"
    news = notebook.ok(add.format("seen")).news
    assert {"unseen", "seen"} <= {pool["name"] for pool in news[-1]["overview"]["pools"]}


def test_a_page_that_opens_during_a_run_hears_of_it_without_a_request(notebook: Notebook) -> None:
    notebook.ok("import time; time.sleep(0.5)")  # the first news
    drain(notebook)
    notebook.start(FOREVER)
    data = news_until(notebook, lambda data: data.get("overview", {}).get("runs"))
    (run,) = data["overview"]["runs"]
    ask(notebook, op="stop", run=run["run"])
    assert notebook.finish().ename == "KeyboardInterrupt"


# ---------------------------------------------------------------------------------------------------- picking


def test_what_is_picked_is_what_the_next_run_uses_and_its_view_says_so(book: Notebook) -> None:
    assert ask(book, op="pick", pool="local", strategy="ddp", size={"ranks": 3})["ok"]

    assert overview(book)["next"]["line"] == "%%distributed --ranks 3 --strategy ddp"
    outcome = book.ok(
        dedent("""\
            %%distributed
            print('hello')
            import torch.distributed as dist
            dist.get_world_size()""")
    )
    assert outcome.result == "ranks 0-2: 3"
    assert "strategy ddp and" in outcome.view
    assert "from the sidebar" in outcome.view


def test_what_a_pick_leaves_out_stays_as_it_is(book: Notebook) -> None:
    ask(book, op="pick", size={"ranks": 3})
    answer = ask(book, op="pick", strategy="ddp")

    assert answer["overview"]["next"]["line"] == "%%distributed --ranks 3 --strategy ddp"
    assert ask(book, op="pick", size={})["overview"]["next"]["line"] == "%%distributed --strategy ddp"


def test_there_is_a_way_back_from_what_was_picked(book: Notebook) -> None:
    book.ok("%distributed_pool use inline")
    ask(book, op="pick", pool="local", strategy="ddp", size={"ranks": 3})
    answer = ask(book, op="unpick")

    assert answer["overview"]["next"]["line"] == "%%distributed --pool inline"
    assert "sidebar" not in answer["overview"]["next"]["origins"]
    book.ok("%distributed_pool use local")


def test_a_pool_that_is_added_is_reported_at_once(book: Notebook) -> None:
    drain(book)
    book.start("%distributed_pool add other --kind local")
    news_until(book, lambda data: "other" in [pool["name"] for pool in data.get("overview", {}).get("pools", ())])
    book.ok("%distributed_pool remove other")


def test_a_start_that_takes_long_says_how_far_it_is_and_in_which_cell(book: Notebook) -> None:
    drain(book)
    book.start("%%distributed --ranks 2 --env OMP_DYNAMIC=true\nrank", cell_id="c-5")

    def starting(data: dict[str, Any]) -> list[Any]:
        groups = [group for pool in data.get("overview", {}).get("pools", ()) for group in pool["groups"]]
        return [group["starting"] for group in groups if group["starting"]]

    at_first = news_until(book, lambda data: data.get("overview", {}).get("starts"))
    (start,) = at_first["overview"]["starts"]
    assert (start["pool"], start["cell"], start["run"]) == ("local", "c-5", "")
    assert start["label"].startswith("Cell In[")
    assert abs(start["began_at_s"] - at_first["now_s"]) < 5
    assert starting(at_first) == [], "it is told before the agent has something to report"
    data = news_until(book, starting)
    assert starting(data)[0]["size"] == 2
    assert data["overview"]["starts"] == [start]
    news_until(book, lambda data: "overview" in data and not data["overview"]["starts"])
    book.ok("%distributed_pool stop")


def test_a_cell_that_says_what_it_wants_is_not_told_of_the_sidebar(book: Notebook) -> None:
    ask(book, op="pick", pool="local", strategy="ddp", size={"ranks": 3})

    outcome = book.ok("%%distributed --ranks 2 --strategy none\nprint(world_size)")
    assert "[0-1] 2" in outcome.view
    assert "sidebar" not in outcome.view


# ---------------------------------------------------------------------------------------------------- trouble


def test_a_file_that_is_wrong_from_the_start_is_a_sentence_beside_what_can_be_shown(tmp_path: Path) -> None:
    file = tmp_path / "jupyter_distrib.toml"
    file.write_text("pool = = 1\n")
    with Notebook(tmp_path) as book:
        book.ok("%load_ext jupyter_distrib")
        seen = overview(book)
        assert "jupyter_distrib.toml, line 1" in seen["trouble"]["text"]
        assert {"local", "inline"} <= {pool["name"] for pool in seen["pools"]}
        assert seen["next"]["line"] == "%%distributed"
        assert seen["runs"] == []

        file.write_text('strategy = "ddp"\n')
        seen = overview(book)
        assert seen["trouble"] is None
        assert seen["next"]["line"] == "%%distributed --strategy ddp"


@pytest.mark.parametrize(
    ("breaking", "mending"),
    [
        ("os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone')", "os.chdir(home)"),
        ("kind.label = property(lambda self: 1 / 0)", "kind.label = label"),
    ],
)
def test_news_go_on_after_trouble(notebook: Notebook, breaking: str, mending: str) -> None:
    """The folder of the kernel is deleted; something fails that nobody has thought of."""
    notebook.ok(
        "import os; from jupyter_distrib.kernel.sidebar import bridge as frontend; from jupyter_distrib.kernel.session import session\nhome = os.getcwd()"
    )
    notebook.ok(
        "here = session.current(); kind = type(here.identity); label = kind.label; news = frontend._installed._news"
    )
    notebook.ok(breaking)
    notebook.ok(
        dedent("""\
            here.changed()
            import time
            while news._news.is_set(): time.sleep(0.01)""")
    )
    notebook.ok(mending)
    drain(notebook)
    ask(notebook, op="pick", strategy="ddp")
    news_until(notebook, lambda news: news["overview"]["next"]["strategy"] == "ddp")


def test_a_missing_folder_is_reported(notebook: Notebook) -> None:
    notebook.ok("import os; os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone')")
    seen = overview(notebook)
    assert "was deleted or moved" in seen["trouble"]["text"]
    assert seen["next"]["line"] == "%%distributed"


# ---------------------------------------------------------------------------------------------------- stopping


def test_stop_ends_a_collective_while_the_cell_runs(book: Notebook) -> None:
    book.start(FOREVER)
    book.until("waits")
    (run,) = [run for run in overview(book)["runs"] if run["state"] == "running"]

    began_s = time.monotonic()
    assert ask(book, op="stop", run=run["run"])["ok"]
    assert time.monotonic() - began_s < 10  # it does not wait for the cell

    assert book.finish().ename == "KeyboardInterrupt"
    (ended,) = [each for each in overview(book)["runs"] if each["run"] == run["run"]]
    assert ended["state"] == "interrupted"
    assert ended["stop_asked_at_s"] >= ended["began_at_s"]
    assert book.ok("%%distributed --ranks 2\nrank").result == "rank 0: 0\nrank 1: 1"


def test_starting_ranks_that_are_at_work_leaves_them_at_it(book: Notebook) -> None:
    book.start(FOREVER)
    book.until("waits")
    assert ask(book, op="start", pool="local", ranks=2)["ok"]
    news_until(book, lambda news: news["kind"] == "overview" and news["overview"]["doing"] is None)

    seen = overview(book)
    assert seen["trouble"] is None
    (run,) = [run for run in seen["runs"] if run["state"] == "running"]
    assert ask(book, op="stop", run=run["run"])["ok"]
    assert book.finish().ename == "KeyboardInterrupt"


def test_a_cell_whose_ranks_are_stopped_returns_and_says_so(book: Notebook) -> None:
    book.start(FOREVER)
    book.until("waits")
    assert ask(book, op="stop_ranks", pool="local")["ok"]

    ended = book.finish()
    assert ended.ename == "RankLost"
    assert "because its ranks were stopped from the sidebar" in ended.evalue
    assert "replaced" not in ended.text
    assert book.ok("%%distributed --ranks 2\nrank").result == "rank 0: 0\nrank 1: 1"


# ---------------------------------------------------------------------------------------------------- ranks


def test_ranks_are_started_resized_and_stopped(book: Notebook) -> None:
    ask(book, op="stop_ranks", pool="local")
    drain(book)

    def local(news: dict[str, Any]) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = news["overview"]["pools"][0]["groups"]
        return groups

    def up(size: int, *, not_these: Any = None) -> list[dict[str, Any]]:
        def holds(news: dict[str, Any]) -> bool:
            if news["kind"] != "overview" or news["overview"]["doing"] is not None:
                return False
            there = [(group["state"], group["size"]) for group in local(news)]
            return there == [("open", size)] and local(news)[0]["ranks"] != not_these

        ranks: list[dict[str, Any]] = local(news_until(book, holds))[0]["ranks"]
        return ranks

    assert ask(book, op="start", pool="local", ranks=2)["ok"]
    first = up(2)
    assert [rank["rank"] for rank in first] == [0, 1]
    assert ask(book, op="restart", pool="local")["ok"]
    again = up(2, not_these=first)
    assert {rank["pid"] for rank in again}.isdisjoint(rank["pid"] for rank in first)
    assert ask(book, op="resize", pool="local", ranks=3)["ok"]
    up(3)
    assert ask(book, op="stop_ranks", pool="local")["ok"]
    news_until(book, lambda news: news["kind"] == "overview" and not local(news))


def test_ranks_that_cannot_be_had_are_a_sentence_that_can_be_dismissed(book: Notebook) -> None:
    book.ok(
        "from jupyter_distrib.kernel.session import session\npools = session.current().pools; saved = pools.start_ranks"
    )
    book.ok(
        dedent("""\
            from jupyter_distrib.errors import PoolError
            def refuse(*_):
                raise PoolError('no room')
            pools.start_ranks = refuse""")
    )
    drain(book)
    assert ask(book, op="start", pool="local", ranks=2)["ok"]

    told = news_until(book, lambda news: news["kind"] == "overview" and news["overview"]["trouble"])
    assert told["overview"]["trouble"]["text"] == "no room"
    book.ok("pools.start_ranks = saved")
    ask(book, op="dismiss")
    assert overview(book)["trouble"] is None


def refused(book: Notebook, **asked: Any) -> str:
    """What the sidebar is told when it asks for ranks that this machine does not have."""
    drain(book)
    assert ask(book, pool="local", **asked)["ok"]
    told = news_until(book, lambda news: news["kind"] == "overview" and news["overview"]["trouble"])
    ask(book, op="dismiss")
    return str(told["overview"]["trouble"]["text"])


@pytest.mark.parametrize("op", ["start", "resize"])
def test_ranks_are_started_on_the_type_of_gpu_that_is_picked_and_the_pick_stays(book: Notebook, op: str) -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has GPUs")
    ask(book, op="pick", pool="local", strategy="ddp", size={"gpus": 2, "gpu_type": "A10"})
    before = overview(book)["next"]
    assert before["line"] == "%%distributed --gpus 2 --gpu-type A10 --strategy ddp"

    assert "--gpu-type A10, but" in refused(book, op=op, gpus=2, gpu_type="A10")
    assert overview(book)["next"] == before
    assert "--gpu-type V100, but" in refused(book, op=op, gpus=3, gpu_type="V100")
    assert overview(book)["next"]["line"] == "%%distributed --gpus 3 --gpu-type V100 --strategy ddp"


def test_restarted_ranks_are_on_the_same_type_of_gpu(book: Notebook) -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has GPUs")
    book.ok("%%distributed --ranks 2\nrank")
    book.ok(
        dedent("""\
            from jupyter_distrib.kernel.session import session
            from jupyter_distrib.kernel.settings.cell_options import GroupSize
            from dataclasses import replace
            group = session.current().pools.groups()[-1]
            group.gpus, group.asked = True, replace(group.asked, size=GroupSize(count=2, gpu_type='A10'))""")
    )
    assert "--gpu-type A10, but" in refused(book, op="restart")


def test_a_refresh_tells_of_the_node_and_of_who_holds_its_devices(book: Notebook) -> None:
    book.ok("%%distributed --ranks 2\nrank")
    drain(book)
    ask(book, op="refresh")
    told = news_until(book, lambda news: news["kind"] == "overview" and news["overview"]["pools"][0]["node"])
    node = told["overview"]["pools"][0]["node"]
    assert node["cpus"] >= 1
    assert node["memory_bytes"] > 0
    assert isinstance(node["gpus"], list)


# ---------------------------------------------------------------------------------------------------- logs, quiet


def test_a_log_is_shown_by_its_end_with_whole_lines(book: Notebook) -> None:
    book.ok(
        dedent("""\
            %%distributed --ranks 2
            for i in range(60000):
                print('line', i)""")
    )
    run = overview(book)["runs"][0]

    answer = ask(book, op="logs", run=run["run"], rank=1)
    lines = [line["text"] for line in answer["lines"]]
    assert lines[-1] == "line 59999"
    assert lines[0].startswith("line ")
    assert answer["skipped_bytes"] > 0
    of_64 = ask(book, op="logs", run=run["run"], rank=1, among=64)
    assert len(of_64["lines"]) < len(answer["lines"]) / 8
    assert of_64["lines"][-1] == answer["lines"][-1]
    whole = ask(book, op="logs", run=run["run"], rank=1, whole=True)
    assert (len(whole["lines"]), whole["skipped_bytes"]) == (60_000, 0)
    assert answer["path"].endswith("rank1.log")


def test_a_log_reads_as_it_would_stand_in_a_terminal(book: Notebook) -> None:
    book.ok("%%distributed --ranks 2\nprint('\\x1b[31mred\\x1b[0m')\nprint('50 %\\r100 %\\x07')")
    run = overview(book)["runs"][0]

    assert ask(book, op="logs", run=run["run"], rank=1)["lines"] == [
        {"text": "red", "spans": [[0, 3, "f1"]]},
        {"text": "100 %\\x07", "spans": []},
    ]


def test_saved_runs_are_listed_searched_and_compared(book: Notebook) -> None:
    for lr in (1.0, 3.0):
        book.ok(
            dedent(f"""\
                %%distributed --ranks 2 --timeout {60 * lr:.0f}
                import jupyter_distrib
                rate_of_this_test = {lr}
                for step in range(3):
                    jupyter_distrib.report(loss=rate_of_this_test * step)""")
        )
    found = ask(book, op="history", words="rate_of_this_test report")
    newer, older = found["saved"]
    assert (found["more"], newer["state"], newer["ranks"]) == (0, "done", "0-1")
    assert newer["metrics"] == "loss 6"

    table = ask(book, op="history_table", words="rate_of_this_test report")["table"]
    assert [row["values"]["loss"] for row in table] == [[6.0, "6"], [2.0, "2"]]
    assert table[0]["began_at_s"] > table[1]["began_at_s"]

    compared = ask(book, op="compare", runs=[older["run"], newer["run"]])["comparison"]
    assert compared["head"] == ["run", older["run"], newer["run"]]
    assert ["option.timeout_s", "60.0", "180.0"] in [list(row) for row in compared["rows"]]
    assert [each["columns"]["=loss"] for each in compared["ranks"]] == [[0, 1, 2], [0, 3, 6]]
    assert "-rate_of_this_test = 1.0" in compared["code"][0]
    assert "+rate_of_this_test = 3.0" in compared["code"][0]
    assert "no saved run" in ask(book, op="compare", runs=["999999"])["error"]


def test_a_run_has_a_page_while_it_goes_on_when_it_is_over_and_saved(book: Notebook, tmp_path: Path) -> None:
    enough = tmp_path / "enough"
    book.start(
        dedent(f"""\
            %%distributed --ranks 2 --detach
            import os, time, jupyter_distrib
            print('begun <b>', flush=True)
            jupyter_distrib.report(loss=3.0 + rank)
            while not os.path.exists({str(enough)!r}): time.sleep(0.01)""")
    )
    wait_until(lambda: overview(book)["runs"][0]["state"] == "running")
    run = overview(book)["runs"][0]["run"]

    def page(name: str = run, against: str = "") -> dict[str, Any]:
        found: dict[str, Any] = ask(book, op="page", run=name, against=against)["page"]
        return found

    assert wait_until(lambda: any(rank["columns"] for rank in page()["ranks"]))
    live = page()
    assert (live["state"], live["goes_on"], live["number"], live["logged"]) == ("running", True, "", [0, 1])
    assert "print('begun <b>', flush=True)" in live["code"]
    enough.touch()
    assert wait_until(lambda: page()["state"] == "done")
    ask(book, op="history", words="")  # writes what has ended
    over = page()
    assert (over["goes_on"], over["number"] != "") == (False, True)
    saved = page(over["number"], against=run)
    assert (saved["run"], saved["difference"]) == (run, ["the code is the same"])
    assert saved["ranks"][1]["columns"]["=loss"] == [4.0]
    assert saved["code"] == live["code"]
    lines = ask(book, op="logs", run=over["number"], rank=1, whole=False)["lines"]
    assert [line["text"] for line in lines] == ["begun <b>"]
    assert "no saved run" in ask(book, op="page", run="999999")["error"]


def test_the_runs_of_a_sweep_and_of_a_cell_are_told_apart_from_others(book: Notebook) -> None:
    book.ok('%%distributed --ranks 1 --sweep "lr=[1, 2]"\nlr')
    book.ok("%%distributed --ranks 1\n1")
    book.ok("import jupyter_distrib\ntwice = jupyter_distrib.distributed(ranks=1)(lambda x: 2 * x)")
    book.ok("for run in [twice.submit(x) for x in range(2)]: run.result()")
    later, earlier, alone, second, first = overview(book)["runs"][:5]
    assert alone["group"] == ""
    assert first["group"] == second["group"] != ""
    assert first["group"].startswith("Sweep of Cell In[")
    assert earlier["group"] == later["group"] not in ("", first["group"])
    assert [run["place"] for run in (first, later)] == [0, 0]


def test_a_run_tells_which_ranks_have_a_log(book: Notebook) -> None:
    book.ok("%%distributed --ranks 4\nrank")
    book.ok("%%distributed --on 2,3\nprint('here', rank)")
    run = overview(book)["runs"][0]

    assert run["numbers"] == [2, 3]
    assert ask(book, op="logs", run=run["run"], rank=3)["lines"] == [{"text": "here 3", "spans": []}]


def test_an_idle_kernel_with_ranks_sends_nothing(book: Notebook) -> None:
    book.ok("%%distributed --ranks 2\nrank")
    drain(book)
    with pytest.raises(queue.Empty):
        book.client.get_iopub_msg(timeout=3)


# ---------------------------------------------------------------------------------------------------- settled output


def settled(book: Notebook, cell: str, cell_id: str = "") -> dict[str, Any]:
    drain(book)
    book.cell(cell, cell_id=cell_id)
    found = ask(book, op="settled")["settled"]
    last: dict[str, Any] = found[-1]
    return last


def test_what_a_cell_shows_in_the_end_is_kept_for_pages_that_missed_it(book: Notebook) -> None:
    told = settled(
        book,
        dedent("""\
            %%distributed --ranks 2
            print('hello')
            rank"""),
    )

    (view,), (value,) = told["views"], told["outcome"]
    assert "[0-1] hello" in view["output"]["data"]["text/plain"]
    assert view["output"]["metadata"]["jupyter_distrib"] == {"run": view["run"], "settled": True}
    assert value["output_type"] == "execute_result"
    assert value["data"]["text/plain"] == "rank 0: 0\nrank 1: 1"
    assert told["count"] == value["execution_count"]


def test_the_error_of_a_cell_is_kept_too(book: Notebook) -> None:
    (error,) = settled(book, "%%distributed --ranks 2\nprint('hello')\n1 / 0")["outcome"]

    assert error["output_type"] == "error"
    assert error["ename"] == "ZeroDivisionError"
    assert any("1 / 0" in line for line in error["traceback"])


MANY = """import jupyter_distrib
@jupyter_distrib.distributed(ranks=2)
def said(what):
    print(what)
for number in range(3):
    said.distributed(f'run {number}')
'the end'"""


def test_all_runs_of_a_cell_are_kept_with_one_outcome(book: Notebook) -> None:
    told = settled(book, MANY)

    assert [view["output"]["data"]["text/plain"].count(f"run {n}") for n, view in enumerate(told["views"])] == [1, 1, 1]
    assert [each["data"]["text/plain"] for each in told["outcome"]] == ["'the end'"]


def test_what_a_page_has_saved_is_not_kept(book: Notebook) -> None:
    told = settled(book, "%%distributed --ranks 2\nprint('hello')")
    ask(book, op="saved", runs=[view["run"] for view in told["views"]])

    assert told not in ask(book, op="settled")["settled"]


def test_what_is_saved_still_comes_to_a_page_that_loaded_an_older_file_or_shows_it_live(book: Notebook) -> None:
    told = settled(
        book,
        dedent("""\
            %%distributed --ranks 2
            print('hello')
            rank"""),
        cell_id="c-3",
    )
    runs = [view["run"] for view in told["views"]]
    ask(book, op="saved", runs=runs, saved_ms=2000)

    found = lambda **asked: told in ask(book, op="settled", **asked)["settled"]  # noqa: E731
    assert [found(loaded_ms=before_ms) for before_ms in (1999, 2000, 3000)] == [True, False, False]
    assert found(loaded_ms=3000, live=runs), "its file is a newer one, but what it shows is over"
    assert not found(loaded_ms=3000, live=["another"])
    book.cell("1", cell_id="c-3")
    assert not found(loaded_ms=1999, live=runs), "the cell was executed again"


def test_only_the_last_execution_of_a_cell_is_kept(book: Notebook) -> None:
    told = settled(book, "%%distributed --ranks 2\nprint('hello')", cell_id="c-1")
    assert told["cell"] == "c-1"
    book.cell("1", cell_id="c-1")

    assert "c-1" not in [each["cell"] for each in ask(book, op="settled")["settled"]]


def test_a_cell_that_is_being_executed_again_has_no_earlier_output(book: Notebook, tmp_path: Path) -> None:
    told = settled(book, "%%distributed --ranks 2\nprint('hello')", cell_id="c-2")
    assert told["cell"] == "c-2"
    book.start(
        dedent(f"""\
            import os
            print('begun', flush=True)
            while not os.path.exists({str(tmp_path / "go")!r}): pass"""),
        "c-2",
    )
    book.until("begun")
    kept = [each["cell"] for each in ask(book, op="settled")["settled"]]
    (tmp_path / "go").touch()
    book.finish()
    assert "c-2" not in kept


# ---------------------------------------------------------------------------------------------------- live views

WAITING = """import jupyter_distrib
@jupyter_distrib.distributed(ranks=2)
def wait(number):
    import os, time
    print('turn', number, flush=True)
    while not os.path.exists("ENOUGH" + str(number)):
        time.sleep(0.05)
for number in range(2):
    wait.distributed(number)"""


def test_a_page_that_was_not_there_from_the_beginning_is_given_the_views_of_the_running_cell(
    book: Notebook, tmp_path: Path
) -> None:
    enough = tmp_path / "enough"
    book.start(WAITING.replace("ENOUGH", str(enough)), cell_id="c-2")
    book.until("turn 0")
    (tmp_path / "enough0").touch()
    book.until("turn 1")  # what has ended stands under the cell like the rest
    assert wait_until(lambda: len(overview(book)["views"]) == 2)  # a widget says all that it holds before it is listed
    first, second = overview(book)["views"]
    over, live = (ask(book, op="view", run=each["run"])["view"] for each in (first, second))
    (tmp_path / "enough1").touch()
    book.finish()

    assert first["cell"] == second["cell"] == "c-2"
    assert first["count"] == second["count"] > 0
    assert first["session"] == book.client.session.session
    assert 0 < second["asked_at_s"] <= time.time()
    assert first["model"] != second["model"]
    assert (over["head"]["ended"], live["head"]["ended"]) == (True, False)
    assert over["rank_1"]["state"] == "done"
    assert live["lines_0"]["entries"][0]["text"] == "turn 1"
    assert live["clock"]["elapsed_s"] > 0
    assert "export default" in live["_esm"]
    assert ".jd-run" in live["_css"]
    assert overview(book)["views"] == []
    assert "no cell shows the run" in ask(book, op="view", run=second["run"])["error"]


# ---------------------------------------------------------------------------------------------------- loading


def test_loading_twice_is_harmless_and_unloading_leaves_nothing(notebook: Notebook) -> None:
    notebook.ok("%load_ext jupyter_distrib")
    assert ask(notebook, op="overview")["ok"]
    notebook.ok("%unload_ext jupyter_distrib")

    left = notebook.ok(
        dedent("""\
            import threading, comm
            kernel = get_ipython().kernel
            print('distrib_request' in kernel.control_handlers, 'jupyter_distrib-events' in comm.get_comm_manager().comms)""")
    )
    assert left.stdout.strip() == "False False"
    notebook.client.comm_info(target_name=bridge.COMM)
    assert notebook.client.get_shell_msg(timeout=20)["content"]["comms"] == {}


def test_without_control_handlers_requests_come_by_a_comm_on_which_the_kernel_never_speaks(notebook: Notebook) -> None:
    notebook.ok("%unload_ext jupyter_distrib")
    notebook.ok("k = get_ipython().kernel; saved = k.control_handlers\ndel k.control_handlers")
    notebook.ok("%load_ext jupyter_distrib")
    notebook.ok("k.control_handlers = saved")
    send = notebook.client.shell_channel.send
    message = notebook.client.session.msg
    send(message("comm_open", {"comm_id": "mine", "target_name": bridge.REQUEST_COMM, "data": {}}))
    send(message("comm_msg", {"comm_id": "mine", "data": {"id": "q1", "op": "overview"}}))

    told = news_until(notebook, lambda news: news["kind"] == "answer")["answer"]
    assert told["to"] == "q1"
    assert told["overview"]["route"] == "comm"
